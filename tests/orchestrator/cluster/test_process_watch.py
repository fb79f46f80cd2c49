"""The watch of processes, without Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RaySystemError

from troupe.orchestrator.cluster import process_watch
from troupe.orchestrator.cluster.process_watch import Process, ProcessWatch


def test_only_nodes_that_have_died_since_the_run_began_are_dead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "driver")
    nodes: list[dict[str, Any]] = [
        {"NodeID": "old", "NodeManagerAddress": "10.0.0.2", "Alive": False},
        {"NodeID": "new", "NodeManagerAddress": "10.0.0.3", "Alive": True},
    ]
    fake = SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [dict(node) for node in nodes])
    monkeypatch.setattr(process_watch, "ray", fake)
    watch = ProcessWatch(tmp_path, 10.0)
    watch._nodes_before.read(time.monotonic() + 5.0)
    nodes[1]["Alive"] = False
    _, *others = watch.inspect({}, (), 5.0)
    assert [(report.node.name, report.node.alive) for report in others] == [("10.0.0.3/new", False)]


@pytest.mark.parametrize(
    ("code", "log", "reason"),
    [
        (-11, "Fatal Python error: Segmentation fault\n", "SIGSEGV; its log: Fatal Python error: Segmentation fault"),
        (-9, "step 3\n", "SIGKILL; its log: step 3"),
        (3, "", "exit code 3"),
        (None, "ValueError: x\n", "its log: ValueError: x"),
        (None, "", ""),
    ],
)
def test_the_end_of_a_worker_has_its_signal_and_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int | None, log: str, reason: str
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "driver")
    monkeypatch.setattr(process_watch, "ray", SimpleNamespace(get_runtime_context=lambda: context, nodes=list))
    watch = ProcessWatch(tmp_path, 10.0, {7: code}.get)
    (tmp_path / "worker-a-01000000-7.err").write_text(log)
    assert watch.exit_reason(Process("driver", 7)) == reason
    assert watch.exit_reason(Process("other", 7)) == watch.exit_reason(None) == ""


def test_a_worker_that_dies_on_a_full_disk_of_ray_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its replacements die at their start, with an exit code and an empty log, until no restart is left."""
    context = SimpleNamespace(get_node_id=lambda: "driver")
    monkeypatch.setattr(process_watch, "ray", SimpleNamespace(get_runtime_context=lambda: context, nodes=list))
    watch, free = ProcessWatch(tmp_path, 10.0, {7: 1}.get), {tmp_path: 9 << 20}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free.get(path, 1 << 30)))
    full = (
        f"exit code 1; {tmp_path} has 9 MiB free; its files take at least 16: free some space there, or set RAY_TMPDIR"
    )
    assert watch.exit_reason(Process("driver", 7)) == f"{full} to a short path on another disk"
    assert watch.exit_reason(Process("other", 7)) == ""
    free.clear()
    assert watch.exit_reason(Process("driver", 7)) == "exit code 1"


async def test_what_an_engine_has_started_is_watched_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of an engine whose role has a name of its own, as a teacher's."""
    asked: list[Mapping[int, bool]] = []

    class Node:
        def __init__(self, samples: int) -> None: ...

        async def find_stopped(self, watched: Mapping[int, bool], seconds: float) -> list[int]:
            asked.append(watched)
            raise asyncio.CancelledError

    context = SimpleNamespace(get_node_id=lambda: "driver")
    monkeypatch.setattr(process_watch, "ray", SimpleNamespace(get_runtime_context=lambda: context, nodes=list))
    monkeypatch.setattr(process_watch, "NodeWatch", Node)
    watch = ProcessWatch(tmp_path, 10.0)
    for pid, name in enumerate(("rollout-0", "teacher.served-0", "environment.tools-0", "reward-0")):
        watch._workers[Process("driver", pid)] = cast("Any", SimpleNamespace(name=name))
    with pytest.raises(asyncio.CancelledError):
        await watch._watch("driver")
    assert asked == [{0: True, 1: True, 2: False, 3: False}]


def test_a_look_while_ray_disconnects_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def disconnected() -> list[dict[str, Any]]:
        raise RaySystemError("Ray has not been started yet")

    uncaught: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    monkeypatch.setattr(process_watch, "ray", SimpleNamespace(nodes=disconnected))
    assert process_watch._NodeTable().read(time.monotonic() + 60.0) == ({}, set())
    assert uncaught == []
