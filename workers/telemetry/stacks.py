"""Stacks on request: a process writes the stacks of all its threads to a separate file when it receives SIGUSR1.

The handler is written in C and needs no interpreter lock: it works while a process computes, waits for a lock or hangs
in a library. Every kind of process installs it once: the driver, the workers, and processes of vLLM, reward functions
and environments. Descendants find the folder in an environment variable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

VARIABLE = "TROUPE_STACKS"
"""Environment variable with the folder for the files of stacks."""
FOLDER = "stacks"
"""The folder, in the log folder of Ray's session on every node: a local disk, on which writing does not hang."""
SIGNAL = signal.SIGUSR1
LARGEST = 2**20
"""Bytes at which a file of stacks is emptied before the next request."""
_MOST_FILES = 256
"""Files of ended processes are removed from a folder with at least this many files."""
_RAY_LOG = re.compile(r"worker-.*\.err")
_NAME = re.compile(r"stacks-(\d+)\.txt")
_open: list[IO[bytes]] = []
"""The file of this process; kept open for the handler."""


def stack_file(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}.txt"


def write_stacks_on_signal(folder: str | Path | None = None) -> None:
    """From now on, SIGUSR1 appends this process's stacks to its file, in the folder, or the parent's, or that of the
    Ray worker's log; a forked process calls this again. A failure costs the stacks and nothing else."""
    place = folder or stacks_folder()
    if not place:
        return
    try:
        path = Path(place)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(stack_file(path, os.getpid()), flags, 0o600)
    except OSError as error:
        logger.debug("no stacks on SIGUSR1: %s", error)
        return
    stream = os.fdopen(descriptor, "ab", buffering=0)
    faulthandler.register(SIGNAL, stream, all_threads=True, chain=False)
    for before in _open:
        before.close()
    _open[:] = [stream]
    os.environ[VARIABLE] = str(path)


def stacks_folder() -> str:
    """The folder for the stacks of this process and those it starts; empty if there is none."""
    if place := os.environ.get(VARIABLE):
        return place
    try:
        log = Path(os.readlink("/proc/self/fd/2"))
    except OSError:
        return ""
    return str(log.parent / FOLDER) if _RAY_LOG.fullmatch(log.name) else ""


def _remove_old(folder: Path) -> None:
    """Removes the files of processes that have ended, if there are many."""
    files = [(path, found) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]
    if len(files) < _MOST_FILES:
        return
    for path, found in files:
        if not Path(f"/proc/{found[1]}").exists():
            with contextlib.suppress(OSError):
                path.unlink()
