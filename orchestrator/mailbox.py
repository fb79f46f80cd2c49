"""Requests of commands to an active run, and its answers: files in a subfolder of the run's folder.

No port is opened, and the folder may be on a shared file system. Only the run's user can open it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from troupe.workers.contract.atomic_file import PRIVATE, write_atomic

LONGEST = 64 * 1024
"""Longest request, in bytes."""

_REQUEST, _ANSWER = "request-", "answer-"
_POLL_S = 0.1

Change = Callable[[Callable[[], object]], bool]
"""Makes one change of the folder and returns whether it succeeded."""


@dataclass(frozen=True)
class Request:
    """A request that has arrived."""

    key: str
    """What its file and that of its answer share in their names."""
    content: bytes | None
    """None: it cannot be read."""

    @property
    def too_long(self) -> bool:
        """Whether only its beginning was read."""
        return self.content is not None and len(self.content) > LONGEST


class Mailbox:
    """One folder of requests and answers, with the side of the run and that of the command."""

    def __init__(self, folder: Path) -> None:
        """Neither creates nor reads the folder."""
        self.folder = folder

    def open(self) -> None:
        """Creates the folder, without requests and answers of an earlier run. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in (*self.folder.glob(f"{_REQUEST}*"), *self.folder.glob(f"{_ANSWER}*")):
            stale.unlink(missing_ok=True)

    def take(self) -> Iterator[Request]:
        """The requests that have arrived, each deleted before it is returned. Raises OSError."""
        for file in sorted(self.folder.glob(f"{_REQUEST}*")):
            try:
                with file.open("rb") as stream:
                    content = stream.read(LONGEST + 1)
            except OSError:
                content = None
            file.unlink(missing_ok=True)
            yield Request(file.name.removeprefix(_REQUEST), content)

    def answer(self, request: Request, content: str | bytes) -> None:
        """Answers a request. Raises OSError."""
        write_atomic(self.folder / f"{_ANSWER}{request.key}", content, PRIVATE)

    def ask(self, content: str | bytes, timeout_s: float, change: Change | None = None) -> bytes | None:
        """Sends a request and waits for its answer.

        Args:
            content: The request.
            timeout_s: Longest wait for the answer, in seconds. Then the request is withdrawn.
            change: Makes the changes of the folder; None: this process makes them.

        Returns:
            The answer; None if there is none in time, or if the request could not be written by `change`.

        Raises:
            OSError: The folder is gone or not accessible.
        """
        change = change or _directly
        key = f"{uuid.uuid4().hex}.json"
        request, answer = self.folder / f"{_REQUEST}{key}", self.folder / f"{_ANSWER}{key}"
        deadline = time.monotonic() + timeout_s
        if not change(lambda: write_atomic(request, content, PRIVATE)):
            return None
        while time.monotonic() < deadline:
            if answer.exists() or not self.folder.exists():
                text = answer.read_bytes()
                answer.unlink(missing_ok=True)
                return text
            time.sleep(_POLL_S)
        change(lambda: request.unlink(missing_ok=True))
        return None


def _directly(change: Callable[[], object]) -> bool:
    change()
    return True
