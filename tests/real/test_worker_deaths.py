"""Workers of a real run are killed with SIGKILL."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from orchestrator.training.checkpoint import CheckpointStore
from tests.real.commands import ENDLESS, ENDLESS_SAMPLES_PER_STEP, GRPO, Run, ledger_balances, running

pytestmark = pytest.mark.long


def test_a_dead_engine_is_replaced_until_no_restart_is_left(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *ENDLESS, "failures.engine_restarts=1", name="engines")) as run:
        run.wait_for_step(1)
        kill(run, "EngineCore")
        run.wait_until(lambda: run.metrics[-1]["ledger/retries"] > 0, "a retry on a new engine")
        after = run.metrics[-1]
        assert all(ledger_balances(line) for line in run.metrics)
        assert after["ledger/trained"] == ENDLESS_SAMPLES_PER_STEP * after["step"]
        assert after["ledger/dropped"] == 0
        kill(run, "EngineCore")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert "no rollout engine is left (1 of 1 restarts used: failures.engine_restarts)" in run.error_lines[0]
        assert "rollout-0" in run.error_lines[0]
        assert run.leftover_processes() == []
    assert run.weight_files == []


def test_dead_reward_and_reference_workers_are_replaced(tmp_path: Path) -> None:
    reference = ("roles.reference={cpus: 0.25, threads: 1, micro_batch_tokens: 2048}", "algorithm.kl.coef=0.01")
    with running(Run(tmp_path, GRPO, *ENDLESS, *reference, "failures.reference_restarts=1", name="scorers")) as run:
        run.wait_for_step(1)
        for role in ("RewardWorker", "ReferenceWorker"):
            kill(run, role)
            run.wait_until(lambda role=role: f"{role.removesuffix('Worker').lower()}-0 is lost" in run.output, role)
            run.wait_for_step(run.metrics[-1]["step"] + 2)
        for line in run.metrics:
            assert ledger_balances(line)
            assert (line["ledger/dropped"], line["ledger/retries"]) == (0, 0)
            assert line["ledger/trained"] == ENDLESS_SAMPLES_PER_STEP * line["step"]
        kill(run, "ReferenceWorker")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert "(1 of 1 restarts used: failures.reference_restarts)" in run.error_lines[0]
        assert run.leftover_processes() == []


def test_a_dead_policy_rank_ends_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *ENDLESS, "checkpoint.every_steps=1", name="policy")) as run:
        run.wait_for_step(2)
        kill(run, "PolicyWorker")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert re.match(r"error: policy-0\.\w+: ", run.error_lines[0])
        assert run.leftover_processes() == []
    assert run.weight_files == []
    found = CheckpointStore(run.out / "checkpoints", keep=1).latest()
    assert found is not None and found.step >= 1  # a step is reported before it is saved


def kill(run: Run, title: str) -> None:
    """Send SIGKILL to the only process of the run whose title contains `title`."""
    found = run.processes(title)
    assert len(found) == 1, [process.cmdline() for process in found]
    psutil.Process(found[0].pid).kill()
