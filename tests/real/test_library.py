"""The notebook of the documentation, in an empty folder: within an event loop, on a Ray that the program started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "first-run.ipynb"
PROGRAM = """
import asyncio, json, os, signal, sys
import ray

ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {}

async def kernel():  # as Jupyter's, which runs every cell inside its loop
    for cell in cells:
        exec("".join(cell["source"]), names)

asyncio.run(kernel())
troupe, outcome = names["troupe"], names["outcome"]
assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
assert not outcome.stopped and outcome.steps == 16
metrics = outcome.metrics
rewards = metrics["reward/mean"].to_pylist()
assert metrics["step"].to_pylist() == list(range(1, 17)) and names["rewards"] == rewards
assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1, rewards  # the first run of a reader learns
pairs = zip(metrics["rollout/tokens_per_s"].to_pylist(), metrics["response_tokens_per_s"].to_pylist(), strict=True)
assert all(sampling > step for sampling, step in pairs)
assert outcome.checkpoint.name == "step-000016"
assert troupe.samples(outcome, step=2, columns=["reward", "response"]).num_rows == 64
assert troupe.samples("runs/notebook", where="step = 1", limit=3).num_rows == 3
assert names["best"]["reward"].to_pylist() == sorted(names["best"]["reward"].to_pylist(), reverse=True)
assert names["best"].num_rows == 3
assert "config.json" in os.listdir("notebook-model")
assert os.path.isfile("runs/notebook/report.html") and isinstance(outcome.verdicts, tuple)
assert [state for state in ray.util.placement_group_table().values() if state["state"] != "REMOVED"] == []
ray.shutdown()
print("done")
"""


@pytest.mark.real
def test_the_notebook_runs_beside_a_ray_and_a_loop_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(NOTEBOOK)]
    env = {"TROUPE_MODELS": str(Path(tiny_model).resolve().parent)}
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ) | env, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stdout + done.stderr
    assert "roles.policy.lr" in done.stdout and "learning_rate" in done.stdout, "a mistake is named with its remedy"
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "notebook-model"}
