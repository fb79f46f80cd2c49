"""The shipped spec of three stages, interrupted in the second stage and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.real.commands import Run, interrupt, running
from tests.real.test_offline_runs import accuracy
from troupe.orchestrator.training.checkpoint import write_merged
from troupe.workers.contract.config import ModelConfig
from troupe.workers.rewards.model import RewardModel

THREE_STAGES = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"

pytestmark = pytest.mark.long


def test_three_stages_run_in_order_and_resume_in_the_interrupted_stage(tmp_path: Path) -> None:
    overrides = ("checkpoint.every_steps=1", "stages.ppo.schedule.steps=2")
    with running(Run(tmp_path, THREE_STAGES, *overrides, name="chain")) as first:
        first.wait_until(
            lambda: (first.out / "reward_model" / "checkpoints" / "step-000001").exists(), "a checkpoint of stage 2"
        )
        interrupt(first)
        assert first.wait() == 130, first.output
        assert first.leftover_processes() == []
        assert not (first.out / "ppo").exists()
    before = (first.out / "sft" / "metrics.jsonl").read_text()
    with running(Run(tmp_path, THREE_STAGES, *overrides, name="chain", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert "already complete" in second.stdout
        assert second.leftover_processes() == []
    assert second.weight_files == []
    assert (second.out / "sft" / "metrics.jsonl").read_text() == before
    lines = {stage: steps(second.out / stage) for stage in ("sft", "reward_model", "ppo")}
    assert [line["step"] for line in lines["reward_model"]] == [1, 2, 3, 4, 5, 6]
    assert lines["reward_model"][-1]["eval/accuracy"] >= 0.9
    for line in lines["ppo"]:
        assert isinstance(line["reward/reward_model/mean"], float)
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0.0
    # The reward model starts from the fine-tuned model, not from the base model.
    spec = (second.out / "reward_model" / "spec.yaml").read_text()
    assert str(second.out / "sft" / "checkpoints" / "step-000008" / "model") in spec


def test_stages_hand_adapters_on(tmp_path: Path) -> None:
    """Policy and reward model start from the adapters of SFT, the critic and the reward role from the reward model's.

    The reference is the policy as it started: with the adapters of SFT.
    """
    adapters = ("roles.policy.lora={rank: 8, alpha: 64}", "stages.ppo.roles.critic.lora={rank: 8, alpha: 64}")
    rates = ("stages.sft.roles.policy.learning_rate=0.02", "stages.reward_model.roles.policy.learning_rate=0.01")
    steps_of = ("stages.sft.schedule.steps=4", "stages.ppo.schedule.steps=2", "stages.ppo.audit.at_start=true")
    with running(Run(tmp_path, THREE_STAGES, *adapters, *rates, *steps_of, name="chain")) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    ppo, trained = run.out / "ppo", {}
    for stage, last in (("sft", 4), ("reward_model", 6), ("ppo", 2)):
        folder = run.out / stage / "checkpoints" / f"step-{last:06d}" / "model"
        trained[stage] = load_file(folder / "adapter_model.safetensors")
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    sft, rewards = trained["sft"], trained["reward_model"]
    assert set(rewards) - set(sft) == {"base_model.model.score.weight"}
    # Two steps do not take the policy's adapters far from those that it started with; new ones would have other values.
    for name, tensor in trained["ppo"].items():
        assert torch.norm(tensor - sft[name]) < 0.2 * torch.norm(sft[name]), name
    first, *_, last = steps(ppo)
    assert first["kl_ref"] < 1e-6 and isinstance(last["reward/reward_model/mean"], float)
    assert last["critic/skipped_updates"] == last["policy/skipped_updates"] == 0.0
    assert first["policy/rollout_logprob_gap_max"] < 1e-3
    assert json.loads((ppo / "audit.json").read_text())["passed"]
    evaluated = steps(run.out / "reward_model")[-1]["eval/accuracy"]
    assert evaluated >= 0.7
    merged = write_merged(run.out / "reward_model" / "checkpoints" / "step-000006" / "model", tmp_path / "merged")
    assert accuracy(RewardModel(ModelConfig(path=str(merged), dtype="float32"), 1024, "cpu")) == evaluated


def steps(out: Path) -> list[dict[str, Any]]:
    """Lines of the metrics of finished steps."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["step"]]
