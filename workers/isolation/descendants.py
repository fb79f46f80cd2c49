"""The environment of a process that runs user code, and its descendants: how they are found, measured and ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import secrets
import select
import signal
from collections.abc import Collection, Iterator, Mapping
from typing import NoReturn

from troupe.workers.contract.text import has_credentials, is_secret
from troupe.workers.telemetry.peak_memory import sizes
from troupe.workers.telemetry.stacks import VARIABLE, stacks_folder

MARK = "TROUPE_CHILD"
"""Variable that identifies all descendants of a process, whatever session and parent they have given themselves."""


def child_environment(mark: str, keep: Collection[str] = (), of: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment (or `of`) with the mark of a child, without variables that are secret by name or by
    a URL's password, but those in `keep`."""
    inherited = os.environ if of is None else of
    hidden = {
        name for name, value in inherited.items() if is_secret(name) or ("://" in value and has_credentials(value))
    }
    visible = {name: value for name, value in inherited.items() if name in keep or name not in hidden}
    stacks = {VARIABLE: folder} if of is None and (folder := stacks_folder()) else {}
    return visible | stacks | {MARK: mark}


_ROUNDS = 20
"""A process that forks while it is being ended is found in the next round."""
PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1


def new_mark() -> str:
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


def used_bytes(mark: str, *, at_most: int = 0) -> tuple[int, int]:
    """Memory of all processes with this mark, shared pages counted once, and their number. The sum of resident sets
    is cheaper to read: it is returned up to `at_most`."""
    resident = [size for pid in marked(mark) if (size := _resident(pid))]
    if sum(resident) <= at_most:
        return sum(resident), len(resident)
    shares = [size for pid in marked(mark) if (size := sizes(pid, "smaps_rollup").get("Pss:", 0))]
    return sum(shares), len(shares)


def run_guarded(owner_pipe: int, mark: str) -> None:
    """Continue in a child process, in a new session, that this process guards; returns in the child only. The guard
    ends all processes with this mark, and the child's group, when the child ends or the pipe closes; then itself
    as the child did. User code that kills its parent or group ends the guard and thereby itself, not the worker.
    Called while the process is small and has one thread."""
    guard = os.getpid()
    child = os.fork()
    if child:
        _guard(child, owner_pipe, mark)
    end_with_parent(guard)
    os.setsid()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends; exits if it has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _guard(child: int, owner_pipe: int, mark: str) -> NoReturn:
    """Wait for the child, or the end of the worker; see `run_guarded`."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        kept = os.dup(owner_pipe)
        os.closerange(0, kept)
        os.closerange(kept + 1, 4096)
        ended = os.pidfd_open(child)
        waiting = select.poll()
        waiting.register(kept, select.POLLHUP)
        waiting.register(ended, select.POLLIN)
        waiting.poll()
        with contextlib.suppress(ProcessLookupError):  # before it is reaped: until then the id is its own
            os.killpg(child, signal.SIGKILL)
        end_marked(mark)
        _end_as(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        os._exit(1)


def _end_as(code: int) -> NoReturn:
    """End this process with an exit code, or, if it is negative, by a signal."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _environment(pid: str) -> list[bytes]:
    """The variables that a process was started with; none if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def _resident(pid: int) -> int:
    """Resident set of a process, in bytes; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as stream:
            return int(stream.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0
