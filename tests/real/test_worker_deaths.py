"""Workers of a real run are killed with SIGKILL. That a policy comes back with its weights is in test_grpo_run.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.real.commands import (
    ENDLESS,
    ENDLESS_SAMPLES_PER_STEP,
    GRPO,
    PPO,
    Run,
    kill,
    kill_each,
    ledger_balances,
    running,
)
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long


def test_dead_reward_reference_and_engine_are_replaced_until_no_restart_is_left(tmp_path: Path) -> None:
    options = (
        *("roles.reference={cpus: 0.25, threads: 1, micro_batch_tokens: 2048}", "algorithm.kl.coef=0.01"),
        *("failures.reference_restarts=1", "failures.engine_restarts=1"),
    )
    with running(Run(tmp_path, GRPO, *ENDLESS, *options, name="replaced")) as run:
        run.wait_for_step(1)
        for role in ("RewardWorker", "ReferenceWorker"):
            kill(run, role)
            run.wait_until(lambda role=role: f"{role.removesuffix('Worker').lower()}-0 is lost" in run.output, role)
            run.wait_for_step(run.metrics[-1]["step"] + 2)
        assert {line["ledger/retries"] for line in run.metrics} == {0}
        kill(run, "EngineCore")
        run.wait_until(lambda: run.metrics[-1]["ledger/retries"] > 0, "a retry on a new engine")
        for line in run.metrics:
            assert ledger_balances(line)
            assert line["ledger/dropped"] == 0
            assert line["ledger/trained"] == ENDLESS_SAMPLES_PER_STEP * line["step"]
        kill(run, "EngineCore")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert "no rollout engine is left (1 of 1 restarts used: failures.engine_restarts)" in run.error_lines[0]
        assert "rollout-0" in run.error_lines[0]
        assert run.leftover_processes() == []
    assert run.weight_files == []


def test_a_dead_critic_is_brought_back_with_the_policy_until_no_restart_is_left(tmp_path: Path) -> None:
    """From the initial model, then from a checkpoint; the last loss, of the policy, ends the run."""
    overrides = ("schedule.steps=1000", "checkpoint.every_steps=2", "failures.trainer_restarts=2")
    with running(Run(tmp_path, PPO, *overrides, name="critic")) as run:
        kill_each(run, (1, "CriticWorker"), (3, "CriticWorker"))
        run.wait_for_step(5)
        kill(run, "PolicyWorker")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        last = r"error: policy-0\.\w+: .*2 of 2 restarts used: failures.trainer_restarts"
        assert re.match(last, run.error_lines[0]), run.error_lines
        assert run.leftover_processes() == []
    assert "policy and critic restarted from the initial model, " in run.stdout
    assert re.search(r"policy and critic restarted from the checkpoint of step [24], ", run.stdout)
    assert run.steps() == list(range(1, len(run.metrics) + 1))
    for line in run.metrics:
        assert ledger_balances(line)
        assert (line["ledger/dropped"], line["ledger/retries"]) == (0, 0)
    assert run.weight_files == []
    found = CheckpointStore(run.out / "checkpoints", keep=1).latest()
    assert found is not None and found.step >= 4  # saved, or being saved, when step 5 was reported
