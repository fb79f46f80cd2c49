"""Roles of a real run are scaled while it trains: by `troupe scale` and by autoscaling."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.commands import (
    GRPO,
    SAMPLES_PER_STEP,
    Run,
    interrupt,
    ledger_balances,
    run_troupe,
    running,
    trajectories,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long

OVERRIDES = (
    "algorithm.kl.coef=0.001",
    "roles.reference={workers: 1, max_workers: 2, cpus: 0.25, threads: 1, micro_batch_tokens: 2048}",
    "roles.reward.max_workers=2",
    "roles.rollout.max_workers=2",
    # With max_staleness 0 the trainer waits for rollouts in every step, so autoscaling must add the one allowed engine.
    "roles.rollout.autoscale={max_wait: 0.001, min_wait: 0.0001, steps: 2}",
    "schedule.steps=100000",  # the test interrupts the run
    "checkpoint.every_steps=0",
)
STEPS_BETWEEN = 3


def wait_for_workers(run: Run, **workers: int) -> None:
    """Wait until each role has this number of workers, and then for `STEPS_BETWEEN` more steps."""

    def scaled() -> bool:
        last = run.metrics[-1]
        return all(last[f"workers/{role}"] == number for role, number in workers.items())

    run.wait_until(scaled, f"workers {workers}")
    run.wait_for_step(run.steps()[-1] + STEPS_BETWEEN)


def test_references_rewards_and_engines_scale_while_a_run_trains(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *OVERRIDES, name="scaling")) as run:
        run.wait_for_step(1)
        first = run.metrics[0]
        assert [first[f"workers/{role}"] for role in ("reference", "reward")] == [1, 1]
        answer = run_troupe(tmp_path, "scale", str(run.out), "reference=2", "reward=2").splitlines()
        assert {line.split(",")[0].split(" (")[0] for line in answer} >= {"reference: 2 workers", "reward: 2 workers"}
        wait_for_workers(run, reference=2, reward=2, rollout=2)
        assert "scaling to 2 engine(s)" in run.stdout
        assert len(run.processes("ray::ReferenceWorker")) == 2

        run_troupe(tmp_path, "scale", str(run.out), "reference=1")
        wait_for_workers(run, reference=1, reward=2, rollout=2)
        run.wait_until(lambda: len(run.processes("ray::ReferenceWorker")) == 1, "the end of one reference worker")
        interrupt(run)
        assert run.wait() == 130, run.output
        assert run.leftover_processes() == []

    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    for line in run.metrics:
        assert ledger_balances(line)
        assert line["ledger/trained"] == SAMPLES_PER_STEP * line["step"]
        assert line["ledger/dropped"] == line["ledger/retries"] == 0
    seen: set[tuple[str, int]] = set()
    engines: set[str] = set()
    for step in steps:
        for row in trajectories(run.out, step).to_pylist():
            sample = (row["prompt_uid"], row["sample_index"])
            assert sample not in seen
            seen.add(sample)
            engines.add(row["engine"])
            # The engine that was added later sampled with the weights of its step, never with older ones.
            assert {span["version"] for span in row["weight_versions"]} == {step - 1}
    assert engines == {"rollout-0", "rollout-1"}

    found = CheckpointStore(run.out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(steps)
    assert found.state["ledger"]["trained"] == len(seen) == SAMPLES_PER_STEP * len(steps)
    saved = load_rollout_spec(run.out / "spec.yaml").roles.scaled()
    assert {role: config.workers for role, config in saved.items()} == {"rollout": 2, "reference": 1, "reward": 2}
