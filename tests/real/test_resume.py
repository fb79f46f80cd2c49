"""A run of the shipped spec of DAPO with its filters, interrupted. What the filters do is in test_algorithms.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import Run, checkpoint_weights, running, trajectories

SPEC = ROOT / "deploy" / "specs" / "tiny-dapo.yaml"
LEARNING = ("policy/loss", "policy/grad_norm", "reward/mean", "masked_samples", "ledger/trained", "ledger/dropped")
RESUMED_STEPS = 5


@pytest.mark.long
def test_a_resumed_run_draws_and_learns_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """Across the second pass over the data, in which the curriculum skips prompts."""
    with running(Run(tmp_path, SPEC, f"schedule.steps={RESUMED_STEPS}", name="whole")) as whole:
        assert whole.wait() == 0, whole.output
    with running(Run(tmp_path, SPEC, "schedule.steps=2", name="parts")) as first:
        assert first.wait() == 0, first.output
    with running(Run(tmp_path, SPEC, f"schedule.steps={RESUMED_STEPS}", name="parts", resume=True)) as second:
        assert second.wait() == 0, second.output
    assert any(line["curriculum/skipped"] for line in whole.metrics)
    for expected, line in zip(whole.metrics, second.metrics, strict=True):
        names = [name for name in expected if name in LEARNING or name.startswith("curriculum/")]
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        drawn, again = (trajectories(run.out, line["step"])["prompt_uid"].to_pylist() for run in (whole, second))
        assert again == drawn
    expected, weights = (checkpoint_weights(run.out, RESUMED_STEPS) for run in (whole, second))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
