"""The length of a run as passes over its data: `schedule.data_epochs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.orchestrator.runs.epochs import plan_counted
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.examples import example_text
from troupe.orchestrator.spec.load import parse_spec, plan_runs, read_document
from troupe.orchestrator.spec.yaml_reader import override, parse

MIXED = "data.train=[{name: a, kind: jsonl, path: deploy/specs/data/demonstrations-train.jsonl}]"


def counted(example: str, *overrides: str) -> tuple[list[RunSpec], list[str]]:
    """The specs of an example, and the lines about their steps."""
    lines: list[str] = []
    runs = plan_counted(read_document(f"examples:{example}", overrides), lines.append)
    return [run.spec for run in runs], lines


@pytest.mark.parametrize(
    ("example", "overrides", "steps", "line"),
    [
        (
            "tiny-sft",
            ["schedule.data_epochs=2"],
            6,
            "tiny-sft: 6 steps (data_epochs 2 x 48 rows / examples_per_step 16)",
        ),
        ("tiny-sft", ["schedule.data_epochs=0.5"], 2, "2 steps (data_epochs 0.5 x 48 rows"),
        ("tiny-grpo", ["schedule.data_epochs=3"], 24, "24 steps (data_epochs 3 x 32 rows / prompts_per_step 4)"),
        ("tiny-grpo", ["schedule.data_epochs=3", "data.train.dedupe=true"], 23, "x 30 rows"),
    ],
)
def test_passes_become_steps(example: str, overrides: list[str], steps: int, line: str) -> None:
    (spec,), (said,) = counted(example, *overrides)
    assert spec.schedule.steps == steps
    assert line in said
    again = parse_spec(parse(spec.as_yaml(), "spec.yaml"))
    assert again == spec, "the spec in the run folder has steps only"


def test_each_stage_has_its_own_steps() -> None:
    specs, lines = counted("tiny-three-stage", "stages.sft.schedule.data_epochs=2", "stages.ppo.schedule.data_epochs=1")
    assert [spec.schedule.steps for spec in specs] == [6, 6, 3]
    assert [line.partition(":")[0] for line in lines] == ["tiny-three-stage-sft", "tiny-three-stage-ppo"]


def test_steps_and_passes_together_are_refused_unless_set_decides(tmp_path: Path) -> None:
    text = example_text("tiny-sft").replace("steps: 12,", "steps: 12, data_epochs: 2,")
    with pytest.raises(SpecError, match=r"f\.yaml:11: schedule\.data_epochs: and schedule\.steps are both given"):
        plan_counted(parse(text, "f.yaml"), print)
    for assignment, steps in (("schedule.steps=2", 2), ("schedule.data_epochs=3", 9)):
        (run,) = plan_counted(override(parse(text, "f.yaml"), [assignment]), print)
        assert run.spec.schedule.steps == steps
        assert run.spec.schedule.data_epochs is None
    with pytest.raises(SpecError, match="both given"):
        plan_counted(override(parse(text, "f.yaml"), ["schedule.steps=2", "schedule.data_epochs=3"]), print)


@pytest.mark.parametrize(
    ("example", "overrides", "why"),
    [
        ("tiny-sft", [MIXED], "the sources of a mixture have separate passes"),
        ("tiny-grpo", ["data.curriculum={solved_at: 1.0}"], "with data.curriculum a pass leaves prompts out"),
        ("tiny-grpo", ["algorithm.dynamic_sampling=2"], "with algorithm.dynamic_sampling a step draws more prompts"),
        ("tiny-sft", ["schedule.data_epochs=0"], "expected a number above 0, got '0'"),
        ("tiny-sft", ["schedule.data_epochs=two"], "expected a number above 0, got 'two'"),
        ("tiny-sft", ["data.train.path=none.jsonl"], r"none\.jsonl"),
    ],
)
def test_passes_that_are_no_known_number_of_steps(example: str, overrides: list[str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        counted(example, "schedule.data_epochs=2", *overrides)


def test_where_no_data_are_read_the_steps_are_asked_for() -> None:
    document = read_document("examples:tiny-sft", ["schedule.data_epochs=2"])
    with pytest.raises(SpecError, match=r"schedule\.data_epochs: is a number of steps only once the data are read"):
        plan_runs(document)
