"""Fields that would be accepted without an effect: refused where they can have none, else a warning.

A row changes a spec that has neither problems nor warnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.load import plan_runs, read_document

SPECS = ROOT / "deploy" / "specs"
SHIPPED = sorted(SPECS.rglob("*.yaml"))
HELD_OUT = "{kind: reasoning_gym, recipes: [{name: chain_sum}], size: 4, seed: 9}"


def specs(path: Path, *changes: str) -> list[RunSpec]:
    return [planned.spec for planned in plan_runs(read_document(path, changes))]


WARNED: list[tuple[str, tuple[str, ...], str]] = [
    ("tiny-grpo", (f"data.eval={HELD_OUT}",), "data.eval: the run never evaluates on it; add `evaluation: {}`"),
    ("tiny-grpo", (f"data.eval={{sums: {HELD_OUT}}}",), "data.eval: the run never evaluates on it"),
    ("tiny-sft", ("evaluation=null",), "data.eval: the run never evaluates on it"),
]
"""(spec, changes, beginning of the warning)"""


@pytest.mark.parametrize(("name", "changes", "warning"), WARNED)
def test_what_may_not_be_meant_is_a_warning(name: str, changes: tuple[str, ...], warning: str) -> None:
    path = SPECS / f"{name}.yaml"
    assert [line for spec in specs(path) for line in spec.warnings()] == []
    (found,) = [line for spec in specs(path, *changes) for line in spec.warnings()]
    assert found.startswith(warning)


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("tiny-grpo", ("roles.policy.min_lr_ratio=0.1",), "roles.policy.min_lr_ratio: has no effect on a constant"),
    ("tiny-ppo", ("roles.critic.min_lr_ratio=0.1",), "roles.critic.min_lr_ratio: has no effect on a constant"),
    ("tiny-sft", ("roles.policy.min_lr_ratio=1",), "roles.policy.min_lr_ratio: has no effect on a constant"),
]
"""(spec, changes, beginning of the message)"""
ACCEPTED: list[tuple[str, tuple[str, ...]]] = [
    ("tiny-grpo", ("roles.policy.min_lr_ratio=0.1", "roles.policy.schedule=linear")),
    ("tiny-sft", ("roles.policy.min_lr_ratio=0",)),
    ("tiny-grpo", (f"data.eval={HELD_OUT}", "evaluation={}")),
]
"""Combinations beside these that have an effect, or say what is so anyway."""


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_can_have_no_effect_is_refused_at_its_field(name: str, changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError) as error:
        specs(SPECS / f"{name}.yaml", *changes)
    (problem,) = error.value.problems
    assert str(problem).startswith(f"--set: {message}"), str(problem)


@pytest.mark.parametrize(("name", "changes"), ACCEPTED)
def test_what_has_an_effect_is_accepted_without_a_warning(name: str, changes: tuple[str, ...]) -> None:
    assert [line for spec in specs(SPECS / f"{name}.yaml", *changes) for line in spec.warnings()] == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_spec_has_no_warnings(path: Path) -> None:
    assert [line for spec in specs(path) for line in spec.warnings()] == []
