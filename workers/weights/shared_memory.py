"""Private files in shared memory: named, locked, mapped, and removed when their writer ends.

Writer and readers exclude each other with `flock`, which the kernel releases when a process dies.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

Bytes = npt.NDArray[np.uint8]
NOTHING: Bytes = np.empty(0, np.uint8)
_NAME = re.compile(r"troupe-(?P<run_id>[A-Za-z0-9_.-]+)-(?P<pid>\d+)-\d+\.weights")
_serial = itertools.count()


class WeightFileRefused(RuntimeError):
    """The file was not written by Troupe for this user, or its description is invalid."""


def shared_directory(nbytes: int = 0) -> Path:
    """Folder of weight files: /dev/shm if it is writable and has `nbytes` free, otherwise the temporary directory."""
    shm = Path("/dev/shm")
    if os.access(shm, os.W_OK):
        free = os.statvfs(shm)
        if free.f_bavail * free.f_frsize >= nbytes:
            return shm
    return Path(tempfile.gettempdir())


def new_path(directory: Path, run_id: str) -> Path:
    """A new path for a file of this process. Raises ValueError if `run_id` cannot be part of a file name."""
    path = directory / f"troupe-{run_id}-{os.getpid()}-{next(_serial)}.weights"
    if not _NAME.fullmatch(path.name):
        raise ValueError(f"run id {run_id!r} may contain only letters, digits, '_', '.' and '-'")
    return path


def check_name(path: Path) -> None:
    """Raise :class:`WeightFileRefused` unless the path has the form that :func:`new_path` returns."""
    if not _NAME.fullmatch(path.name):
        raise WeightFileRefused(f"{path} is not the name of a weight file")


@contextmanager
def open_for_writing(path: Path) -> Iterator[int]:
    """Descriptor of the private, locked file at `path`; a new file if a reader still uses the old one."""
    fd = _create(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        path.unlink(missing_ok=True)
        fd = _create(path)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield fd
    finally:
        _unlock(fd)


@contextmanager
def open_existing(path: str | Path, *, change: bool = False) -> Iterator[tuple[int, int]]:
    """(descriptor, size in bytes) of a file that its writer cannot change until the context ends; with `change`, nobody
    can read it. Raises WeightFileRefused if the file is a link or belongs to another user, FileNotFoundError if the
    file does not exist, and BlockingIOError if the file is being written, or to be changed while a reader uses it."""
    fd = os.open(path, (os.O_RDWR if change else os.O_RDONLY) | os.O_CLOEXEC | _no_links(path))
    try:
        size = _checked_size(fd, path)
        fcntl.flock(fd, (fcntl.LOCK_EX if change else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        yield fd, size
    finally:
        _unlock(fd)


class FileMapping:
    """The pages of a weight file, kept mapped between versions: mapping costs as much as hashing."""

    def __init__(self, prot: int) -> None:
        """`prot`: `mmap.PROT_READ`, and `PROT_WRITE`."""
        self._prot = prot
        self.drop()

    def of(self, fd: int, size: int) -> Bytes:
        """uint8 [size] of an open, locked file of that size: with full memory growing by a mapping ends the process."""
        status = os.fstat(fd)
        file = (status.st_dev, status.st_ino, size)  # a mapped inode is not reused for another file
        if file != self._file:
            self.drop()
            if size:
                # Populating the mapping up front is three times faster than a fault per page.
                mapped = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=self._prot)
                self._bytes = np.frombuffer(mapped, np.uint8)
            self._file = file
        return self._bytes

    def drop(self) -> None:
        self._file, self._bytes = (0, 0, 0), NOTHING


def remove_stale(directory: Path, run_id: str) -> list[Path]:
    """Remove this user's files of run `run_id` whose publisher on this machine is dead; returns what was removed."""
    removed = []
    for path in directory.glob("troupe-*.weights"):
        parts = _NAME.fullmatch(path.name)
        if parts is None or parts["run_id"] != run_id or psutil.pid_exists(int(parts["pid"])):
            continue
        if path.lstat().st_uid == os.geteuid():
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _unlock(fd: int) -> None:
    """Unlock and close the file. A mapping keeps the file open, and would keep the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _create(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _no_links(path), 0o600)
    try:
        _checked_size(fd, path)
    except WeightFileRefused:
        os.close(fd)
        raise
    return fd


def _no_links(path: str | Path) -> int:
    """The flag that makes `open` refuse links. Checks for a link first, to raise a clear error."""
    if os.path.islink(path):
        raise WeightFileRefused(f"{path} is a symbolic link")
    return os.O_NOFOLLOW


def _checked_size(fd: int, path: str | Path) -> int:
    """Size in bytes of an open file; it must be a regular file that only this user can open."""
    status = os.fstat(fd)
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not private:
        raise WeightFileRefused(f"{path} is not a private file of this user")
    return status.st_size
