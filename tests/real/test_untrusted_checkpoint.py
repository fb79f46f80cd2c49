"""A checkpoint with code in any of its files runs none of it: whoever changes a file can change the manifest, too."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.real.commands import GRPO, Run, running
from troupe.workers.training.shards import read_shard

STAGES = [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16")]
SCRIPT = """
import json, sys
from pathlib import Path
import torch
from tests.real import test_untrusted_checkpoint as planted
from tests.real.test_trainer import policy_config
from troupe.workers.contract.config import Rendezvous
from troupe.workers.policy import PolicyWorker

model, folder, canary = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
started = None
for stage, dtype in planted.STAGES:
    config = policy_config(model, stage, dtype)
    worker = PolicyWorker(config, f"stage-{stage}")
    if started is None:
        started = worker
        address, port = worker.rendezvous()
        worker.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
    else:
        worker.build()
    saved = folder / f"stage-{stage}"
    worker.save(str(saved))
    worker.load(str(saved))
    for name, damage, copy in planted.poisoned(saved, canary):
        try:
            worker.load(str(copy))
            said = "loaded"
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        print("FOUND" + json.dumps([stage, name, damage, said, canary.exists()]))
started.close()
"""


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def poisoned(saved: Path, canary: Path) -> list[tuple[str, str, Path]]:
    """Copies of a checkpoint, each with code in one file: (file, how, copy)."""
    copies = []
    for file in sorted(path for path in saved.rglob("*") if path.suffix in (".pt", ".safetensors")):
        forms = {"a pickle": pickle.dumps({"a": Canary(canary)})}
        if file.suffix == ".pt":  # nothing else differs from what DeepSpeed wrote
            state = torch.load(file, weights_only=False)
            state["added"] = Canary(canary)
            buffer = io.BytesIO()
            torch.save(state, buffer)
            forms["an entry"] = buffer.getvalue()
        for number, (form, content) in enumerate(forms.items()):
            copy = saved.with_name(f"{saved.name}-{file.stem}-{number}")
            shutil.copytree(saved, copy)
            (copy / file.relative_to(saved)).write_bytes(content)
            copies.append((file.name, form, copy))
    return copies


@pytest.fixture(scope="module")
def found(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str, str, bool]]:
    """(stage, file, how, what the load said, whether the canary exists), from one process."""
    folder = tmp_path_factory.mktemp("checkpoints")
    command = [sys.executable, "-c", SCRIPT, str(tiny_model), str(folder), str(folder / "canary")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [
        tuple(json.loads(line.removeprefix("FOUND"))) for line in done.stdout.splitlines() if line.startswith("FOUND")
    ]


def test_no_file_of_a_checkpoint_runs_code(found: list[tuple[int, str, str, str, bool]]) -> None:
    assert {stage for stage, *_ in found} == {0, 1, 2, 3}
    assert len(found) >= 15
    assert [one for one in found if one[-1]] == []


def test_a_poisoned_file_is_refused_and_named(found: list[tuple[int, str, str, str, bool]]) -> None:
    assert [one for one in found if one[1] not in one[3] or "\n" in one[3]] == []
    added = [said for _, _, damage, said, _ in found if damage == "an entry"]
    assert added and all("posix.system" in said for said in added)


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
