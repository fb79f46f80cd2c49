"""The trials of a sweep: which settings and seeds, and what is refused before anything starts."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.points import settings_label
from troupe.orchestrator.insight.sweep.trials import Range, drawn, grid, parse_axes, plan_trials
from troupe.orchestrator.runs.epochs import plan_counted
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun, to_send
from troupe.orchestrator.spec.derived.paths import hub_data, hub_models, with_sections
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document
from troupe.orchestrator.spec.yaml_reader import Document, read_file

SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
CHAIN = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
RATE = "roles.policy.learning_rate"


def plan(own: list[str], out: Path | None, file: Path = SFT) -> tuple[Document, tuple[PlannedRun, ...]]:
    document = read_document(file, own)
    return document, plan_counted(document, print, out)


def plan_stages(own: list[str], out: Path | None) -> tuple[Document, tuple[PlannedRun, ...]]:
    return plan(own, out, CHAIN)


def test_one_value_is_that_of_all_trials_and_several_are_tried() -> None:
    fixed, varied = parse_axes([f"{RATE}=1e-3,2e-3", "schedule.steps=3", "model.dtype=float32,bfloat16"], ranges=False)
    assert fixed == {"schedule.steps": 3}
    settings = grid(varied)
    assert [tuple(one.values()) for one in settings] == [
        (rate, dtype) for rate in (1e-3, 2e-3) for dtype in ("float32", "bfloat16")
    ]
    trials = plan_trials(plan, fixed, settings, 2, None)
    assert [(one.setting, one.spec.seed) for one in trials] == [(s, seed) for seed in (7, 8) for s in range(4)]
    third = trials[2]
    assert third.spec.roles.policy.learning_rate == 2e-3 and third.spec.schedule.steps == 3
    assert (third.spec.name, str(third.folder)) == ("tiny-sft-003", "runs/tiny-sft-sweep/trial-003")
    assert third.label == "learning_rate 0.002, dtype float32, seed 7"
    assert settings_label({"roles.policy.dtype": "float16", "roles.critic.dtype": "float32", "seed": 1}) == (
        "roles.policy.dtype float16, roles.critic.dtype float32, seed 1"
    )
    assert [one.label for one in plan_trials(plan, {}, grid({}), 2, None)] == ["seed 7", "seed 8"]


def test_a_section_and_a_text_that_looks_like_a_number_are_one_value() -> None:
    fixed, varied = parse_axes(["roles.policy.lora={rank: 8, alpha: 64}", "model.revision='12'"], ranges=False)
    assert fixed == {"roles.policy.lora": {"rank": 8, "alpha": 64}, "model.revision": "12"} and not varied


def test_random_settings_are_the_same_for_a_seed_and_different_from_each_other() -> None:
    _, varied = parse_axes(["a=1,2,3", "b=x,y"], ranges=True)
    found = drawn(varied, 4, 0)
    assert found == drawn(varied, 4, 0) and len({str(one) for one in found}) == 4
    with pytest.raises(UsageError, match="--random 6: there are 6 settings"):
        drawn(varied, 6, 0)


def test_a_range_is_drawn_evenly_in_its_logarithm() -> None:
    _, varied = parse_axes(["a=1e-6..1e-2", "b=2..64"], ranges=True)
    settings = drawn(varied, 4000, 1)
    assert all(1e-6 <= one["a"] <= 1e-2 and 2 <= one["b"] <= 64 and isinstance(one["b"], int) for one in settings)
    below = sum(one["a"] < 1e-4 for one in settings) / len(settings)
    assert 0.47 < below < 0.53
    assert Range(0.1, 0.2).draw(random.Random(0)) == float(f"{Range(0.1, 0.2).draw(random.Random(0)):.4g}")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a=1..2"], "a=1..2 is a range: --random N draws from it"),
        (["a=2..1"], "expected two numbers above 0, the smaller one first"),
        (["a=0..1"], "expected two numbers above 0"),
        (["a=1,2", "a=3"], "--set a is given twice"),
    ],
)
def test_axes_that_are_none(texts: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_axes(texts, ranges=said.startswith("expected"))


def test_every_trial_is_checked_and_every_problem_is_named_once() -> None:
    fixed, varied = parse_axes([f"{RATE}=1e-3,x", "schedule.steps=1,0", "stepz=1"], ranges=False)
    with pytest.raises(SpecError) as caught:
        plan_trials(plan, fixed, grid(varied), 2, None)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(set(lines)) == 3
    assert [line.split(": ")[1] for line in sorted(lines)] == [RATE, "schedule.steps", "stepz"]
    for field in ("seed", "stages.sft.seed"):
        with pytest.raises(UsageError, match=f"--set {field}: a sweep sets it in each trial"):
            plan_trials(plan, {}, [{field: 1}, {field: 2}], 1, None)
    with pytest.raises(UsageError, match="2000 trials are more than 1000"):
        plan_trials(plan, {}, [{}], 2000, None)


def test_a_trial_of_a_chain_is_all_of_its_stages_with_own_seeds(tmp_path: Path) -> None:
    """Of the stages one has its own seed; in a trial each has its own, as many higher."""
    fixed, varied = parse_axes(["stages.ppo.schedule.steps=2,3", "stages.sft.seed=40"], ranges=False)
    trials = plan_trials(plan_stages, fixed, grid(varied), 2, None)
    assert [[run.spec.seed for run in trial.runs] for trial in trials] == [[40, 7, 7]] * 2 + [[41, 8, 8]] * 2
    assert [trial.spec.schedule.steps for trial in trials] == [2, 3, 2, 3]
    last = trials[3]
    assert (last.label, str(last.folder)) == ("steps 3, seed 8", "runs/tiny-three-stage-sweep/trial-004")
    assert (last.spec.name, last.last) == ("tiny-three-stage-004-ppo", last.folder / "ppo")
    to_send(last.document, last.runs).write(tmp_path / "trial.yaml")
    again = plan_runs(read_file(tmp_path / "trial.yaml"), last.folder)
    assert [(run.spec, run.out) for run in again] == [(run.spec, run.out) for run in last.runs]


SHARED = """\
name: shared
model: {path: own/model}
roles: {policy: {}}
algorithm: {name: sft}
schedule: {steps: 2, examples_per_step: 8}
data: {train: [{name: a, kind: hub, dataset: own/a}, {name: b, kind: hub, dataset: own/b}]}
stages: {first: , second: {model: {path: "stage:first"}}}
"""


def test_a_chain_is_written_with_the_commits_of_its_trial(tmp_path: Path) -> None:
    """Also those in a list of the shared part: each stage gets the whole list."""
    file = tmp_path / "shared.yaml"
    file.write_text(SHARED)
    (trial,) = plan_trials(lambda own, out: plan(own, out, file), {}, [{}], 1, None)
    pinned = trial.pinned([replace(run, spec=committed(run.spec)) for run in trial.runs])
    to_send(pinned.document, pinned.runs).write(tmp_path / "trial.yaml")
    again = plan_runs(read_file(tmp_path / "trial.yaml"), trial.folder)
    assert [run.spec for run in again] == [run.spec for run in pinned.runs]
    assert [run.spec.model.revision for run in again] == ["commit", None]
    assert [one.revision for run in again for one in run.spec.offline.data.mixture] == ["commit"] * 4


def committed(spec: RunSpec) -> RunSpec:
    """The spec as `pin_run` returns it."""
    sections = {**hub_models(spec), **hub_data(spec)}
    return with_sections(spec, {name: one.model_copy(update={"revision": "commit"}) for name, one in sections.items()})
