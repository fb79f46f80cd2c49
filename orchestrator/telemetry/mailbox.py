"""Requests of commands to an active run, as files of a folder that only the run's user can open.

A command writes `request-KEY` and waits for `answer-KEY`. No port is opened; the folder may be on a shared file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

LONGEST = 64 * 1024
"""Longest request that is read, in bytes."""
_POLL_S = 0.05
_WITHDRAW_S = 0.5
_DESCRIPTORS = 256


@dataclass(frozen=True)
class PostedRequest:
    """A request that the run has taken."""

    key: str
    content: bytes | None
    """None if it is longer than LONGEST."""


class Mailbox:
    """The requests and answers of one folder, whose names end with `suffix`.

    The run calls :meth:`open`, :meth:`take` and :meth:`answer`, a command :meth:`ask`. The answer to a request that is
    withdrawn after the run has taken it stays until the next :meth:`open`.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self._folder = folder
        self._suffix = suffix

    def open(self) -> None:
        """Create the folder and delete the messages of an earlier run. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete("*request-*", "*answer-*")

    def take(self) -> PostedRequest | None:
        """Remove a request from the folder and return it; None if none waits. Each request is taken once."""
        for file in sorted(self._folder.glob(f"request-*{self._suffix}")):
            with contextlib.suppress(OSError):  # withdrawn, or taken by another process
                with file.open("rb") as stream:
                    content = stream.read(LONGEST + 1)
                file.unlink()
                return PostedRequest(file.name.removeprefix("request-"), content if len(content) <= LONGEST else None)
        return None

    def answer(self, request: PostedRequest, content: bytes | str) -> None:
        """Answer a request. Raises OSError."""
        write_atomic(self._folder / f"answer-{request.key}", content, PRIVATE)

    def ask(self, content: bytes | str, timeout_s: float, write_s: float) -> bytes:
        """Post a request and return its answer.

        Args:
            content: The request.
            timeout_s: Longest wait for the answer, in seconds.
            write_s: Longest wait until the request is written, in seconds.

        Raises:
            TimeoutError: There was no answer in time. The request is withdrawn.
            OSError: The folder is not accessible, or has been deleted.
        """
        deadline, key = time.monotonic() + timeout_s, f"{uuid.uuid4().hex}{self._suffix}"
        request, answer = self._folder / f"request-{key}", self._folder / f"answer-{key}"
        try:
            run_in_child(lambda: write_atomic(request, content, PRIVATE), write_s)
            while not answer.exists() and self._folder.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_POLL_S)
            return answer.read_bytes()
        finally:
            with contextlib.suppress(OSError):
                run_in_child(lambda: self._delete(f"*-{key}*"), _WITHDRAW_S)

    def _delete(self, *patterns: str) -> None:
        for file in (file for pattern in patterns for file in self._folder.glob(pattern)):
            file.unlink(missing_ok=True)


def require_folder(run_folder: Path) -> None:
    """Raise UsageError if there is no such folder."""
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder}: no such folder; RUN is a run folder, as in runs/NAME")


def run_in_child(action: Callable[[], object], timeout_s: float) -> None:
    """Run a file operation in a forked child, so that a disk that hangs does not block this process.

    Raises:
        TimeoutError: It has not ended in time. The child ends when the disk answers.
        OSError: It failed.
    """
    child = os.fork()
    if child == 0:
        code = errno.EIO
        try:
            os.closerange(0, _DESCRIPTORS)  # whoever reads the command's output does not wait for this process
            action()
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise TimeoutError
        time.sleep(_POLL_S / 10)
    if code := os.waitstatus_to_exitcode(ended[1]):
        raise OSError(code, os.strerror(code))
