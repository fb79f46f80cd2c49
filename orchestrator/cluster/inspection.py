"""Inspects this node for `troupe why` and the process watch: its processes and their stacks, its GPUs and disks.

Everything is read from outside, so that a process that hangs needs no part in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from troupe.orchestrator.cluster.proc import out_of_memory_kills, stat_fields
from troupe.orchestrator.cluster.stack_dumps import Thread, read_from_outside, read_stacks, request_stacks

SHARED_MEMORY = Path("/dev/shm")
_SAMPLE_S = 1.0
"""Time over which CPU seconds are counted."""
_SETTLE_S = 0.3
"""Time after which the request for stacks no longer changes the state of a thread."""
_STACK_S = 1.5
"""Longest wait for stacks, from the beginning of the sample."""
_DISK_S = 0.5
"""Longest wait for a file system."""
_TICKS = os.sysconf("SC_CLK_TCK")
_SERVICES = ("gcs_server", "raylet")
_LONGEST_TITLE = 60
_COMPUTES = 0.1
"""Cores above which a process computes."""
_MOST_OUTSIDE = 3
"""Processes whose stacks are read from outside, by a process each."""


@dataclass(frozen=True)
class ProcessFacts:
    """One process of a run."""

    worker: str
    """Role and index, `driver-0`, or a process of Ray: `gcs_server`, `raylet`."""
    node: str
    pid: int
    parent: int
    title: str
    state: str
    """The kernel's letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; empty if unknown."""
    cpu: float = 0.0
    """CPU seconds used in the last second."""
    waits_in: str = ""
    """The kernel's function in which it sleeps."""
    waits_for_device: bool = False
    """Whether a thread has been in state D, mostly on a file, for the last second."""
    resident: int = 0
    age_s: float = 0.0
    threads: tuple[Thread, ...] = ()
    """Its stacks, the main thread last; none if it wrote none."""


@dataclass(frozen=True)
class NodeFacts:
    """One node of a run."""

    name: str
    reachable: bool = True
    """Whether the node's watch has answered."""
    alive: bool = True
    """Whether the node is alive according to Ray."""
    workers: tuple[str, ...] = ()
    shm_free: int = -1
    shm_total: int = -1
    memory_free: int = -1
    memory_total: int = -1
    load: float = 0.0
    cores: int = 0
    out_of_memory_kills: int = 0
    disks: tuple[tuple[str, int, int], ...] = ()
    """(path, free bytes, total bytes)."""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeReport:
    """Findings on one node."""

    node: NodeFacts
    processes: tuple[ProcessFacts, ...] = ()


@dataclass(frozen=True)
class InspectRequest:
    """Processes and folders to inspect on a node."""

    roots: Mapping[int, str]
    """Workers by process id; their descendants are included."""
    stacks: Path
    """Folder of the files of stacks."""
    session: str = ""
    """Folder of Ray's session on this node, to find its own processes."""
    paths: tuple[Path, ...] = ()
    """Folders whose disks matter."""


def inspect_node(request: InspectRequest) -> NodeReport:
    """Inspects the processes of this node for about a second; blocks until then."""
    began = time.monotonic()
    found = [*_trees(request.roots), *_services(request.session)]
    # Not of this process, which can read its own stacks: the signal's handler walks the frames of threads that run at
    # the same time, and can crash it.
    asked = request_stacks(request.stacks, [pid for pid, _ in found if pid != os.getpid()])
    before = {pid: _cpu_seconds(pid) for pid, _ in found}
    time.sleep(_SETTLE_S)
    waiting = {pid: _waiting_threads(pid) for pid, _ in found}
    time.sleep(_SAMPLE_S - _SETTLE_S)
    seconds = time.monotonic() - began
    used = {pid: max(0.0, (_cpu_seconds(pid) - before[pid]) / seconds) for pid, _ in found}
    stacks = read_stacks(request.stacks, asked, began + _STACK_S)
    others = [
        pid
        for pid, worker in found
        if pid not in asked and pid != os.getpid() and worker not in _SERVICES
        if _state(pid) == "T" or used[pid] > _COMPUTES
    ]
    others.sort(key=lambda pid: (_state(pid) != "T", -used[pid]))  # the stopped ones, then the ones that compute most
    stacks |= {pid: read_from_outside(pid) for pid in others[:_MOST_OUTSIDE]}
    processes = tuple(
        replace(
            _describe(pid, worker),
            cpu=round(used[pid], 2),
            waits_for_device=not waiting[pid].isdisjoint(_waiting_threads(pid)),
            threads=stacks.get(pid, ()),
        )
        for pid, worker in found
    )
    return NodeReport(node_facts(request.paths), processes)


