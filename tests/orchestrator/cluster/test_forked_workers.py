"""Which workers are forked from the server of a run; the server itself is tested in `test_worker_server.py`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, Cluster
from troupe.orchestrator.cluster.worker_server import WorkerServer
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.workers.contract.config import EngineProcess
from troupe.workers.preload import forked_worker

ENGINE = EngineProcess(device="cpu", threads=2, enforce_eager=True)
OTHER = EngineProcess(device="cpu", threads=3, enforce_eager=True)


class IdleServer(WorkerServer):
    """Starts no process."""

    def __init__(self) -> None:
        self.engine, self.path, self.closed = ENGINE, "/run/workers", False

    def close(self) -> None:
        self.closed = True


def process(
    folder: Path, engine: EngineProcess | None, *, server: WorkerServer | None, gpus: float = 0.0
) -> dict[str, object]:
    cluster = Cluster(owned=True, session=folder, server=server)
    spec, placed = ActorSpec(object, (), {"A": "1"}, engine=engine), WorkerPlacement("rollout", 0, 0, 1.0, gpus)
    return cluster._process(Placement("p", ({"CPU": 1.0},), "PACK", (placed,)), placed, spec)


@pytest.mark.parametrize("engine", [ENGINE, None])
def test_workers_on_this_node_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineProcess | None
) -> None:
    monkeypatch.setattr(Cluster, "_is_here", lambda *_: True)
    found = process(tmp_path, engine, server=IdleServer())
    assert shlex.split(str(found["py_executable"])) == [sys.executable, forked_worker.__file__]
    variables = found["env_vars"]
    assert isinstance(variables, dict) and variables["A"] == "1"
    assert variables[forked_worker.SERVER_VARIABLE] == "/run/workers"
    text = variables[forked_worker.ENGINE_VARIABLE]
    assert (EngineProcess.model_validate_json(text) if text else None) == engine


@pytest.mark.parametrize(
    ("here", "gpus", "engine", "server"),
    [
        (False, 0.0, ENGINE, IdleServer()),  # another node may have Python elsewhere
        (True, 0.5, None, IdleServer()),
        (True, 0.0, OTHER, IdleServer()),  # its threads are set when vLLM is imported
        (True, 0.0, ENGINE, None),
    ],
)
def test_other_workers_are_started_by_ray(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: bool,
    gpus: float,
    engine: EngineProcess | None,
    server: WorkerServer | None,
) -> None:
    monkeypatch.setattr(Cluster, "_is_here", lambda *_: here)
    found = process(tmp_path, engine, server=server, gpus=gpus)
    assert found.keys() == {"env_vars"} and str(found["env_vars"]).count("TROUPE_") == 0


def test_a_program_that_is_connected_to_a_cluster_forks_no_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "connected", lambda: tmp_path)
    server = IdleServer()
    cluster = Cluster.connect({"CPU": 1.0}, server=server)
    assert server.closed and cluster._server is None
