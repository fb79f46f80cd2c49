"""Ends everything that a process of user code has started: also what has given itself another session or parent."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator

from troupe.workers.isolation.environment import MARK

_ROUNDS = 20
"""A process that forks while it is being ended is found in the next round."""
PAGE = os.sysconf("SC_PAGE_SIZE")


def new_mark() -> str:
    """A unique mark."""
    return secrets.token_hex(8)


def marked(mark: str) -> Iterator[int]:
    """Process ids of the processes with this mark, or a part of it (`MARK.part`), except this process."""
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            own = (value for value in _environment(name) if value.startswith(wanted))
            if any(value == wanted or value.startswith(wanted + b".") for value in own):
                yield int(name)


def end_marked(mark: str) -> None:
    """Kills all processes with this mark, except this process."""
    for _ in range(_ROUNDS):
        found = list(marked(mark))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def resident_bytes(mark: str) -> tuple[int, int]:
    """Memory of all processes with this mark, as the sum of their resident sets, and their number."""
    sizes = [size for pid in marked(mark) if (size := _resident(pid))]
    return sum(sizes), len(sizes)


def guard(lifeline: int, mark: str) -> None:
    """Fork a process that ends all processes with this mark when the other end of a pipe closes, and then itself.

    The kernel ends the process group of the caller then (`die_with`); this finds the rest. Called
    before user code is imported, while the process is small and has one thread.
    """
    if os.fork():
        return
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        kept = os.dup(lifeline)
        os.closerange(0, kept)
        os.closerange(kept + 1, 4096)
        while os.read(kept, 1):
            pass
        end_marked(mark)
    finally:
        os._exit(0)


def _environment(pid: str) -> list[bytes]:
    """The variables that a process was started with; none where it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def _resident(pid: int) -> int:
    """Resident set of a process, in bytes; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as stream:
            return int(stream.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0
