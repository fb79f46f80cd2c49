"""The sbatch script that `troupe deploy` writes, on the real stack with one node; test_submit.py has the hooks of pods.

The runs train on offline data, because their workers start in half the time; that jobs with engines stop and save is in
test_submit.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from tests.conftest import ROOT
from tests.real.commands import Command, metrics_lines, running
from troupe.orchestrator.platforms.flags import NodeFlags, SlurmFlags
from troupe.orchestrator.platforms.manifest import Request, batch_script
from troupe.orchestrator.training.checkpoint import CheckpointStore

pytestmark = pytest.mark.long
SAVE_S = 300.0
SFT = ROOT / "deploy" / "specs" / "tiny-sft.yaml"
ENDLESS = (
    *("schedule.steps=100000", "checkpoint.every_steps=0", "evaluation=null"),
    "roles.policy.learning_rate=1e-4",
)


def steps(out: Path) -> list[int]:
    """Steps in the metrics of a run so far."""
    return [line["step"] for line in metrics_lines(out)]


def saved_step(out: Path) -> int:
    found = CheckpointStore(out / "checkpoints", keep=3).latest()
    return 0 if found is None else found.step


def write_slurm(folder: Path) -> None:
    """Slurm's commands on this machine as the only node."""
    bodies = {
        "scontrol": f'[[ $1 == show ]] && echo {socket.gethostname()} || echo "scontrol $*" >> "$SLURM_LOG"',
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "getent": f"echo {get_node_ip_address()} STREAM node",
    }
    folder.mkdir()
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def test_a_slurm_job_saves_at_its_time_limit_and_resumes_when_it_is_queued_again(tmp_path: Path) -> None:
    write_slurm(tmp_path / "bin")
    out, script, log = tmp_path / "run", tmp_path / "job.sh", tmp_path / "slurm.log"
    paths = (f"model.path={ROOT / '.cache' / 'models' / 'tiny-llama'}",)  # the job runs in another folder
    for data, file in (("train", "demonstrations-train"), ("eval", "demonstrations-eval")):
        paths += (f"data.{data}.path={SFT.parent / 'data' / f'{file}.jsonl'}",)
    request = Request(SFT, (*ENDLESS, *paths), name="job", out=out)
    script.write_text(batch_script(request, NodeFlags(cpus_per_node=4), SlurmFlags(), Path(sys.prefix))[0])
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node",
        "SLURM_LOG": str(log),
    }

    def job(restarts: int, number: signal.Signals, until: int) -> int:
        """The exit code of a job that gets the signal once the run has made a step."""
        again = environment | {"SLURM_RESTART_COUNT": str(restarts)}
        with running(Command(tmp_path, ["bash", str(script)], again, cwd=tmp_path)) as command:
            command.wait_until(lambda: max(steps(out), default=0) >= until, f"step {until}")
            command.process.send_signal(number)
            code = command.wait(SAVE_S)
            assert command.leftover_processes() == []
        left = [*Path("/tmp").glob(f"ray-{os.getpid()}-*"), *Path("/tmp").glob(f"troupe-{os.getpid()}-*")]
        assert left == [] and list(tmp_path.glob(".troupe-*")) == []
        return code

    assert job(0, signal.SIGUSR1, 1) == 0
    assert log.read_text() == f"scontrol requeue {os.getpid()}\n"
    first = saved_step(out)
    assert first == max(steps(out)) >= 1
    assert job(1, signal.SIGTERM, first + 1) == 130
    assert "requeue" not in log.read_text().removeprefix(f"scontrol requeue {os.getpid()}\n")
    assert steps(out) == list(range(1, saved_step(out) + 1)) and saved_step(out) > first
