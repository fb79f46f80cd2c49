"""A resumed trainer uses the optimizer settings of its own configuration, not the checkpoint's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = """
import json, sys
from tests.real.test_trainer import policy_config
from troupe.workers.contract.config import Rendezvous
from troupe.workers.policy import PolicyWorker

model, folder, stage, dtype = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
config = policy_config(model, stage, dtype)
trainer = config.trainer.model_copy(update={"adam_betas": (0.5, 0.6), "adam_eps": 1e-3, "weight_decay": 0.25})
first = PolicyWorker(config, "first")
address, port = first.rendezvous()
first.start(Rendezvous(address=address, port=port, rank=0, world_size=1))
first.save(folder)
second = PolicyWorker(config.model_copy(update={"trainer": trainer}), "second")
second.build()
second.load(folder)
groups = second.engine._engine.optimizer.param_groups
print("FOUND" + json.dumps([[group["betas"], group["eps"], group["weight_decay"]] for group in groups]))
first.close()
"""


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (3, "float32")])
def test_changed_adam_settings_take_effect_on_resume(tmp_path: Path, tiny_model: Path, stage: int, dtype: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_model), str(tmp_path / "checkpoint"), str(stage), dtype]
    env = os.environ | {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line.removeprefix("FOUND")) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert [betas for betas, _, _ in found] == [[0.5, 0.6]] * len(found)
    assert {eps for _, eps, _ in found} == {1e-3}
    assert {decay for _, _, decay in found} == {0.25, 0.0}
