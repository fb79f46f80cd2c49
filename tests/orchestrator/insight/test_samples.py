"""Samples of a run: conditions, selection and the terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from troupe.orchestrator.cli import app
from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.insight.sample_view import CONVERSATION_COLUMNS, show_samples, show_table, visible
from troupe.orchestrator.insight.samples import (
    SampleQuery,
    _connect,
    count_samples,
    select_samples,
    split_columns,
)
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.samples import SAMPLES

HOSTILE = "[bold red]x[/] \x1b[31mred\x07 \u202egnp\u2069 \ud83d [link=file:///etc]y[/link]"


def row(step: int, number: int, **columns: Any) -> dict[str, Any]:
    """A sample with one token more than its number."""
    tokens = number + 1
    values = {
        "step": step,
        "prompt_uid": f"p{number // 2}",
        "sample_index": number % 2,
        "attempt": 0,
        "segment": 0,
        "prompt_ids": [1, 2],
        "response_ids": list(range(tokens)),
        "rollout_logprobs": [-0.5] * tokens,
        "loss_mask": [True] * tokens,
        "weight_versions": [{"version": step - 1, "start": 0, "end": tokens}],
        "turns": [],
        "finish_reason": "length" if number == 3 else "stop",
        "episode_status": "ok",
        "response": f"answer {number}",
        "messages": json.dumps([{"role": "user", "content": f"question {number}"}]),
        "conversation": "",
        "turn_rewards": [],
        "answer": "7",
        "metadata": "{}",
        "engine": "rollout-0",
        "generate_s": 0.5,
        "first_token_s": 0.1,
        "status": "ok",
        "reward": number - 1.5,
        "reward_spans": [],
        "components": [{"name": "exact", "value": float(number)}],
        "trained": True,
        "advantages": [0.5] * tokens,
        "returns": None,
        "old_logprobs": None,
        "ref_logprobs": None,
        "values": None,
        "logprobs": [-0.25] * tokens,
        "entropy": [1.5] * tokens,
    }
    return values | columns


def write(folder: Path, step: int, rows: list[dict[str, Any]], schema: pa.Schema = SAMPLES) -> None:
    path = folder / "trajectories" / f"step-{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "spec.yaml").write_text("name: tiny\n")
    write(tmp_path, 1, [row(1, number) for number in range(4)])
    failed = row(2, 2, reward=None, status="exact raised", trained=False, advantages=None, logprobs=None)
    write(tmp_path, 2, [row(2, 0), row(2, 1, response="no, therefore 7"), failed])
    return RunFolder(tmp_path)


def selected(run: RunFolder, **query: Any) -> list[tuple[int, float | None]]:
    table = select_samples(run, SampleQuery(**query), ["step", "reward"])
    return [(one["step"], one["reward"]) for one in table.to_pylist()]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("reward < 0 AND step > 1", [(2, -1.5), (2, -0.5)]),
        ("reward BETWEEN 0 AND 1.5", [(1, 0.5), (1, 1.5)]),
        ("step == 2 and not trained", [(2, None)]),
        ("reward IS NULL OR finish_reason = 'length'", [(1, 1.5), (2, None)]),
        ("reward IS NOT NULL AND status != 'ok'", []),
        ("response LIKE '%therefore%'", [(2, -0.5)]),
        ("step = 2 AND NOT contains(response, 'therefore')", [(2, -1.5), (2, None)]),
        ("reward IN (-1.5, 1.5)", [(1, -1.5), (1, 1.5), (2, -1.5)]),
        ("sample_index NOT IN (0) AND step IN [1, 3]", [(1, -0.5), (1, 1.5)]),
        ("len(response_ids) > 3 OR len(response) = 15", [(1, 1.5), (2, -0.5)]),
        ('"returns" IS NULL AND list_avg(entropy) > 1 AND reward > 1', [(1, 1.5)]),
        ("components[1].value = 3 -- of the exact answer", [(1, 1.5)]),
        ("step < 99999999999999999999 AND reward > 1", [(1, 1.5)]),
    ],
)
def test_a_condition_selects_its_samples(
    run: RunFolder, condition: str, expected: list[tuple[int, float | None]]
) -> None:
    assert selected(run, where=condition) == expected
    assert count_samples(run, SampleQuery(where=condition)) == len(expected)


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("rewrd < 0", "there is no column 'rewrd': did you mean 'reward'?"),
        ("reward < 'a'", "Could not convert string 'a' to DOUBLE"),
        ("advantages > 0", "Cannot compare values of type FLOAT[]"),
        ("reward < ", "syntax error"),
        ("0 < reward <= 1", "use AND"),
        ("reward is None", "IS NULL or IS NOT NULL"),
        ("response contains 'x'", "response LIKE '%text%'"),
        ('status == "ok"', "there is no column 'ok'; SQL writes text in single quotes"),
        ("__import__('os').system('true')", "does not exist"),
        ("CAST(response AS INT) > 1", "Could not convert string 'answer 0'"),
        ("regexp_matches(response, '(')", "missing )"),
        ("true; SELECT 1", "expression list"),
        ("true) OR (true", "syntax error"),
        ("step, step", "single expression"),
        ("sum(step) > 1", "aggregates"),
        ("", "SELECT clause"),
        ("\ud800", "surrogate"),
        ("NOT " * 600 + "trained", "longer than 2000 characters"),
    ],
)
def test_a_condition_that_cannot_be_used_is_one_line(run: RunFolder, condition: str, problem: str) -> None:
    with pytest.raises(UsageError) as error:
        selected(run, where=condition)
    assert str(error.value).startswith("--where: ") and problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "condition",
    [
        "step < (SELECT count(*) FROM read_text('{file}'))",
        "EXISTS (FROM read_csv('{file}'))",
        "EXISTS (FROM '{file}')",
        "EXISTS (FROM read_parquet('{file}'))",
        "EXISTS (FROM glob('{folder}/*'))",
        "true; COPY (SELECT 1) TO '{folder}/new.csv'",
        "true; SET enable_external_access = true",
        "EXISTS (FROM run)",
    ],
)
def test_a_condition_reaches_nothing_but_the_samples(run: RunFolder, condition: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    text = condition.format(file=secret, folder=tmp_path)
    with pytest.raises(UsageError, match="--where: "):
        selected(run, where=text)
    assert not (tmp_path / "new.csv").exists()


def test_a_database_loads_no_extension_and_keeps_its_settings() -> None:
    with _connect() as connection:
        for statement in ("INSTALL httpfs", "LOAD httpfs", "SET enable_external_access = true"):
            with pytest.raises(duckdb.Error, match=r"disabled|locked"):
                connection.execute(statement)


def test_step_group_sort_and_limit(run: RunFolder) -> None:
    assert selected(run, step=1, group="1") == [(1, 0.5), (1, 1.5)]
    assert selected(run, group="p0") == [(1, -1.5), (1, -0.5), (2, -1.5), (2, -0.5)]
    assert selected(run, sort="-reward", limit=2) == [(1, 1.5), (1, 0.5)]
    assert selected(run, sort="-step,reward", limit=2) == [(2, -1.5), (2, -0.5)]
    assert selected(run, limit=3) == [(1, -1.5), (1, -0.5), (1, 0.5)]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"step": 9}, "--step: there are no samples of step 9: there are those of 1 to 2"),
        ({"group": "1"}, "name it with --step"),
        ({"step": 2, "group": "7"}, "step 2 has groups 0 to 1"),
        ({"sort": "rewards"}, "--sort: there is no column 'rewards': did you mean 'reward'?"),
        ({"sort": "-advantages"}, "advantages is a list for each sample"),
    ],
)
def test_a_query_that_cannot_be_answered_is_a_usage_error(run: RunFolder, query: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem.replace("?", r"\?")):
        selected(run, **query)


def test_files_of_earlier_versions_are_read_with_null(run: RunFolder) -> None:
    later = ("step", "trained", "entropy", "logprobs", "source", "player", "feedback")
    later += ("teacher_ids", "teacher_logprobs", "teacher_weights")
    earlier = pa.schema([field for field in SAMPLES if field.name not in later])
    values = row(3, 0)
    write(run.path, 3, [{name: values[name] for name in earlier.names}], earlier)
    table = select_samples(run, SampleQuery(where="step == 3"), ["step", "reward", "entropy", "trained"])
    assert table.to_pylist() == [{"step": 3, "reward": -1.5, "entropy": None, "trained": None}]
    assert selected(run, where="entropy IS NULL", step=3) == [(3, -1.5)]


def test_a_run_without_samples_says_why(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("name: tiny\n")
    with pytest.raises(UsageError, match=r"output\.trajectories is false"):
        selected(RunFolder(tmp_path))


def shown(show: Callable[[Console, pa.Table], None], table: pa.Table) -> str:
    out = io.StringIO()
    show(Console(file=out, width=100, markup=False, emoji=False, highlight=False, force_terminal=True), table)
    return out.getvalue()


def plain(text: str) -> str:
    """The text without the colours that rich adds."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_sample_reads_as_a_conversation_with_its_rewards(run: RunFolder) -> None:
    text = plain(shown(show_samples, select_samples(run, SampleQuery(step=2), CONVERSATION_COLUMNS)))
    for part in (
        *("step 2  p0[0]  reward -1.5 (exact 0)  advantage +0.5  1 tokens, stop  version 1", "answer 7"),
        *("user\nquestion 0\nassistant\nanswer 0\n", "no reward: exact raised  not trained"),
    ):
        assert part in text, text


