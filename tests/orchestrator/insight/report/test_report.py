"""The data and the text of the page, without a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from tests.probes import ask_here
from troupe.orchestrator.cli import app
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.report.overview import (
    MOST_POINTS,
    fitting,
    overview,
    resumes,
    sections,
    spec_differences,
    spread,
)
from troupe.orchestrator.insight.report.page import as_json, render
from troupe.orchestrator.insight.report.report import page_data, samples_data, write_report
from troupe.orchestrator.insight.report.samples import TokenTexts
from troupe.orchestrator.rollouts.evaluation_log import EvaluationLog
from troupe.orchestrator.rollouts.held_out import SetResult
from troupe.orchestrator.telemetry.run_folder import RunFolder

from .folders import GROUP, write_evaluations, write_run

BYTES_OF_A_RUN = 30_000
"""Most that a run of `write_run` may add to a page: four steps of 16 samples each are 15 kB of it."""


@pytest.fixture(autouse=True)
def asked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load tokenizers in this process, but for one test."""
    if "own_process" not in request.fixturenames:
        monkeypatch.setattr("troupe.orchestrator.insight.report.samples.ask", ask_here)


@pytest.fixture
def own_process() -> None:
    """Load tokenizers in another process, as commands do."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of four steps with 16 samples each."""
    return RunFolder(write_run(tmp_path_factory.mktemp("runs") / "run"))


def test_evaluations_stand_side_by_side(tmp_path: Path) -> None:
    """Values by hand: at first 1 of 4 samples is right for one prompt, at last 3 and 2."""
    folder = write_run(tmp_path / "run")
    assert overview(RunFolder(folder))["evaluations"] == {}
    write_evaluations(folder)
    found = overview(RunFolder(folder))["evaluations"]
    assert (found["first"], found["last"]) == (0, 4)
    math, form = found["sets"]
    assert (math["sampling"], math["rewards"]) == (
        "4 samples at temperature 1, top-p 0.9, at most 64 tokens",
        "numeric",
    )
    assert (math["environment"], form["environment"]) == ("", "guess")
    values = {row["name"]: (row["first"]["value"], row["last"]["value"]) for row in math["rows"]}
    assert values["avg@4"] == (1 / 8, 5 / 8)
    assert values["maj@4"] == (0.25, 1.0)  # two of four say the same; at first one of these is solved, for one prompt
    assert [(one["part"], one["rows"][1]["last"]["value"]) for one in math["parts"]] == [
        ("level 0", 0.75),
        ("level 1", 0.5),
    ]
    assert form["rows"][0]["first"] is None and form["rows"][0]["last"]["value"] == 5 / 8  # all failed at first
    (folder / "evaluation.json").write_text('{"format": 1, "sets": {"math": {}}, "evaluations": [{"step": 0}]}')
    assert overview(RunFolder(folder))["evaluations"] == {}


def test_evaluations_that_were_made_otherwise_are_not_compared(tmp_path: Path) -> None:
    """A run that resumes with other sampling, and one more set."""
    folder = write_run(tmp_path / "run")
    write_evaluations(folder)
    content = json.loads((folder / "evaluation.json").read_text())
    sets = {label: one | {"sampling": one["sampling"] | {"samples": 8}} for label, one in content["sets"].items()}
    log = EvaluationLog(folder / "evaluation.json", {**sets, "new": sets["math"]}, 4)
    for step in (6, 8):
        results = {**content["evaluations"][-1]["sets"], "new": content["evaluations"][-1]["sets"]["math"]}
        log.add(step, {label: TypeAdapter(SetResult).validate_python(result) for label, result in results.items()})
    found = overview(RunFolder(folder))["evaluations"]
    assert (found["first"], found["last"]) == (6, 8)
    assert [one["label"] for one in found["sets"]] == ["math", "<b>form</b>", "new"]
    evaluations = json.loads((folder / "evaluation.json").read_text())["evaluations"]
    assert [one["step"] for one in evaluations] == [0, 2, 4, 6, 8]


def test_json_in_the_page_cannot_end_its_block() -> None:
    hostile = {"text": "</script><!-- & \u2028 \ud800", "tag": "<script>"}
    text = as_json(hostile)
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == hostile
    text.encode("utf-8")


