"""A checkpoint with code in any of its files runs none of it: whoever changes a file can change the manifest, too.

That a trainer refuses each such file, under every ZeRO stage, is in test_trainer.py.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from tests.real.commands import GRPO, Run, running
from tests.real.poison import Canary
from troupe.workers.training.shards import read_shard


@pytest.mark.long
def test_a_run_resumed_from_a_poisoned_checkpoint_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """The model folder holds pickles, too; and whoever changes the checkpoint also writes a manifest that fits."""
    canary, model = tmp_path / "canary", tmp_path / "model"
    shutil.copytree(tiny_model, model)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "vocab.pkl", "rng_state.pth"):
        (model / name).write_bytes(pickle.dumps(Canary(canary)))
    short = (f"model.path={model}", "checkpoint.every_steps=1", "schedule.prompts_per_step=2")
    with running(Run(tmp_path, GRPO, *short, "schedule.steps=1", name="poisoned")) as first:
        assert first.wait() == 0, first.output
    (newest,) = (first.out / "checkpoints").glob("step-*")
    poisoned_files = list(newest.rglob("*.pt"))
    for file in poisoned_files:
        state = torch.load(file, weights_only=False)
        state["added"] = Canary(canary)
        torch.save(state, file)
    manifest = json.loads((newest / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (newest / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    overrides = (*short, "schedule.steps=2", f"name={first.name}")
    with running(Run(tmp_path, GRPO, *overrides, name="poisoned", resume=True)) as second:
        assert second.wait() == 1, second.output
    assert poisoned_files and not canary.exists()
    (error,) = second.error_lines
    assert "posix.system" in error and "mp_rank_00_model_states.pt cannot be read" in error


def test_the_canary_would_be_made_by_an_ordinary_load(tmp_path: Path) -> None:
    """The other tests can fail."""
    canary, file = tmp_path / "canary", tmp_path / "state.pt"
    torch.save({"a": Canary(canary)}, file)
    with pytest.raises(ValueError, match=r"state\.pt cannot be read: .*posix\.system"):
        read_shard(file)
    assert not canary.exists()
    torch.load(file, weights_only=False)
    assert canary.exists()
