"""Processes that observe a run without Ray, forks of one that has imported."""

from __future__ import annotations

import asyncio
import io
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, cast

from tests import fork_server
from troupe.orchestrator.cluster.inspection import InspectRequest, NodeReport, inspect_node
from troupe.orchestrator.cluster.process_watch import Process
from troupe.orchestrator.errors import NeverFits, WorkerDied
from troupe.orchestrator.insight.why.observer import RunObserver
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog, recorded_failure
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.workers.contract.atomic_file import write_atomic


class Cluster:
    """Workers that are processes of this machine."""

    node = "here"

    def __init__(self, logs: Path, workers: dict[str, int]) -> None:
        self.logs = logs
        self.calls = CallLog()
        self.events = EventLog()
        self._workers = workers

    def locations(self) -> dict[str, Process]:
        return {name: Process(self.node, pid) for name, pid in self._workers.items()}

    def exit_reason(self, process: Process) -> str:
        return ""

    def inspect(self, own: dict[int, str], paths: tuple[Path, ...], timeout_s: float) -> list[NodeReport]:
        roots = own | {pid: name for name, pid in self._workers.items()}
        return [inspect_node(InspectRequest(roots, self.logs / "stacks", "", paths))]


async def main(folder: Path, what: str) -> None:
    console = Console(io.StringIO())
    console.phase("update", 0, 1)
    worker = await asyncio.create_subprocess_exec("sleep", "300")
    cluster = Cluster(Path(tempfile.mkdtemp()) / "logs", {"policy-0": worker.pid})
    with closing(RunObserver(folder, "demo", console, cast("Any", cluster))) as observer:
        cluster.calls.begin("policy-0", "update", 600.0)
        observer._write_snapshot()
        write_atomic(folder / "ready", str(worker.pid).encode())
        write_atomic(folder / "spec.yaml", b"schedule: {steps: 2}")
        if what.startswith("ends"):
            cluster.events.open(folder, 0)
            cluster.events.record("run_ended", how="stopped")
        if what == "ends":
            worker.kill()
            return
        if what == "ends a stage":
            worker.kill()
            observer.close()
            await asyncio.sleep(300)  # the next stage
        with observer.reporting():
            match what:
                case "waits":
                    await asyncio.sleep(300)
                case "blocks":
                    time.sleep(300)
                case "holds the interpreter":
                    re.match(r"(a+)+$", "a" * 60 + "b")
                case "is refused":
                    worker.kill()
                    cluster.events.open(folder, 0)
                    with recorded_failure(cluster.events):
                        raise NeverFits("no node is large enough")
                case _:
                    worker.kill()
                    await worker.wait()
                    raise WorkerDied("policy-0", "update", "its process has died")


@cache
def server() -> str:
    """Start the process that is forked, and return the path of its socket."""
    return fork_server.start(f"{__name__}:serve", os.environ)


def serve(listening: str, owner_pipe: str) -> None:
    """Fork a process for every run."""
    fork_server.serve(listening, owner_pipe, _become)


def _become(request: Mapping[str, str]) -> None:
    os.setsid()
    asyncio.run(main(Path(request["folder"]), request["what"]))
