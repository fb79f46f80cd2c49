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
    silent = 0
    for line in run.metrics:
        assert line["kl_teacher.shared"] == pytest.approx(line["kl_teacher.separate"], rel=1e-4)
        assert line["kl_teacher.separate"] > 0.1 and line["kl_teacher.hears"] > 0
        samples = trajectories(run.out, line["step"])
        without = samples["feedback"].null_count
        assert line["untaught_teacher.hears"] == without < len(samples) and line["ledger/dropped"] == 0
        for share, said in zip(samples["reward"].to_pylist(), samples["feedback"].to_pylist(), strict=True):
            assert said == (None if share > 0.33 else f"only {share:.2f} are vowels")
        silent += without
    assert silent
