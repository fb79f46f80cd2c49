"""Fields that would be accepted without an effect: refused where they can have none, else a warning.

A row changes a spec that has neither problems nor warnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from troupe.orchestrator.spec.base import RunSpec
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


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_spec_has_no_warnings(path: Path) -> None:
    assert [line for spec in specs(path) for line in spec.warnings()] == []


def test_held_out_data_that_are_evaluated_need_no_warning() -> None:
    (spec,) = specs(SPECS / "tiny-grpo.yaml", f"data.eval={HELD_OUT}", "evaluation={}")
    assert spec.warnings() == []
