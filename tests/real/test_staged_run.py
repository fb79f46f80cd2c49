"""The shipped spec of three stages, interrupted in the second stage and resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.real.commands import Run, interrupt, running
from tests.real.test_offline_runs import accuracy
from troupe.orchestrator.training.export import write_merged
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.rewards.model import RewardModel

THREE_STAGES = ROOT / "deploy" / "specs" / "tiny-three-stage.yaml"
LAST = {"sft": 4, "reward_model": 6, "ppo": 2}
"""The last step of each stage."""

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Chain:
    """A chain that was interrupted in its second stage, and resumed."""

    out: Path
    said: str
    """Standard output of the second start."""
    before: str
    """Metrics of the first stage at the interruption."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The shipped chain with adapters in every stage."""
    adapters = ("roles.policy.lora={rank: 8, alpha: 64}", "stages.ppo.roles.critic.lora={rank: 8, alpha: 64}")
    rates = ("stages.sft.roles.policy.learning_rate=0.02", "stages.reward_model.roles.policy.learning_rate=0.01")
    steps_of = ("stages.sft.schedule.steps=4", "stages.ppo.schedule.steps=2", "stages.ppo.audit.at_start=true")
    # Two models of the last stage's rewards, beside each other and together.
    both = (
        "a: {path: 'stage:reward_model', dtype: float32}",
        "b: {path: 'stage:reward_model', level: token_mean, offset: response}",
    )
    named = [f"{{name: reward_model, args: {{model: {name}}}, weight: 0}}" for name in "ab"]
    functions = ", ".join([*named, "{name: min, args: {of: [a, b]}, normalize: true}"])
    models = f"{{cpus: 0.25, threads: 1, models: {{{', '.join(both)}}}, functions: [{functions}]}}"
    data = "stages.ppo.data.train.metadata=[response]"
    overrides = (*adapters, *rates, *steps_of, data, f"stages.ppo.roles.reward={models}", "checkpoint.every_steps=1")
    folder = tmp_path_factory.mktemp("chain")
    with running(Run(folder, THREE_STAGES, *overrides, name="chain")) as first:
        first.wait_until(
            lambda: (first.out / "reward_model" / "checkpoints" / "step-000001").exists(), "a checkpoint of stage 2"
        )
        interrupt(first)
        assert first.wait() == 130, first.output
        assert first.leftover_processes() == []
        assert not (first.out / "ppo").exists()
    before = (first.out / "sft" / "metrics.jsonl").read_text()
    with running(Run(folder, THREE_STAGES, *overrides, name="chain", resume=True)) as second:
        assert second.wait() == 0, second.output
        assert second.leftover_processes() == []
    assert second.weight_files == []
    return Chain(second.out, second.stdout, before)


def test_three_stages_run_in_order_and_resume_in_the_interrupted_stage(chain: Chain) -> None:
    assert "already complete" in chain.said
    assert (chain.out / "sft" / "metrics.jsonl").read_text() == chain.before
    lines = {stage: steps(chain.out / stage) for stage in ("sft", "reward_model", "ppo")}
    assert {stage: [line["step"] for line in found] for stage, found in lines.items()} == {
        stage: list(range(1, last + 1)) for stage, last in LAST.items()
    }
    for line in lines["ppo"]:
        assert line["reward/min/mean"] == line["reward/mean"] <= min(line["reward/a/mean"], line["reward/b/mean"])
        assert line["reward/b/std"] != line["reward/a/std"]
        assert line["reward/b/offset"] == lines["ppo"][0]["reward/b/offset"] != 0.0
        assert line["critic/skipped_updates"] == line["policy/skipped_updates"] == 0.0
    # The reward model starts from the fine-tuned model, not from the base model.
    state = json.loads((chain.out / "ppo" / "checkpoints" / "step-000002" / "state.json").read_text())
    assert "components" in json.dumps(state)
    assert state["parts"]["offsets"]["offsets"][""]["b"]["value"] == lines["ppo"][0]["reward/b/offset"]
    spec = (chain.out / "reward_model" / "spec.yaml").read_text()
    assert str(chain.out / "sft" / "checkpoints" / "step-000004" / "model") in spec


def test_stages_hand_adapters_on(chain: Chain, tmp_path: Path) -> None:
    """Policy and reward model start from the adapters of SFT, the critic and the reward role from the reward model's.

    The reference is the policy as it started: with the adapters of SFT. That whole models load in these roles is in
    test_offline_runs.py.
    """
    trained = {}
    for stage, last in LAST.items():
        folder = chain.out / stage / "checkpoints" / f"step-{last:06d}" / "model"
        trained[stage] = load_file(folder / "adapter_model.safetensors")
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    sft, rewards = trained["sft"], trained["reward_model"]
    assert set(rewards) - set(sft) == {"base_model.model.score.weight"}
    # Two steps do not take the policy's adapters far from those that it started with; new ones would have other values.
    for name, tensor in trained["ppo"].items():
        assert torch.norm(tensor - sft[name]) < 0.2 * torch.norm(sft[name]), name
    first = steps(chain.out / "ppo")[0]
    assert first["kl_ref"] < 1e-6
    assert first["policy/rollout_logprob_gap_max"] < 1e-3
    assert json.loads((chain.out / "ppo" / "audit.json").read_text())["passed"]
    evaluated = steps(chain.out / "reward_model")[-1]["eval/accuracy"]
    assert evaluated >= 0.7
    merged = write_merged(chain.out / "reward_model" / "checkpoints" / "step-000006" / "model", tmp_path / "merged")
    assert accuracy(RewardModel(ModelConfig(path=str(merged), dtype="float32"), 1024, "cpu")) == evaluated


def steps(out: Path) -> list[dict[str, Any]]:
    """Lines of the metrics of finished steps."""
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if line["step"]]
