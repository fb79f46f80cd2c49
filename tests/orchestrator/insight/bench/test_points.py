"""Sweeps as specs, and which points share engines."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.orchestrator.insight.bench.measured import GRPO
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.points import (
    Point,
    grid,
    launch_spec,
    launches,
    measured_spec,
    parse_sweep,
)
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import load_rollout_spec, plan_runs, read_document


def load(overrides: list[str]) -> RunSpec:
    return plan_runs(read_document(GRPO, overrides))[0].spec


def points(*sweeps: str, prompts: int | None = None) -> list[Point]:
    return grid(load, [parse_sweep(text) for text in sweeps], prompts)


def test_a_grid_is_every_combination_of_the_values() -> None:
    found = points("roles.rollout.workers=1,2", "sampling.max_tokens=8,16", prompts=3)
    assert [point.label for point in found] == [
        "workers 1, max_tokens 8",
        "workers 1, max_tokens 16",
        "workers 2, max_tokens 8",
        "workers 2, max_tokens 16",
    ]
    last = found[-1]
    assert last.lines == ("roles.rollout.workers: 2", "sampling.max_tokens: 16")
    assert (last.workers, last.spec.sampling.max_tokens, last.spec.schedule.prompts_per_step) == (2, 16, 3)


def test_without_sweeps_there_is_the_spec_itself() -> None:
    (only,) = points()
    assert only.spec == load([]) and only.label == ""


def test_values_are_yaml() -> None:
    sweep = parse_sweep("sampling.stop=[a, 'b,c'], []")
    assert sweep.values == (["a", "b,c"], [])
    assert parse_sweep("roles.rollout.enforce_eager=true,false").values == (True, False)
    assert parse_sweep("sampling.temperature=0.5,1e0").values == (0.5, 1.0)
    regexes = [point.spec.sampling.structured for point in points("sampling.structured.regex='true',a")]
    assert [found and found.regex for found in regexes] == ["true", "a"]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("roles.rollout.max_num_seq=1,2", "--sweep: roles.rollout.max_num_seq: unknown field (did you mean 'max_num_"),
        ("sampling.max_tokens=0,8", "--sweep: sampling.max_tokens: must be at least 1, got 0"),
        ("sampling.max_tokens", "--sweep: expected FIELD=VALUE,VALUE,..., got 'sampling.max_tokens'"),
        ("sampling.max_tokens=", "--sweep: expected FIELD=VALUE,VALUE,..., got 'sampling.max_tokens='"),
        ("sampling.max_tokens=[", "--sweep: sampling.max_tokens: not valid YAML"),
        ("roles.policy.learning_rate=0.1,0.2", "--sweep: roles.policy.learning_rate: rollouts do not depend on this"),
        ("checkpoint.keep=1,2", "--sweep: checkpoint.keep: rollouts do not depend on this"),
    ],
)
def test_a_sweep_that_cannot_be_measured_is_refused_with_its_field(sweep: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        points(sweep)
    assert str(caught.value).startswith(said)


def test_a_sweep_has_bounds() -> None:
    with pytest.raises(UsageError, match="given twice"):
        points("sampling.max_tokens=4,8", "sampling.max_tokens=16")
    values = ",".join(map(str, range(1, 30)))
    with pytest.raises(UsageError, match="841 points"):
        points(f"algorithm.group_size={values}", f"sampling.max_tokens={values}")


def test_points_share_engines_unless_an_engine_would_be_started_differently() -> None:
    found = points("roles.rollout.max_num_seqs=16,32", "roles.rollout.workers=1,3", "sampling.max_tokens=4,8")
    groups = launches(found)
    assert [len(group) for group in groups] == [4, 4]
    assert {point.spec.roles.rollout.max_num_seqs for point in groups[0]} == {16}
    assert launch_spec(groups[0]).roles.rollout.workers == 3
    assert len(launches(points("algorithm.group_size=2,4", "schedule.prompts_per_step=1,2", "seed=1"))) == 1
    recording = points("sampling.router_replay=true,false", "roles.rollout.gpus=1", "roles.policy.gpus=1")
    assert [len(group) for group in launches(recording)] == [1, 1]


def test_no_reward_replaces_a_group_while_it_is_measured() -> None:
    dapo = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-dapo.yaml")
    spec = measured_spec(dapo, 5)
    assert spec.algorithm.dynamic_sampling == 0 and spec.group_size == dapo.group_size
    assert (spec.schedule.steps, spec.schedule.max_staleness) == (5, 0)
    assert spec.failures.engine_restarts == 0
    assert spec.roles == dapo.roles and spec.sampling == dapo.sampling
