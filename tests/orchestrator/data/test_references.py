"""The reference answers whose mean score is the offset of a reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.data.references import MOST
from troupe.orchestrator.data.summary import RunData, load_data
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document

GRPO = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
OFFSETS = {"a": "summary", "b": "answer", "c": 2}
BY_ROLE = "roles.reward.functions=[{name: reward_model, args: {model: a}}, {name: reward_model, args: {model: c}}]"


def model(name: str) -> dict[str, Any]:
    return {"name": "reward_model", "args": {"model": name}}


def source(folder: Path, file: str, rows: int, **fields: Any) -> dict[str, Any]:
    """A source of so many rows with an answer and a summary, and its fields."""
    lines = ({"prompt": f"{file} {n}", "answer": f"answer {n}", "summary": f"summary {n}"} for n in range(rows))
    path = folder / f"{file}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"kind": "jsonl", "path": str(path), "metadata": ["summary"]} | fields


def loaded(*overrides: str, models: str = "ac") -> RunData:
    given = json.dumps({name: {"path": name, "offset": OFFSETS[name]} for name in models})
    return load_data(plan_runs(read_document(GRPO, [f"roles.reward.models={given}", *overrides]))[0].spec)


def test_each_set_of_rewards_has_the_references_of_its_sources(tmp_path: Path) -> None:
    """The sources `one` and `three` share the role's functions, and `two` has its own, as has a held-out set."""
    own = [model("b"), model("a")]
    mixture = [
        source(tmp_path, "one", 3, name="one"),
        source(tmp_path, "two", 2, name="two", rewards=own),
        source(tmp_path, "three", 2, name="three", answer=None),
    ]
    held_out = {"words": source(tmp_path, "words", 1, rewards=[model("a") | {"weight": 1}])}
    data = [f"data.train={json.dumps(mixture)}", f"data.eval={json.dumps(held_out)}", BY_ROLE]
    found = {
        (one.rewards, one.model): (
            one.metric,
            sorted(row["origin"] + " " + row["response"] for row in rows.to_pylist()),
        )
        for one, rows in loaded(*data, "evaluation={}", models="abc").references.items()
    }
    ones, threes = (
        [f"{name}.jsonl:{n + 1} summary {n}" for n in range(rows)] for name, rows in (("one", 3), ("three", 2))
    )
    twos = [f"two.jsonl:{n + 1} summary {n}" for n in range(2)]
    assert found == {
        ("", "a"): ("reward/a/offset", sorted(ones + threes)),
        ("data.train.1", "b"): ("source/two/b/offset", [f"two.jsonl:{n + 1} answer {n}" for n in range(2)]),
        ("data.train.1", "a"): ("source/two/a/offset", twos),
        ("data.eval.words", "a"): ("", sorted(ones + twos + threes)),
    }


def test_the_rows_are_chosen_by_the_seed(tmp_path: Path) -> None:
    data = [f"data.train={json.dumps(source(tmp_path, 'one', 2 * MOST))}", BY_ROLE]

    def rows(seed: int) -> list[str]:
        (table,) = loaded(*data, f"seed={seed}").references.values()
        return table["response"].to_pylist()

    assert rows(1) == rows(1) and len(set(rows(1))) == MOST
    assert set(rows(1)) != set(rows(2))


@pytest.mark.parametrize("value", [None, "", " \n", 7], ids=["null", "empty", "blank", "number"])
def test_a_row_without_a_reference_is_named(tmp_path: Path, value: Any) -> None:
    one = source(tmp_path, "one", 2)
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "last", "answer": "1", "summary": value}) + "\n")
    with pytest.raises(
        DataError, match=r"^roles\.reward\.models\.a\.offset: one\.jsonl:3: there is no text in 'summary'"
    ):
        loaded(f"data.train={json.dumps(one)}", BY_ROLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["models.a.offset=summry"], r"'summry' is no number, and neither the answer nor in data\.train\.metadata"),
        (["models.a.offset=summry"], r"did you mean 'summary'\?"),
        (["models.a.offset=[1]"], r"expected a number or text, got a list$"),
        (["models.a.offset=null"], r"expected a number or text, got nothing$"),
    ],
)
def test_a_column_that_is_not_read_is_refused(tmp_path: Path, changes: list[str], message: str) -> None:
    data = f"data.train={json.dumps(source(tmp_path, 'one', 2))}"
    with pytest.raises(SpecError, match=rf"roles\.reward\.models\.a\.offset: .*{message}"):
        loaded(data, BY_ROLE, *(f"roles.reward.{change}" for change in changes))


def test_an_episode_has_no_reference(tmp_path: Path) -> None:
    data = f"data.train={json.dumps(source(tmp_path, 'one', 2))}"
    environment = "roles.environment={cpus: 0.2, name: guess_number, args: {low: 1, high: 10, guesses: 2}}"
    with pytest.raises(SpecError, match=r"models\.a\.offset: the samples of data\.train are episodes"):
        loaded(data, BY_ROLE, environment)


def test_a_model_that_scores_no_training_prompt_has_no_reference(tmp_path: Path) -> None:
    one = source(tmp_path, "one", 2)
    held_out = {"words": source(tmp_path, "words", 1, rewards=[model("b")])}
    data = [f"data.train={json.dumps(one)}", f"data.eval={json.dumps(held_out)}", BY_ROLE, "evaluation={}"]
    with pytest.raises(SpecError, match=r"models\.b\.offset: the model scores no source of data\.train"):
        loaded(*data, models="abc")