def test_an_episode_shows_all_its_messages(run: RunFolder) -> None:
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]
    write(run.path, 4, [row(4, 0, conversation=json.dumps([*talk, {"role": "tool", "content": "12"}]))])
    text = plain(shown(show_samples, select_samples(run, SampleQuery(step=4), CONVERSATION_COLUMNS)))
    assert 'user\ngo\nassistant\nnull\n{"tool_calls": [{"name": "add"}]}\ntool\n12\n' in text


def test_hostile_text_stays_text(run: RunFolder) -> None:
    hostile = HOSTILE.replace("\ud83d", "")  # no surrogate can be in a file
    messages = json.dumps([{"role": hostile, "content": hostile}])
    values = {"response": hostile, "messages": messages, "answer": hostile, "status": hostile, "reward": None}
    write(run.path, 5, [row(5, 0, prompt_uid=hostile, finish_reason=hostile, **values)])
    table = select_samples(run, SampleQuery(step=5), CONVERSATION_COLUMNS)
    conversation, columns = shown(show_samples, table), shown(show_table, table.select(["response", "answer"]))
    for text in (conversation, columns):
        assert "[bold red]" in text.replace("\n", "") and "\\x1b[31m" in text.replace("\n", "")
        assert not {"\x07", "\u202e", "\u2069"} & set(text)
        assert "\x1b[31mred" not in text


