"""A run of the shipped spec of DAPO, with its filters and its curriculum, that is interrupted and killed.

What the filters do is in test_algorithms.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import (
    Run,
    checkpoint_weights,
    interrupt,
    ledger_balances,
    running,
    trajectories,
)

SPEC = ROOT / "deploy" / "specs" / "tiny-dapo.yaml"
LEARNING = (
    *("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean", "response_tokens/mean", "masked_samples"),
    *("ledger/dispatched", "ledger/trained", "ledger/dropped"),
)
"""Metrics that are equal in every run of the same spec and seed, beside those of the curriculum."""
STEPS = 5
OVERRIDES = (f"schedule.steps={STEPS}", "checkpoint.every_steps=1", "checkpoint.keep=10")


def interrupted(folder: Path) -> Run:
    """The spec resumed twice: after Ctrl-C at step 1, and after SIGKILL of the driver at step 3."""
    with running(Run(folder, SPEC, *OVERRIDES, name="resumed")) as first:
        first.wait_for_step(1)
        interrupt(first)
        assert first.wait() == 130, first.output
        assert "continue with --resume" in first.stdout
        assert first.leftover_processes() == []
        assert first.weight_files == []
        saved = max(int(path.name.removeprefix("step-")) for path in (first.out / "checkpoints").iterdir())
        assert saved == first.steps()[-1] < STEPS
    with running(Run(folder, SPEC, *OVERRIDES, name="resumed", resume=True)) as second:
        second.wait_for_step(3)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        assert second.leftover_processes() == []
        assert second.weight_files == []
    with running(Run(folder, SPEC, *OVERRIDES, name="resumed", resume=True)) as third:
        assert third.wait() == 0, third.output
        assert third.leftover_processes() == []
    assert third.weight_files == []
    return third


@pytest.mark.long
def test_a_resumed_run_draws_and_learns_as_an_uninterrupted_one(tmp_path: Path) -> None:
    """Across the second pass over the data, in which the curriculum skips prompts."""
    with running(Run(tmp_path, SPEC, *OVERRIDES, name="whole")) as whole:
        assert whole.wait() == 0, whole.output
    resumed = interrupted(tmp_path)
    assert resumed.steps() == list(range(1, STEPS + 1))
    assert any(line["curriculum/skipped"] for line in whole.metrics)
    for expected, line in zip(whole.metrics, resumed.metrics, strict=True):
        assert ledger_balances(line)
        names = [name for name in expected if name in LEARNING or name.startswith("curriculum/")]
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
        drawn, again = (trajectories(run.out, line["step"])["prompt_uid"].to_pylist() for run in (whole, resumed))
        assert again == drawn
    expected, weights = (checkpoint_weights(run.out, STEPS) for run in (whole, resumed))
    assert [name for name in expected if not torch.equal(expected[name], weights[name])] == []
