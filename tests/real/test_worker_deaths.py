"""Workers of a real run are killed with SIGKILL."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch

from tests.real.commands import (
    ENDLESS,
    ENDLESS_SAMPLES_PER_STEP,
    GRPO,
    PPO,
    Run,
    checkpoint_weights,
    ledger_balances,
    running,
)
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long

_OF_THE_MACHINE = re.compile(r"time|seconds/.*|utilisation/.*|memory/.*|.*_per_s|trainer_restarts|prompt_tokens/cached")


def repeatable(line: dict[str, float]) -> dict[str, float]:
    """The metrics of a step that a loss does not change."""
    return {name: value for name, value in line.items() if not _OF_THE_MACHINE.fullmatch(name)}


def test_dead_reward_reference_and_engine_are_replaced_until_no_restart_is_left(tmp_path: Path) -> None:
    """A scorer that dies costs no sample a retry; the samples of a dead engine are sampled again, all of them."""
    overrides = (
        *("roles.reference={cpus: 0.25, threads: 1, micro_batch_tokens: 2048}", "algorithm.kl.coef=0.01"),
        *("failures.reference_restarts=1", "failures.engine_restarts=1"),
    )
    with running(Run(tmp_path, GRPO, *ENDLESS, *overrides, name="replaced")) as run:
        run.wait_for_step(1)
        for role in ("RewardWorker", "ReferenceWorker"):
            kill(run, role)
            run.wait_until(lambda role=role: f"{role.removesuffix('Worker').lower()}-0 is lost" in run.output, role)
            run.wait_for_step(run.metrics[-1]["step"] + 2)
        assert {(line["ledger/dropped"], line["ledger/retries"]) for line in run.metrics} == {(0, 0)}
        kill(run, "EngineCore")
        run.wait_until(lambda: run.metrics[-1]["ledger/retries"] > 0, "a retry on a new engine")
        for line in run.metrics:
            assert ledger_balances(line) and line["ledger/dropped"] == 0
            assert line["ledger/trained"] == ENDLESS_SAMPLES_PER_STEP * line["step"]
        kill(run, "EngineCore")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert "no rollout engine is left (1 of 1 restarts used: failures.engine_restarts)" in run.error_lines[0]
        assert "rollout-0" in run.error_lines[0]
        assert run.leftover_processes() == []
    assert run.weight_files == []


def kill_after(run: Run, *deaths: tuple[int, str]) -> None:
    """Kill workers of a run after these steps, each once the one before is back."""
    for step, role in deaths:
        run.wait_for_step(step)
        kill(run, role)
        lost = f"{role.removesuffix('Worker').lower()}-0 is lost"
        run.wait_until(lambda lost=lost: lost in run.output, lost)
        run.wait_for_step(step + 1)


def test_a_dead_policy_is_brought_back_with_the_weights_it_had(tmp_path: Path) -> None:
    """The metrics and the weights equal those of a run without a loss."""
    overrides = ("schedule.steps=8", "checkpoint.every_steps=3")
    with running(Run(tmp_path, GRPO, *overrides, name="whole")) as whole:
        assert whole.wait() == 0, whole.output
    with running(Run(tmp_path, GRPO, *overrides, name="deaths")) as run:
        kill_after(run, (1, "PolicyWorker"), (5, "PolicyWorker"))
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    assert run.weight_files == []
    assert "policy restarted from the initial model, " in run.stdout
    assert "policy restarted from the checkpoint of step 3, " in run.stdout
    for line, other in zip(run.metrics, whole.metrics, strict=True):
        assert ledger_balances(line)
        assert (line["ledger/dropped"], line["ledger/retries"]) == (0, 0)
        assert repeatable(line) == repeatable(other)
    assert run.metrics[-1]["trainer_restarts"] == 2
    expected, weights = checkpoint_weights(whole.out, 8), checkpoint_weights(run.out, 8)
    assert [name for name in expected if not torch.equal(expected[name], weights[name])] == []


def test_a_dead_critic_is_brought_back_with_the_policy_until_no_restart_is_left(tmp_path: Path) -> None:
    """The run that ends keeps its last checkpoint."""
    overrides = ("schedule.steps=1000", "checkpoint.every_steps=2", "failures.trainer_restarts=2")
    with running(Run(tmp_path, PPO, *overrides, name="critic")) as run:
        kill_after(run, (1, "CriticWorker"), (3, "CriticWorker"))
        run.wait_for_step(5)
        kill(run, "PolicyWorker")
        assert run.wait() == 1
        assert len(run.error_lines) == 1, run.output
        assert re.match(r"error: policy-0\.\w+: .*failures.trainer_restarts", run.error_lines[0])
        assert run.leftover_processes() == []
    assert "policy and critic restarted from the initial model, " in run.stdout
    assert "policy and critic restarted from the checkpoint of step 2, " in run.stdout
    assert run.steps() == list(range(1, len(run.steps()) + 1))
    for line in run.metrics:
        assert ledger_balances(line)
        assert (line["ledger/dropped"], line["ledger/retries"]) == (0, 0)
    assert run.weight_files == []
    found = CheckpointStore(run.out / "checkpoints", keep=1).latest()
    assert found is not None and found.step >= 4


def kill(run: Run, title: str) -> None:
    """Send SIGKILL to the only process of the run whose title contains `title`."""
    found = run.processes(title)
    assert len(found) == 1, [process.cmdline() for process in found]
    psutil.Process(found[0].pid).kill()
