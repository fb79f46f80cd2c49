"""A run whose roles change in number while it trains, as a user and as its own rule change them: the real stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.checkpoint import CheckpointStore
from orchestrator.spec import load_spec
from tests.real.helpers import GRPO, SAMPLES, Run, ask, balanced, interrupt, running, trajectories

pytestmark = pytest.mark.long

OVERRIDES = (
    "algorithm.kl.coef=0.001",
    "roles.reference={workers: 1, max_workers: 2, cpus: 0.25, threads: 1, micro_batch_tokens: 2048}",
    "roles.reward.max_workers=2",
    "roles.rollout.max_workers=2",
    # A trainer that samples nothing ahead waits in every step: the rule must ask for the one engine that there may be.
    "roles.rollout.autoscale={max_wait: 0.001, min_wait: 0.0001, steps: 2}",
    "schedule.steps=100000",  # it is stopped
    "checkpoint.every_steps=0",
)
STEPS_BETWEEN = 3


def until_there(run: Run, **workers: int) -> None:
    """Wait until so many workers of each role take part, and for some steps with them."""

    def there() -> bool:
        last = run.metrics[-1]
        return all(last[f"workers/{role}"] == number for role, number in workers.items())

    run.until(there, f"{workers} there")
    run.until_step(run.steps()[-1] + STEPS_BETWEEN)


def test_references_rewards_and_engines_come_and_go_while_a_run_trains(tmp_path: Path) -> None:
    with running(Run(tmp_path, GRPO, *OVERRIDES, name="scaling")) as run:
        run.until_step(1)
        first = run.metrics[0]
        assert [first[f"workers/{role}"] for role in ("reference", "reward")] == [1, 1]
        told = ask(tmp_path, "scale", str(run.out), "reference=2", "reward=2").splitlines()
        assert {line.split(",")[0].split(" (")[0] for line in told} >= {"reference: 2 workers", "reward: 2 workers"}
        until_there(run, reference=2, reward=2, rollout=2)
        assert "of a step: 2 engine(s) now" in run.stdout
        assert len(run.processes("ray::ReferenceWorker")) == 2

        ask(tmp_path, "scale", str(run.out), "reference=1")
        until_there(run, reference=1, reward=2, rollout=2)
        run.until(lambda: len(run.processes("ray::ReferenceWorker")) == 1, "one reference worker ended")
        interrupt(run)
        assert run.wait() == 130, run.told
        assert run.left_over() == []

    steps = run.steps()
    assert steps == list(range(1, len(steps) + 1))
    for line in run.metrics:
        assert balanced(line)
        assert line["ledger/trained"] == SAMPLES * line["step"]
        assert line["ledger/dropped"] == line["ledger/retries"] == 0
    seen: set[tuple[str, int]] = set()
    engines: set[str] = set()
    for step in steps:
        for row in trajectories(run.out, step).to_pylist():
            sample = (row["prompt_uid"], row["sample_index"])
            assert sample not in seen
            seen.add(sample)
            engines.add(row["engine"])
            # The engine that came late had the weights of the step, never older ones.
            assert {span["version"] for span in row["weight_versions"]} == {step - 1}
    assert engines == {"rollout-0", "rollout-1"}

    found = CheckpointStore(run.out / "checkpoints", keep=3).latest()
    assert found is not None and found.step == len(steps)
    assert found.state["ledger"]["trained"] == len(seen) == SAMPLES * len(steps)
    now = load_spec(run.out / "spec.yaml").roles.scaled()
    assert {role: config.workers for role, config in now.items()} == {"rollout": 2, "reference": 1, "reward": 2}