@given(st.text())
def test_shown_text_has_no_character_that_steers_a_terminal(text: str) -> None:
    assert all(char.isprintable() or char in "\n\t" or char.isspace() for char in visible(text))


def test_a_table_of_columns_cuts_what_is_long(run: RunFolder) -> None:
    write(run.path, 6, [row(6, 2, response="x" * 500)])
    names = ["reward", "entropy", "response"]
    text = plain(shown(show_table, select_samples(run, SampleQuery(step=6), names)))
    assert "3 values, mean 1.5" in text.replace("\n", " ") and "x" * 100 not in text.replace("\n", "")


def test_columns_are_named_one_by_one() -> None:
    assert split_columns("step, reward,step") == ["step", "reward"]
    with pytest.raises(UsageError, match="did you mean 'entropy'"):
        split_columns("step,entropie")
    with pytest.raises(UsageError, match="at least one"):
        split_columns(" , ")


def test_a_damaged_file_is_a_data_error(run: RunFolder) -> None:
    (run.path / "trajectories" / "step-000003.parquet").write_bytes(b"PAR1 not a file")
    (run.path / "trajectories" / ".step-000004.parquet.12").write_bytes(b"being written")
    with pytest.raises(DataError, match="cannot be read"):
        selected(run, where="reward < 0")
    assert selected(run, step=2, limit=1) == [(2, -1.5)]


def test_the_command_shows_conversations_and_json(run: RunFolder) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["samples", str(run.path), "--where", "step == 1", "--limit", "2"])
    assert result.exit_code == 0 and "question 1" in result.output and "2 of 4 samples" in result.output
    columns = "step,reward,advantages"
    result = runner.invoke(
        app, ["samples", str(run.path), "--sort", "reward", "--limit", "2", "--json", "--columns", columns]
    )
    first, second = json.loads(result.stdout)
    assert first.keys() == set(columns.split(",")) and first["reward"] == -1.5 <= second["reward"]