def node_facts(paths: Iterable[Path] = ()) -> NodeFacts:
    """Memory, shared memory, disks, load and GPUs of this node."""
    memory = psutil.virtual_memory()
    shm = _usage(SHARED_MEMORY)
    return NodeFacts(
        name=socket.gethostname(),
        shm_free=shm[0],
        shm_total=shm[1],
        memory_free=memory.available,
        memory_total=memory.total,
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
        out_of_memory_kills=out_of_memory_kills(),
        disks=tuple((str(path), *_usage(path)) for path in paths),
        gpus=_gpus(),
    )


def _trees(roots: Mapping[int, str]) -> list[tuple[int, str]]:
    """The processes of workers, each with its descendants; a descendant that is a worker itself belongs to itself."""
    children: dict[int, list[int]] = {}
    for pid in psutil.pids():
        if fields := stat_fields(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found: dict[int, str] = dict(roots)
    # The descendants of a driver are Ray's.
    queue = [(pid, worker) for pid, worker in roots.items() if not worker.startswith("driver")]
    while queue:
        parent, worker = queue.pop()
        for child in children.get(parent, ()):
            if child not in found:
                found[child] = worker
                queue.append((child, worker))
    return list(found.items())


def _services(session: str) -> list[tuple[int, str]]:
    """Ray's own processes of this session."""
    if not session:
        return []
    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        name, words = process.info["name"], process.info["cmdline"] or []
        if name in _SERVICES and any(session in word for word in words):
            found.append((process.pid, name))
    return found


def _describe(pid: int, worker: str) -> ProcessFacts:
    """State of one process, as the kernel has it."""
    node, fields = socket.gethostname(), stat_fields(pid)
    gone = ProcessFacts(worker, node, pid, 0, "", "")
    try:
        process = psutil.Process(pid)
        title = _text(" ".join(process.cmdline()) or process.name())[:_LONGEST_TITLE]
        age = time.time() - process.create_time()
        resident = process.memory_info().rss
    except psutil.Error:
        return gone
    if not fields:
        return gone
    waits_in = _waits_in(Path(f"/proc/{pid}"))
    return ProcessFacts(
        worker, node, pid, int(fields[1]), title, fields[0], 0.0, waits_in, False, resident, round(age, 1)
    )


def _cpu_seconds(pid: int) -> float:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _waits_in(task: Path) -> str:
    try:
        text = (task / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def _waiting_threads(pid: int) -> set[int]:
    """Threads of a process that wait for a device (state D)."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return set()
    return {thread for thread in threads if _state(thread) == "D"}


def _text(name: str) -> str:
    """A name as text that JSON takes, also if the system's bytes are not UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _state(thread: int) -> str:
    return next(iter(stat_fields(thread)), "")


def _usage(path: Path) -> tuple[int, int]:
    """(free, total) bytes of a path's file system; -1 if they are unknown, or the file system hangs."""
    found = (-1, -1)

    def ask() -> None:
        nonlocal found
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            found = usage.free, usage.total

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_DISK_S)
    return found


def _gpus() -> tuple[str, ...]:
    """One line for each GPU if NVIDIA's management library can be imported."""
    try:
        pynvml: Any = import_module("pynvml")
    except ImportError:
        return ()
    lines: list[str] = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            use, memory = pynvml.nvmlDeviceGetUtilizationRates(device), pynvml.nvmlDeviceGetMemoryInfo(device)
            used, total = int(memory.used) >> 20, int(memory.total) >> 20
            lines.append(f"GPU {index}: {use.gpu}% busy, {used} of {total} MiB used")
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return tuple(lines)
    return tuple(lines)
