"""A local Ray cluster: what its own processes do at its end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import process_watcher

from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.ray_nodes import _let_agents_end, _nodes
from troupe.orchestrator.errors import ClusterUnreachable


class GoneHead:
    """The client of a head that is gone: every call takes its whole timeout."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def publish_error(self, key: bytes, kind: str, message: str, job: Any, timeout_s: float) -> None:
        """Report an error to the drivers."""
        self.waited_s += timeout_s
        raise TimeoutError


@pytest.mark.parametrize(("told", "waited_s"), [(False, 60.0), (True, 0.0)])
def test_agents_do_not_report_the_end_of_a_cluster_that_is_killed(tmp_path: Path, told: bool, waited_s: float) -> None:
    """Ray's own function, which its agents call before they exit."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "raylet.out").write_text("[I] (raylet) it runs\n")
    if told:
        _let_agents_end(tmp_path)
    head: Any = GoneHead()
    process_watcher.report_raylet_error_logs(str(tmp_path / "logs"), head)
    assert head.waited_s == waited_s


@pytest.mark.parametrize(("kinds", "gib"), [(["A100"], 80), (["A100", "A100-40G"], 40), (["unknown"], 0), ([], 0)])
def test_the_name_that_a_node_was_started_with_counts(kinds: list[str], gib: int) -> None:
    """Ray calls every A100 the same."""
    resources = {"CPU": 8.0, "GPU": 1.0} | {f"accelerator_type:{kind}": 1.0 for kind in kinds}
    listed = {"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeID": "1", "Resources": resources, "Labels": {}}
    (node,) = _nodes([listed])
    assert node.gpu_memory == gib * 2**30


@pytest.mark.parametrize("full", ["/dev/shm", "", "new/folder"])
def test_a_full_disk_of_ray_is_named_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: str
) -> None:
    """Its processes would die one by one. A folder that does not exist, which Ray creates, is on its parent's disk."""
    folder = tmp_path / full
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path if full == "/dev/shm" else folder))
    monkeypatch.setattr(ray_nodes, "sockets_problem", lambda folder: "")
    free = {folder if folder.exists() else tmp_path: 9 << 20}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free.get(path, 1 << 30)))
    with pytest.raises(
        ClusterUnreachable, match=f"^Ray cannot start: {folder} has 9 MiB free; its files take at least 16: "
    ):
        ray_nodes.start(1)
