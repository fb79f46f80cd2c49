"""Deaths in a real run: what dies is killed with -9, and what must hold is read from what the run leaves."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from orchestrator.checkpoint import CheckpointStore
from tests.real.helpers import GRPO, SLOW, SLOW_SAMPLES, Run, balanced, running

pytestmark = pytest.mark.long


def test_a_dead_engine_is_replaced_until_the_budget_is_spent(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *SLOW, "failures.engine_restarts=1", name="engines")) as run:
        run.until_step(1)
        kill(run, "EngineCore")
        run.until(lambda: run.metrics[-1]["ledger/retries"] > 0, "going on with a fresh engine")
        after = run.metrics[-1]
        assert all(balanced(line) for line in run.metrics)
        assert after["ledger/trained"] == SLOW_SAMPLES * after["step"]
        assert after["ledger/dropped"] == 0
        kill(run, "EngineCore")
        assert run.wait() == 1
        assert len(run.complaint) == 1, run.told
        assert "no rollout engine is left (1 of 1 restarts used: failures.engine_restarts)" in run.complaint[0]
        assert "rollout-0" in run.complaint[0]
        assert run.left_over() == []
    assert run.weight_files == []


def test_a_dead_policy_rank_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *SLOW, "checkpoint.every_steps=1", name="policy")) as run:
        run.until_step(2)
        kill(run, "PolicyWorker")
        assert run.wait() == 1
        assert len(run.complaint) == 1, run.told
        assert re.match(r"error: policy-0\.\w+: ", run.complaint[0])
        assert run.left_over() == []
    assert run.weight_files == []
    found = CheckpointStore(run.out / "checkpoints", keep=1).latest()
    assert found is not None and found.step >= 1  # a step is reported before it is saved


def kill(run: Run, title: str) -> None:
    """kill -9 of the one process of the run whose title has this in it."""
    found = run.processes(title)
    assert len(found) == 1, [process.cmdline() for process in found]
    psutil.Process(found[0].pid).kill()
