"""The lock of a run folder: one run at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from troupe.orchestrator.errors import UsageError

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
"""Name of the file in the run folder; it stays there, and is locked only while a run is active."""
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_LONGEST_COMMAND = 200


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of an existing run folder within the `with` block.

    The kernel releases the lock when this process ends, however it ends, so that there are no stale locks. Processes
    that this one starts do not inherit it.

    Raises:
        UsageError: Another run holds it; the message says which.
        OSError: The file cannot be created.
    """
    path = folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: {_holder(path)}; stop it (`troupe stop`), or use another --out") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning("%s cannot be locked (%s): make sure that no other run uses this folder", path, error)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_own_facts(), indent=2).encode() + b"\n")
        yield
    finally:
        os.close(descriptor)


def _own_facts() -> dict[str, object]:
    return {
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv)[:_LONGEST_COMMAND],
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run under ids without a name
        return str(os.getuid())


def _holder(path: Path) -> str:
    """Who holds the lock, as far as its file says."""
    try:
        facts = json.loads(path.read_text())
        process = f"process {int(facts['pid'])} of {facts['user']} on {facts['host']}"
        return f"a run is active in it ({process}, since {facts['since']}: {facts['command']})"
    except (OSError, ValueError, KeyError, TypeError):  # it is just being written
        return "a run is active in it"
