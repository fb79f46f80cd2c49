"""Requests of commands to an active run, and its answers: files in a subfolder of the run's folder.

No port is opened, and the folder may be on a shared file system. Only the run's user can open it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.atomic_file import PRIVATE, replacing, write_atomic

LONGEST = 64 * 1024
"""Longest request, in bytes."""

_REQUEST, _ANSWER = "request-", "answer-"
_POLL_S = 0.05
_WITHDRAW_S = 0.5
_DESCRIPTORS = 256


@dataclass(frozen=True)
class PostedRequest:
    """A request that has arrived."""

    key: str
    """Common part of the names of its file and its answer's."""
    content: bytes | None
    """None if it cannot be read."""

    @property
    def too_long(self) -> bool:
        """Whether only its beginning was read."""
        return self.content is not None and len(self.content) > LONGEST


class Mailbox:
    """One folder of requests and answers: the run calls `open`, `take` and `answer`, a command `ask`. An answer to a
    request that was withdrawn after the run took it stays until the next `open`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        """Creates the folder, and deletes the requests and answers of an earlier run. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._delete(f"*{_REQUEST}*", f"*{_ANSWER}*")

    def take(self) -> Iterator[PostedRequest]:
        """The requests that have arrived, each deleted before it is returned, so that one process takes it."""
        for file in sorted(self.folder.glob(f"{_REQUEST}*")):
            content = None
            with contextlib.suppress(OSError), file.open("rb") as stream:
                content = stream.read(LONGEST + 1)
            try:
                file.unlink()
            except OSError:  # withdrawn, or taken by another process
                continue
            yield PostedRequest(file.name.removeprefix(_REQUEST), content)

    def answer(self, request: PostedRequest, content: str | bytes) -> None:
        """Answers a request. Raises OSError."""
        write_atomic(self.folder / f"{_ANSWER}{request.key}", content, PRIVATE)

    def ask(self, content: bytes, timeout_s: float, write_s: float | None = None) -> bytes:
        """Sends a request and returns its answer; a disk that hangs blocks only a child. Raises TimeoutError if it
        is not written in `write_s` (or `timeout_s`) or answered in time, and withdraws it; OSError."""
        key, write_s = f"{uuid.uuid4().hex}.json", timeout_s if write_s is None else write_s
        answer, began = self.folder / f"{_ANSWER}{key}", time.monotonic()
        try:
            run_in_child(lambda: self._post(key, content, began + write_s), write_s)
            while not answer.exists() and self.folder.exists():
                if time.monotonic() > began + timeout_s:
                    raise TimeoutError
                time.sleep(_POLL_S)
            return answer.read_bytes()
        finally:
            with contextlib.suppress(OSError):
                run_in_child(lambda: self._delete(f"*{key}"), _WITHDRAW_S)

    def _post(self, key: str, content: bytes, deadline: float) -> None:
        with replacing(self.folder / f"{_REQUEST}{key}", PRIVATE) as unfinished:
            unfinished.write_bytes(content)
            if time.monotonic() > deadline:  # the disk hung, and the command has given up
                raise TimeoutError

    def _delete(self, *patterns: str) -> None:
        for file in (file for pattern in patterns for file in self.folder.glob(pattern)):
            file.unlink(missing_ok=True)


def require_folder(run_folder: Path) -> None:
    """Raises UsageError if the folder of the run does not exist."""
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder}: no such folder; RUN is a run folder, as in runs/NAME")


def run_in_child(action: Callable[[], object], timeout_s: float) -> None:
    """Runs a file operation in a forked child, so that a disk that hangs does not block this process. Raises
    TimeoutError if it has not ended in time, and the child continues when the disk answers; OSError if it failed."""
    child = os.fork()
    if child == 0:
        code = errno.EIO
        try:
            os.closerange(0, _DESCRIPTORS)  # whoever reads the command's output does not wait for this process
            action()
            code = 0
        except OSError as error:
            code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno or code
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            threading.Thread(target=os.waitpid, args=(child, 0), daemon=True).start()  # it leaves no zombie
            raise TimeoutError
        time.sleep(_POLL_S / 10)
    if code := os.waitstatus_to_exitcode(ended[1]):
        raise OSError(code, os.strerror(code))
