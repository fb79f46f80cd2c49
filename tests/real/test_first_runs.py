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
"""Of the mean reward from the first step to the next two. They had 0.34 more, with a standard error of about 0.09;
processors round differently, and sample differently."""


def rewards(folder: Path, spec: Path, steps: int, *overrides: str) -> list[float]:
    """Mean rewards of the first steps of a spec."""
    with running(Run(folder, spec, f"schedule.steps={steps}", *FIRST_STEPS, *overrides, name=spec.stem)) as run:
        assert run.wait() == 0, run.output
        return [line["reward/mean"] for line in run.metrics]


def test_the_demo_learns(demo_model: Path, tmp_path: Path) -> None:
    spec = ROOT / "deploy" / "specs" / "laptop-grpo.yaml"
    first, second, third = rewards(tmp_path, spec, 3, f"model.path={demo_model}", "roles.policy.min_lr_ratio=0")
    assert (second + third) / 2 > first + LEAST_RISE, (first, second, third)


def test_the_spec_of_the_tutorial_has_something_to_learn_from(demo_model: Path, tmp_path: Path) -> None:
    """The tasks that `init` chooses are neither too easy nor too hard for the model."""
    spec = tmp_path / "my.yaml"
    written = ("init", "--model", str(demo_model), "--data", "reasoning_gym:chain_sum", "--output", str(spec))
    assert "easiest of their kind" in run_troupe(tmp_path, *written)
    (reward,) = rewards(tmp_path, spec, 1, "schedule.prompts_per_step=4")
    assert 0.1 < reward < 0.9
