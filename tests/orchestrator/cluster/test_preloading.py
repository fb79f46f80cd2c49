"""Which workers start in a process that imports vLLM ahead. What that process does: `tests/workers/engine`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.workers.contract.config import EngineProcess
from troupe.workers.contract.naming import resolve

ENGINE = EngineProcess(device="cpu", threads=2, enforce_eager=True)


def test_engines_of_a_cluster_that_the_run_has_started_have_another_command(tmp_path: Path) -> None:
    command = shlex.split(Cluster(owned=True, session=tmp_path)._python(ENGINE)["py_executable"])
    assert command[0] == sys.executable and callable(resolve(command[-2]))
    assert EngineProcess.model_validate_json(command[-1]) == ENGINE


def test_other_workers_and_other_clusters_have_rays_own(tmp_path: Path) -> None:
    """Another node may have Python elsewhere."""
    assert Cluster(owned=True, session=tmp_path)._python(None) == {}
    assert Cluster(owned=False, session=tmp_path)._python(ENGINE) == {}
