"""`troupe.run` in a program of its own: in an empty folder, within an event loop, on a Ray that the program started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = """
import asyncio, signal, sys
import ray
import troupe

spec, model = sys.argv[1:]
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
fields = {"model.path": model, "schedule.steps": 2, "checkpoint.every_steps": 0}
steps = []

def on_step(step, metrics):
    steps.append((step, metrics["reward/mean"], metrics["rollout/tokens_per_s"]))

async def cell():  # as in a notebook
    return troupe.run(spec, set=fields, out="mine", on_step=on_step, progress=False)

outcome = asyncio.run(cell())
assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4
assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
assert not outcome.stopped and outcome.steps == 2
metrics = outcome.metrics
assert [step for step, *_ in steps] == metrics["step"].to_pylist() == [1, 2]
assert [reward for _, reward, _ in steps] == metrics["reward/mean"].to_pylist()
assert all(rate > step for (*_, rate), step in zip(steps, metrics["response_tokens_per_s"].to_pylist()))
assert outcome.checkpoint.name == "step-000002"
assert troupe.samples(outcome, step=2, columns=["reward", "response"]).num_rows == 64
assert troupe.samples("mine", where="step = 1", limit=3).num_rows == 3
assert (troupe.export(outcome, "trained") / "config.json").is_file()
assert outcome.report().is_file() and isinstance(outcome.verdicts, tuple)
assert [state for state in ray.util.placement_group_table().values() if state["state"] != "REMOVED"] == []
ray.shutdown()
print("done")
"""


@pytest.mark.real
def test_a_program_with_its_own_ray_and_loop_trains(tiny_model: Path, tmp_path: Path) -> None:
    spec = ROOT / "deploy" / "specs" / "tiny-grpo.yaml"
    command = [sys.executable, "-c", SCRIPT, str(spec), str(Path(tiny_model).resolve())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stdout + done.stderr
    assert "mine" in {path.name for path in tmp_path.iterdir()}
