"""A whole run of the shipped tiny PPO spec with `troupe run`, on real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from tests.real.commands import (
    POLICY_METRICS,
    PPO,
    RUN_METRICS,
    Run,
    ledger_balances,
    missing_metrics,
    running,
    trajectories,
)
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.orchestrator.training.checkpoint import verify

CRITIC_METRICS = ("critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/skipped_updates")


def test_ppo_with_a_critic_increases_the_reward(tmp_path: Path) -> None:
    with running(Run(tmp_path, PPO, name="ppo")) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    assert run.weight_files == []
    spec = load_rollout_spec(PPO)
    assert run.steps() == list(range(1, spec.schedule.steps + 1))
    for line in run.metrics:
        assert missing_metrics(line, RUN_METRICS + POLICY_METRICS + CRITIC_METRICS) == []
        assert ledger_balances(line)
    rewards = [line["reward/mean"] for line in run.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step's mean
    found = sorted((run.out / "checkpoints").iterdir())
    assert {"policy", "critic", "model"} <= {path.name for path in verify(found[-1]).path.iterdir()}
    for row in trajectories(run.out, spec.schedule.steps).to_pylist():
        assert row["trained"]
        for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "logprobs", "entropy"):
            assert len(row[name]) == len(row["response_ids"]), name
