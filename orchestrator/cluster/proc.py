"""Reads one process: its state in `/proc`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil

_STOPPED = "T"
_ENDED = "Z"


class StoppedProcesses:
    """Finds processes that are stopped (SIGSTOP, a frozen terminal) in several samples in a row. Samples are
    counted, not seconds: after a machine was suspended, no process counts as stopped."""

    def __init__(self, samples: int) -> None:
        """`samples`: how many in a row a process must be stopped to be found."""
        self._samples = samples
        self._seen: Counter[int] = Counter()

    def sample(self, watched: Mapping[int, bool]) -> list[int]:
        """Takes a sample; returns the processes found. `watched`: by process id, whether its descendants count too."""
        stopped = [pid for pid, with_descendants in watched.items() if is_stopped(pid, with_descendants)]
        self._seen = Counter({pid: self._seen[pid] + 1 for pid in stopped})
        return [pid for pid in stopped if self._seen[pid] >= self._samples]


def is_stopped(pid: int, with_descendants: bool) -> bool:
    """Whether the process, or with descendants one of them, is stopped. A process under a debugger is not."""
    if _state(pid) == _STOPPED:
        return True
    if not with_descendants:
        return False
    try:
        return any(_state(child.pid) == _STOPPED for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return False


def kill_tree(pid: int) -> None:
    """Sends SIGKILL to a process and its descendants; does nothing if there are none."""
    try:
        parent = psutil.Process(pid)
        tree = [*parent.children(recursive=True), parent]
    except psutil.Error:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.Error:
            continue


def out_of_memory_kills() -> int:
    """Processes that the kernel's out-of-memory killer has ended on this machine since it was started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def exit_code(pid: int) -> int | None:
    """Exit code of a process that has ended and was not reaped yet, negative for a signal, or None."""
    fields = stat_fields(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == _ENDED else None


def started_at(pid: int) -> int:
    """When a process started, in ticks since the machine did, or 0 without such a process."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int, started: int) -> bool:
    """Whether the process that started at this time (`started_at`) has not ended."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] != _ENDED and int(fields[19]) == started


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process, or empty without such a process."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def stat_fields(pid: int) -> list[str]:
    """Fields of a process's `/proc` stat from its state on, or empty without such a process."""
    try:  # the name of a process is bytes, cut at the 15th
        return Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
