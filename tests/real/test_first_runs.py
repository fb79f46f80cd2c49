"""The first runs that the documentation offers on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.real.commands import Run, run_troupe, running

pytestmark = [pytest.mark.real, pytest.mark.long]

FIRST_STEPS = ("evaluation=null", "checkpoint={every_steps: 0, keep: 1}", "roles.policy.schedule=constant")
"""Without evaluation, and with the rate at which a longer run begins."""
LEAST_RISE = 0.1
"""Of the mean reward from the first step to the second, which had 0.34 more, with a standard error of about 0.08;
processors round differently, and sample differently."""


def first_steps(folder: Path, spec: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Metrics of the first steps of a spec."""
    with running(Run(folder, spec, f"schedule.steps={steps}", *FIRST_STEPS, *overrides, name=spec.stem)) as run:
        assert run.wait() == 0, run.output
        return run.metrics


def test_the_demo_learns(demo_model: Path, tmp_path: Path) -> None:
    """It first learns to end its answers: 0.34 of the responses are truncated in the first step, 0.05 in the second."""
    spec = ROOT / "deploy" / "specs" / "laptop-grpo.yaml"
    first, second = first_steps(tmp_path, spec, 2, f"model.path={demo_model}", "roles.policy.min_lr_ratio=0")
    assert second["reward/mean"] > first["reward/mean"] + LEAST_RISE, (first, second)
    assert second["truncated"] < first["truncated"] / 2, (first, second)


def test_the_spec_of_the_tutorial_has_something_to_learn_from(demo_model: Path, tmp_path: Path) -> None:
    """The tasks that `init` chooses are neither too easy nor too hard for the model."""
    spec = tmp_path / "my.yaml"
    written = ("init", "--model", str(demo_model), "--data", "reasoning_gym:chain_sum", "--output", str(spec))
    assert "easiest of their kind" in run_troupe(tmp_path, *written)
    (step,) = first_steps(tmp_path, spec, 1, "schedule.prompts_per_step=4")
    assert 0.1 < step["reward/mean"] < 0.9
