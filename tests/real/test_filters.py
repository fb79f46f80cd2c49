"""A run of the shipped spec of DAPO with its filters, resumed. What the filters do is in test_algorithms.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import Run, as_after, checkpoint_weights, running, trajectories

SPEC = ROOT / "deploy" / "specs" / "tiny-dapo.yaml"
LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "masked_samples", "ledger/trained", "ledger/dropped")
STEPS = 5


@pytest.mark.long
def test_a_resumed_run_draws_and_learns_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """Across the second pass over the data, in which the curriculum skips prompts."""
    overrides = (f"schedule.steps={STEPS}", "checkpoint={every_steps: 1, keep: 10}")
    with running(Run(tmp_path, SPEC, *overrides, name="dapo")) as whole:
        assert whole.wait() == 0, whole.output
    part = as_after(whole.out, 2, tmp_path / "part")
    with running(Run(tmp_path, SPEC, *overrides, name="dapo", out=part, resume=True)) as second:
        assert second.wait() == 0, second.output
    assert any(line["curriculum/skipped"] for line in whole.metrics)
    for expected, line in zip(whole.metrics, second.metrics, strict=True):
        names = [name for name in expected if name in LEARNING or name.startswith("curriculum/")]
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        drawn, again = (trajectories(run.out, line["step"])["prompt_uid"].to_pylist() for run in (whole, second))
        assert again == drawn
    expected, weights = (checkpoint_weights(run.out, STEPS) for run in (whole, second))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
