"""Processes below one that a test started, or below the test itself."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

WAIT_S = 60.0


def command_line(process: psutil.Process) -> str:
    """Its arguments or the title that it gave itself; empty if it has ended, as a zombie has."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def descendants(pid: int | None = None, title: str = "") -> list[psutil.Process]:
    """Running processes below this one (by default the test's), whose command line contains `title`."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if (line := command_line(process)) and title in line]


def suspend(process: psutil.Process) -> None:
    """Stop a process, and wait until all of its threads have stopped: a signal takes its time."""
    process.suspend()
    wait_for_state(process.pid, "T")


def wait_for_state(pid: int, state: str) -> None:
    """Wait until all threads of a process are in this state; fails after a minute."""
    deadline = time.monotonic() + WAIT_S
    while set(states := thread_states(pid)) != {state}:
        assert time.monotonic() < deadline, f"the threads of process {pid} are in {states}, not in {state}"
        time.sleep(0.01)


def thread_states(pid: int) -> list[str]:
    """What /proc says about each thread of a process: R, S, D, T ..."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]
