"""A whole run of the shipped tiny PPO spec, started as a user starts it: real Ray, vLLM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from orchestrator.checkpoint import verify
from orchestrator.spec import load_spec
from tests.real.helpers import EXPECTED, POLICY, PPO, Run, absent, balanced, running

CRITIC = ("critic/loss", "critic/grad_norm", "critic/learning_rate", "critic/skipped_updates")


def test_ppo_learns_with_all_four_models(tmp_path: Path) -> None:
    with running(Run(tmp_path, PPO, name="ppo")) as run:
        assert run.wait() == 0, run.told
        assert run.left_over() == []
    assert run.weight_files == []
    spec = load_spec(PPO)
    assert run.steps() == list(range(1, spec.schedule.steps + 1))
    for line in run.metrics:
        assert absent(line, EXPECTED + POLICY + CRITIC) == []
        assert balanced(line)
    rewards = [line["reward/mean"] for line in run.metrics]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.05, rewards  # eight standard errors of a step
    found = sorted((run.out / "checkpoints").iterdir())
    assert {"policy", "critic", "model"} <= {path.name for path in verify(found[-1]).path.iterdir()}
