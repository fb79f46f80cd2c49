"""Judges in a spec: what they compare, with which rows and at which temperature."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.orchestrator.spec.test_rollout import GRPO, load
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.spec.errors import SpecError

JUDGED = (
    "roles.judge={model: {path: models/j}, max_tokens: 64}",
    "roles.reward.functions=[{name: judge, args: {rubric: Which is kind?}}]",
)
ARGS = "roles.reward.functions.0.args"
SET = "data.eval.held={kind: jsonl, path: held.jsonl"
WINS = f"{SET}, rewards: [{{name: judge, label: wins, args: {{rubric: r, compare: baseline}}}}]}}"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{ARGS}.compare=pairs",),
        (f"{ARGS}.compare=group", f"{ARGS}.answers=3"),
        (f"{ARGS}.answers=3", "roles.judge.temperature=1"),
        (f"{ARGS}.compare=baseline",),
        (f"{ARGS}.compare=baseline", f"{ARGS}.baseline=other", "data.train.metadata=[other]", "data.train.answer=null"),
        (f"{ARGS}.compare=baseline", f"{ARGS}.baseline=runs/a/stored.parquet", "data.train.answer=null"),
        (f"{ARGS}.compare=pairs", WINS),
    ],
)
def test_comparisons_that_work_are_accepted(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    load(tmp_path, GRPO, *JUDGED, *overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            (f"{ARGS}.compare=pairs", f"{SET}}}"),
            "args.compare: compares the samples of a prompt with each other, which says nothing about the model: give "
            "data.eval.held `rewards`, such as a judge with compare: baseline",
        ),
        (
            (f"{ARGS}.compare=group", "algorithm.name=reinforce_pp", "algorithm.group_size=1"),
            "args.compare: data.train has one sample for each prompt: set algorithm.group_size",
        ),
        (
            (f"{ARGS}.compare=pairs", "algorithm.name=remax", "algorithm.group_size=2"),
            "args.compare: the greedy response of the algorithm's baseline is scored without its group",
        ),
        (
            (f"{ARGS}.compare=baseline", "data.train.answer=null"),
            "args.compare: data.train has no answer to compare with: set its `answer`, or args.baseline",
        ),
        (
            (f"{ARGS}.compare=baseline", f"{ARGS}.baseline=other"),
            "args.baseline: 'other' is not in data.train.metadata",
        ),
        ((f"{ARGS}.answers=3",), "args.answers: are all the same at roles.judge.temperature 0: set it above 0"),
    ],
)
def test_comparisons_that_cannot_work_are_refused(tmp_path: Path, overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(SpecError) as error:
        load(tmp_path, GRPO, *JUDGED, *overrides)
    assert line in str(error.value)


def test_a_held_out_set_with_a_baseline_reports_the_win_rate(tmp_path: Path) -> None:
    (held,) = held_out_sets(load(tmp_path, GRPO, *JUDGED, WINS))
    assert held.compared == ("wins",)
    assert {"eval/held/win_rate", "eval/held/win_rate_low", "eval/held/position_consistency"} <= {*held.metric_names()}
    load(tmp_path, GRPO, *JUDGED, WINS, "evaluation={}", "checkpoint.best={metric: eval/held/win_rate}")
    (other,) = held_out_sets(load(tmp_path, GRPO, *JUDGED, f"{SET}}}"))
    assert other.compared == () and "eval/held/win_rate" not in other.metric_names()
