"""The lock of a run folder: one run at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import getpass
import hashlib
import json
import logging
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from troupe.orchestrator.cluster.proc import is_running, started_at
from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
"""Name of the file in the run folder; it stays there, and is locked only while a run is active."""
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_LONGEST_COMMAND = 200
_SILENT_S = 120.0
"""A process on another host counts as dead if it has not renewed its lock for this long."""
_LOOK_S = 1.0
"""Interval at which a run checks that its folder exists."""


class RunLock:
    """The lock of a run folder, held until `close`: a name that the kernel keeps for this host, and a file, which is
    made and locked again after a removal of the folder."""

    def __init__(self, folder: Path, waits: str = "") -> None:
        """Locks an existing folder. `waits`: see `LockHolder`. Raises UsageError if another run holds it; OSError."""
        self._folder = folder
        self._waits = waits
        self._path = folder / LOCK_FILE
        self._name = _reserved(folder)
        self._changing = threading.Lock()
        """Held while the file is exchanged or closed."""
        self._closed = False
        try:
            self._file = self._lock()
        except BaseException:
            self._name.close()
            raise

    def renew(self) -> bool:
        """Locks the folder again if it, or the file, was removed; whether that was so. Another thread may close the
        lock. Raises UsageError if another run was faster; OSError."""
        try:
            with self._changing:
                if self._closed:
                    return False
                held = os.fstat(self._file)
            if os.path.samestat(held, self._path.stat()):
                os.utime(self._path)  # other hosts cannot see the process
                return False
        except FileNotFoundError:
            self._folder.mkdir(parents=True, exist_ok=True)
        file = self._lock()
        with self._changing:
            unneeded, self._file = (file, self._file) if self._closed else (self._file, file)
            os.close(unneeded)
            return not self._closed

    def close(self) -> None:
        """Releases the lock, and empties the file: it names who holds it, or died with it. One that waited leaves its
        name until the process that it starts has the lock."""
        with self._changing:
            self._closed = True
            if not self._waits:
                with suppress(OSError):
                    os.ftruncate(self._file, 0)
            os.close(self._file)
        self._name.close()

    def _lock(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with _naming(self._path):
                _flock(descriptor, self._path)
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps(_own_facts() | {"waits": self._waits}, indent=2).encode() + b"\n")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


_FACTS = dict.fromkeys(("user", "host", "command", "waits"), str) | dict.fromkeys(("pid", "started", "namespace"), int)
"""What the file has besides the time, and its types."""


@dataclass(frozen=True)
class LockHolder:
    """The process that has locked a run folder and has not released it."""

    user: str
    host: str
    pid: int
    started: int
    """Start of the process, as the kernel counts: a process id may be reused."""
    namespace: int
    """The process ids that it is counted among: a container may have other ones, and the name of its host."""
    since: float
    """When it locked the folder, in seconds since 1970."""
    command: str
    waits: str = ""
    """What it waits for instead of training, as a clause; empty if it trains."""
    silent_s: float = 0.0
    """Seconds since it renewed the lock."""

    @classmethod
    def of(cls, folder: Path) -> LockHolder | None:
        """The holder that the file names, or None if it names none."""
        file = folder / LOCK_FILE
        try:
            read, silent_s = {"waits": ""} | json.loads(file.read_text()), time.time() - file.stat().st_mtime
            facts = {name: read[name] for name in _FACTS}
            since = datetime.fromisoformat(read["since"]).timestamp()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # there is none, or it is being written
            return None
        if any(type(facts[name]) is not kind for name, kind in _FACTS.items()):
            return None
        return cls(**facts, since=since, silent_s=silent_s)

    @property
    def is_active(self) -> bool:
        """Whether the process runs; of another host's or container's, whether it has renewed the lock lately."""
        return is_running(self.pid, self.started) if self._is_local else self.silent_s < _SILENT_S

    @property
    def absence(self) -> str:
        """What is known about the end of a process that is not active."""
        process = f"process {self.pid} on {self.host}"
        if not self._is_local:
            return f"{process} has not renewed its lock for {self.silent_s:.0f} s"
        return f"{process} has left no record of its end: it was killed (SIGKILL), or exited at once (a second Ctrl-C)"

    @property
    def _is_local(self) -> bool:
        return (self.host, self.namespace) == (socket.gethostname(), _namespace())


@contextmanager
def locked(folder: Path, waits: str = "") -> Iterator[RunLock]:
    """Holds the lock of an existing run folder. The kernel releases it when this process ends; processes that it
    starts do not inherit it. `waits`: see `LockHolder`. Raises UsageError if another run holds it; OSError."""
    lock = RunLock(folder, waits)
    try:
        yield lock
    finally:
        lock.close()


@contextmanager
def kept(lock: RunLock, file: Path) -> Iterator[None]:
    """Makes the run folder, its lock and this file again if they are removed in the block; a thread looks."""
    over = threading.Event()
    thread = threading.Thread(target=_keep, args=(lock, file, over), name="keep run folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LOOK_S)


def _keep(lock: RunLock, file: Path, over: threading.Event) -> None:
    """Checks the files at a fixed interval until `over`."""
    content: bytes | None = None
    while not over.wait(_LOOK_S):
        try:
            if lock.renew():
                logger.warning("%s was removed, and is made again; what was in it is lost", file.parent)
            if over.is_set():
                return
            if file.exists():
                content = file.read_bytes()
            elif content is not None:
                write_atomic(file, content.decode(), PRIVATE)
        except (OSError, UsageError) as error:
            logger.warning("%s: %s", file.parent, error)


def _reserved(folder: Path) -> socket.socket:
    """A name of this folder in the kernel of this host (an abstract socket), which only one process can have."""
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0troupe-run-{os.getuid()}-{digest}")
    except OSError as error:
        name.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(folder) from None
    return name


def _flock(descriptor: int, path: Path) -> None:
    """Locks an open file. Raises UsageError if another run has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path.parent) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        logger.warning("%s cannot be locked (%s): make sure that no other run uses this folder", path, error)


def _taken(folder: Path) -> UsageError:
    who, held = LockHolder.of(folder), "a run is active in it"
    if who is not None:
        since = datetime.fromtimestamp(who.since, UTC).isoformat(timespec="seconds")
        held += f" (process {who.pid} of {who.user} on {who.host}, since {since}: {who.command})"
    return UsageError(f"{folder}: {held}; stop it (`troupe stop`), or use another --out")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Gives an OSError of a descriptor the path of its file: a full disk is named."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _own_facts() -> dict[str, object]:
    return {
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": started_at(os.getpid()),
        "namespace": _namespace(),
        "since": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": shlex.join(sys.argv)[:_LONGEST_COMMAND],
    }


def _namespace() -> int:
    """The kernel's number for the process ids that this process sees, or 0 without /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run under ids without a name
        return str(os.getuid())
