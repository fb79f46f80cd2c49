"""What `troupe deploy` writes, on the real stack: the hooks of pods on a Ray head, and an sbatch script on one node.

The runs train on offline data, because their workers start in half the time; that jobs with engines stop and save is in
test_submit.py.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from ray.util import get_node_ip_address

from tests.conftest import ROOT
from tests.orchestrator.platforms.kubernetes.manifests import documents
from tests.real.cluster_demo import free_port
from tests.real.commands import Command, metrics_lines, running
from tests.real.ray_nodes import ray_head
from troupe.orchestrator.platforms.flags import NodeFlags, SlurmFlags
from troupe.orchestrator.platforms.kubernetes.documents import entrypoint
from troupe.orchestrator.platforms.kubernetes.pre_stop import has_actors, stop_jobs, wait_for_actors
from troupe.orchestrator.platforms.manifest import Request, batch_script
from troupe.orchestrator.platforms.ray_jobs import JobServer, submit_when_ready, token_header
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


@contextmanager
def pods(folder: Path) -> Iterator[tuple[str, Command]]:
    """Ray as KubeRay starts it, with the environment of the head pod; the URL of its job server, and its processes."""
    job, _ = documents(SFT, stop_s=int(SAVE_S))
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    port, name = free_port(), "RAY_JOB_STOP_WAIT_TIME_S"
    environment = {name: variables[name], "RAY_ADDRESS": f"127.0.0.1:{port}"}
    with ray_head(folder, "--num-cpus=4", port=port, env=environment) as head:
        yield head


def test_pods_that_are_deleted_wait_until_the_run_has_saved(tmp_path: Path) -> None:
    out, spec = tmp_path / "run", tmp_path / "spec.yaml"
    spec.write_text(documents(SFT, *ENDLESS, root=str(Path.cwd()))[1]["data"]["spec.yaml"])
    command_line = entrypoint(str(out)).replace("/etc/troupe/spec.yaml", str(spec))
    with pods(tmp_path) as (url, cluster), ThreadPoolExecutor(1) as pool:

        def busy() -> bool:
            return has_actors([process for process in cluster.processes("ray::") if process.pid != os.getpid()])

        assert not busy()  # a node without a run
        client = JobSubmissionClient(url, headers=token_header())
        job = submit_when_ready(client, entrypoint=command_line)
        cluster.wait_until(lambda: len(steps(out)) > 2, "two steps")
        worker_hook = pool.submit(wait_for_actors, SAVE_S, busy)
        assert not worker_hook.done() and saved_step(out) == 0
        stop_jobs(JobServer(url), SAVE_S)
        assert client.get_job_status(job).value == "STOPPED"
        assert saved_step(out) == max(steps(out)) > 0
        assert worker_hook.result(60) is True


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
