"""Teachers in the policy's workers, on the real stack: its model with another adapter beside the same in a separate
worker, and the policy that reads what a reward function says of its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import Run, ledger_balances, running, trajectories
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.models.modeling import load_causal
from troupe.workers.training.adapter import ModelAdapter

pytestmark = [pytest.mark.long, pytest.mark.real]

SPEC = ROOT / "deploy" / "specs" / "algorithms" / "distill.yaml"
MODEL = ModelConfig(path=str(ROOT / ".cache" / "models" / "tiny-llama"), dtype="float32")
STEPS = 3
REWARD = """
from troupe.rewards import Feedback, letter_share


def checked(response, answer, metadata):
    share = letter_share(response, answer, metadata, letters="aeiou")
    return Feedback(share, "" if share > 0.33 else f"only {share:.2f} are vowels")
"""
WORLD = """
from troupe.environments import Environment, Observation
from troupe.rewards import Feedback, letter_share


class Vowels(Environment):
    def start(self, row):
        self.left = 2
        return Observation(row.messages)

    def step(self, message):
        self.left -= 1
        share = letter_share(message["content"], "", {}, letters="aeiou")
        reward = Feedback(share, "" if share > 0.33 else f"only {share:.2f} are vowels")
        return Observation([{"role": "user", "content": "Again."}], reward=reward, done=not self.left)
"""


def written(folder: Path) -> ModelConfig:
    """The policy's model with a teacher's adapter."""
    lora = LoraConfig(rank=2, alpha=6, targets=("q_proj", "up_proj"))
    adapter = ModelAdapter(load_causal(MODEL), lora, MODEL)
    torch.manual_seed(2)
    moved = {name: tensor.detach() + 0.3 * torch.randn_like(tensor) for name, tensor in adapter.named_parameters()}
    adapter.write(folder, MODEL.path, moved)
    return MODEL.model_copy(update={"adapter": str(folder)})


def test_teachers_in_the_policys_workers_teach_as_separate_ones(tmp_path: Path) -> None:
    """Both teachers with the adapter have the same divergence in every step, although the policy's own adapters train.
    The metric counts the samples without feedback."""
    (tmp_path / "my_checks.py").write_text(REWARD)
    model = written(tmp_path / "adapter").model_dump(mode="json")
    teachers = {
        "shared": {"colocate_with": "policy", "model": model},
        "separate": {"cpus": 0.25, "threads": 1, "model": model},
        "hears": {"colocate_with": "policy", "prompt": "{prompt} {feedback}"},
        "sees": {"colocate_with": "policy", "prompt": "{prompt} {demonstration}", "demonstration_reward": 0.3},
    }
    sets = (
        *(f"model.path={MODEL.path}", "roles.reference=null", "roles.policy.lora={rank: 4}", f"schedule.steps={STEPS}"),
        *("roles.policy.learning_rate=0.01", "algorithm={name: gkd, group_size: 4, distill: {k: 64}}"),
        *("roles.reward.functions=[{name: 'my_checks:checked'}]", f"roles.teacher={json.dumps(teachers)}"),
    )
    with running(Run(tmp_path, SPEC, *sets, name="taught", env={"PYTHONPATH": str(tmp_path)})) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    assert run.steps() == [*range(1, STEPS + 1)] and all(map(ledger_balances, run.metrics))
    assert len({line["kl_teacher.separate"] for line in run.metrics}) == STEPS
    silent = unshown = 0
    for line in run.metrics:
        assert line["kl_teacher.shared"] == pytest.approx(line["kl_teacher.separate"], rel=1e-4)
        assert line["kl_teacher.separate"] > 0.1 and line["kl_teacher.hears"] > 0
        samples = trajectories(run.out, line["step"])
        without = samples["feedback"].null_count
        assert line["untaught_teacher.hears"] == without < len(samples) and line["ledger/dropped"] == 0
        for share, said in zip(samples["reward"].to_pylist(), samples["feedback"].to_pylist(), strict=True):
            assert said == (None if share > 0.33 else f"only {share:.2f} are vowels")
        silent += without
        rewards: dict[str, list[float]] = {}
        for uid, reward in zip(samples["prompt_uid"].to_pylist(), samples["reward"].to_pylist(), strict=True):
            rewards.setdefault(uid, []).append(reward)
        alone = [max([*own[:n], *own[n + 1 :]]) < 0.3 for own in rewards.values() for n in range(len(own))]
        assert line["untaught_teacher.sees"] == sum(alone) and line["kl_teacher.sees"] > 0
        unshown += sum(alone)
    assert silent and unshown


def test_the_policy_reads_what_its_environment_says_of_it(tmp_path: Path) -> None:
    """Each turn's text is beside its reward, and the sample's are read as one."""
    (tmp_path / "my_world.py").write_text(WORLD)
    teachers = {"hears": {"colocate_with": "policy", "prompt": "{prompt} {feedback}"}}
    sets = (
        *(f"model.path={MODEL.path}", "roles.reference=null", f"schedule.steps={STEPS}", "sampling.max_tokens=4"),
        *("algorithm={name: gkd, group_size: 4, distill: {k: 64}}", "roles.reward.functions=[{name: environment}]"),
        *(
            "roles.environment={name: 'my_world:Vowels', cpus: 0.25, truncated_turns: continue}",
            f"roles.teacher={json.dumps(teachers)}",
        ),
    )
    with running(Run(tmp_path, SPEC, *sets, name="told", env={"PYTHONPATH": str(tmp_path)})) as run:
        assert run.wait() == 0, run.output
        assert run.leftover_processes() == []
    assert run.steps() == [*range(1, STEPS + 1)] and all(map(ledger_balances, run.metrics))
    untaught = 0
    for line in run.metrics:
        samples = trajectories(run.out, line["step"])
        for turns, said in zip(samples["turn_rewards"].to_pylist(), samples["feedback"].to_pylist(), strict=True):
            texts = ["" if turn["reward"] > 0.33 else f"only {turn['reward']:.2f} are vowels" for turn in turns]
            assert [turn["feedback"] for turn in turns] == texts and len(turns) == 2
            assert said == ("\n".join(filter(None, texts)) or None)
        without = samples["feedback"].null_count
        assert line["untaught_teacher.hears"] == without < len(samples) and line["ledger/dropped"] == 0
        assert line["kl_teacher.hears"] > 0
        untaught += without
    assert untaught