def test_the_page_names_the_hash_of_its_own_code_and_allows_no_connection(run: RunFolder) -> None:
    page = render(page_data([run]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = page.rsplit("<script>", 1)[1].rsplit("</script>", 1)[0]
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = policy[1].replace("&#39;", "'").replace("&#34;", '"')
    assert f"script-src 'sha256-{digest}'" in allowed and "connect-src 'none'" in allowed
    assert "unsafe" not in allowed and "default-src 'none'" in allowed
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "connect-src 'self'" in render(page_data([run]), live=True).replace("&#39;", "'")


def test_a_hostile_name_of_a_run_is_escaped_in_the_title(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", tokens=0)
    spec = (folder / "spec.yaml").read_text().replace("name: tiny-ppo", "name: '</title><script>x</script>'")
    (folder / "spec.yaml").write_text(spec)
    assert "<script>x" not in render(page_data([RunFolder(folder)]))


def test_secrets_of_a_spec_are_in_no_report(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, tokens=0) for name in ("one", "two")]
    for folder in folders:
        spec = (
            (folder / "spec.yaml")
            .read_text()
            .replace("      args:", f"      args:\n        api_key: word-{folder.name}", 1)
        )
        assert "word-" in spec
        (folder / "spec.yaml").write_text(spec)
    page = json.dumps(page_data([RunFolder(folder) for folder in folders]))
    assert "api_key: (hidden)" in page and "word-" not in page


@pytest.mark.usefixtures("own_process")
def test_tokens_come_back_from_their_one_byte_form(run: RunFolder) -> None:
    block = samples_data(run, 2**24)["blocks"][-1]
    table = run.samples(4)
    known = block["values"]["advantage"]
    step = (known["high"] - known["low"]) / 254
    for row, expected in enumerate(table["advantages"].to_pylist()):
        levels = np.frombuffer(base64.b64decode(known["rows"][row]), np.uint8)
        assert np.allclose(known["low"] + (levels - 1.0) * step, expected, atol=step)
    ids = np.frombuffer(base64.b64decode(block["tokens"][0]), np.uint16)
    assert len(ids) == len(table["response_ids"][0]) and len(block["vocabulary"]) > max(ids)


def test_without_a_tokenizer_the_texts_of_responses_remain(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    spec = (folder / "spec.yaml").read_text().replace(".cache/models/tiny-llama", "no/such/model")
    (folder / "spec.yaml").write_text(spec)
    data = samples_data(RunFolder(folder), 2**24)
    assert "no/such/model" in data["problem"]
    assert "tokens" not in data["blocks"][0] and data["blocks"][0]["response"][0].startswith("The answer")


def test_a_token_that_the_tokenizer_does_not_know_has_its_number() -> None:
    texts = TokenTexts({"path": ".cache/models/tiny-llama"})
    texts.learn([200, 10_000_000])
    assert texts and "10000000" in texts[10_000_000]


def test_samples_beyond_the_budget_are_left_out_by_whole_steps_and_the_page_says_so(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "run", steps=8, tokens=0))
    whole = samples_data(run, 2**24)
    assert [one["step"] for one in whole["blocks"]] == list(range(1, 9)) and whole["rule"] == ""
    part = samples_data(run, len(json.dumps(whole["blocks"])) // 2)
    kept = [one["step"] for one in part["blocks"]]
    assert 2 <= len(kept) <= 4 and kept[0] == 1 and kept[-1] == 8
    assert f"{len(kept)} of 8 steps" in part["rule"]


def test_runs_share_the_steps_with_samples_and_the_events_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("troupe.orchestrator.insight.report.report.MOST_STEPS", 6)
    monkeypatch.setattr("troupe.orchestrator.insight.report.overview._MOST_EVENTS", 4)
    runs = [RunFolder(write_run(tmp_path / name, steps=9, tokens=0)) for name in ("one", "other")]
    for count, kept, events in ((1, 6, 4), (2, 3, 2)):
        page = page_data(runs[:count])
        for samples, run in zip(page["samples"], page["runs"], strict=True):
            steps = [block["step"] for block in samples["blocks"]]
            assert len(steps) == kept and steps[0] == 1 and steps[-1] == 9
            assert f"{kept} of 9 steps" in samples["rule"] and samples["steps"] == list(range(1, 10))
            assert [event["step"] for event in run["weights"]] == list(range(10 - events, 10))
    given = page_data(runs[:1], 2**24)["samples"][0]
    assert len(given["blocks"]) == 9 and given["rule"] == "", "a number of bytes that is given is the only limit"


def test_a_further_run_adds_its_own_bytes_and_not_the_page_again(tmp_path: Path) -> None:
    """A page of many runs stays small enough to be sent: what is said of a metric or a verdict is in it once."""
    runs = [write_run(tmp_path / f"run-{number}", tokens=0) for number in range(6)]
    one, six = (write_report(runs[:count], tmp_path / f"{count}.html").stat().st_size for count in (1, 6))
    assert (six - one) / 5 < BYTES_OF_A_RUN, (one, six)


def test_the_tokenizer_is_asked_a_few_times_for_any_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step samples tokens that no other has."""
    run, asked = RunFolder(write_run(tmp_path / "run", steps=100, rows=GROUP)), list[list[int]]()

    def ask(entry: str, request: dict[str, Any], timeout_s: float) -> list[list[str]]:
        asked.append(request["ids"])
        return [[str(token) for token in request["ids"]]]

    samples = run.samples
    monkeypatch.setattr("troupe.orchestrator.insight.report.samples.ask", ask)
    monkeypatch.setattr(run, "samples", lambda step, columns=None: moved(samples(step, columns), 10_000 * step))
    blocks = samples_data(run, 2**26)["blocks"]
    assert len(blocks) == 100 and len({one["vocabulary"][0] for one in blocks}) == 100
    assert len(asked) <= 3


def moved(table: pa.Table, by: int) -> pa.Table:
    """The samples with other tokens."""
    place = table.column_names.index("response_ids")
    ids = [[token + by for token in row] for row in table["response_ids"].to_pylist()]
    return table.set_column(place, table.schema.field(place), pa.array(ids, table.schema.field(place).type))


def test_of_one_step_that_is_too_large_the_first_groups_are_kept(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "run", steps=1, rows=10 * GROUP))
    whole = samples_data(run, 2**24)["blocks"][0]
    (part,) = samples_data(run, len(json.dumps(whole)) // 2)["blocks"]
    rows = len(part["group"])
    assert 0 < rows < 10 * GROUP and rows % GROUP == 0
    lengths = {len(part[name]) for name in ("response", "reward", "tokens", "surprise", "status")}
    assert lengths == {rows} and len(part["values"]["advantage"]["rows"]) == rows
    assert part["rows"] == 10 * GROUP, "how many there were, which the page says"
    assert "rows" not in whole
    assert len(part["prompts"]) == rows and part["prompts"] == whole["prompts"][:rows]


def test_a_damaged_file_of_samples_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_run(tmp_path / "run", tokens=0)
    (folder / "trajectories" / "step-000002.parquet").write_bytes(b"PAR1 not a file")
    assert [one["step"] for one in samples_data(RunFolder(folder), 2**24)["blocks"]] == [1, 3, 4]
    assert "step 2 are left out" in caplog.text


def test_steps_are_spread_with_the_first_and_the_last() -> None:
    assert spread(range(1, 101), 5) == [1, 26, 51, 75, 100]
    assert spread([3, 4], 5) == [3, 4] and spread([1, 2, 3], 1) == [3] and spread([], 3) == []
    assert fitting(range(1, 101), lambda step: 10, 50) == [1, 26, 51, 75, 100]
    assert fitting([7, 8], lambda step: 10**9, 1) == [8], "the last step in any case"


def test_long_curves_keep_their_spikes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": step, "time": 1.0, "reward/mean": 100.0 if step == 7001 else 0.5} for step in range(1, 20_001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = overview(RunFolder(folder))["metrics"]["reward/mean"]
    assert len(points["steps"]) <= MOST_POINTS
    assert dict(zip(points["steps"], points["values"], strict=True))[7001] == 100.0


def test_a_run_that_repeats_steps_is_joined() -> None:
    assert resumes([{"event": "run_started", "resume_at": 0}, {"event": "run_started", "resume_at": 5}]) == [5]


def test_metrics_stand_in_the_order_of_their_reference() -> None:
    found = sections(["policy/entropy", "reward/mean", "of/my/own"])
    assert [(one["title"], [metric["name"] for metric in one["metrics"]]) for one in found] == [
        ("Rewards and groups", ["reward/mean"]),
        ("Updates of the policy", ["policy/entropy"]),
        ("Other", ["of/my/own"]),
    ]


def test_specs_are_compared_field_by_field() -> None:
    specs = [
        {"seed": 1, "roles": {"policy": {"workers": 1}}},
        {"seed": 2, "roles": {"policy": {"workers": 1}}, "x": {}},
    ]
    assert spec_differences(specs) == [
        {"field": "seed", "values": ["1", "2"]},
        {"field": "x", "values": ["null", "{}"]},
    ]


def test_weights_ledger_and_memory_are_read_from_what_the_run_recorded(run: RunFolder) -> None:
    found = overview(run)
    assert [one["equal"] for one in found["weights"]] == [True] * 4
    assert found["ledger"]["reasons"] == {"no number": 2}
    assert found["memory"]["planned"]["policy"] > 0.1 and found["memory"]["peaks"]["policy"] > 0.1


def test_a_folder_with_metrics_only_has_a_report(tmp_path: Path, run: RunFolder) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(run.path / "metrics.jsonl", folder)
    assert write_report([folder], tmp_path / "out" / "report.html").stat().st_size > 10_000


def test_the_command_writes_into_the_run_and_refuses_what_is_no_run(run: RunFolder, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run.path)])
    assert result.exit_code == 0 and f"wrote {run.path}/report.html" in result.stdout
    assert f"{run.path}: warning" in result.stdout or "healthy" in result.stdout
    verdicts = CliRunner().invoke(app, ["report", str(run.path), "--json"])
    assert json.loads(verdicts.stdout)[str(run.path)].keys() == {"state", "verdicts"}
    page = CliRunner().invoke(app, ["report", str(run.path), "-o", "-"])
    assert page.stdout.startswith("<!doctype html>") and page.stdout.rstrip().endswith("</html>")
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert isinstance(missing.exception, UsageError)
    folder = CliRunner().invoke(app, ["report", str(run.path), "-o", str(tmp_path)])
    assert isinstance(folder.exception, UsageError)
