"""`events.jsonl`: what happens in a run, besides its metrics."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from troupe.orchestrator.errors import StopRequested
from troupe.workers.contract.atomic_file import write_atomic

_MOST_WAITING = 10_000
"""Lines that are kept while a file cannot be written."""


class JsonLinesFile:
    """One JSON object a line, `step` and `time` (seconds since 1970) first."""

    def __init__(self, path: str | Path, keep_through: int) -> None:
        """Open for appending. Lines after `keep_through` (-1: a new run), or cut by a kill, are dropped."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _keep_lines(self.path, keep_through)
        self._file = self.path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        """Lines that could not be written yet."""

    def write(self, step: int, fields: Mapping[str, object]) -> None:
        """Append one line, nan and infinity as null. One that cannot be written is written with a later one."""
        line = {"step": step, "time": round(time.time(), 3)} | {k: _finite(v) for k, v in fields.items()}
        self._waiting.append(f"{json.dumps(line, allow_nan=False)}\n".encode())
        try:
            self._flush()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written (%s): its lines are kept until it can", self.path, error.strerror)

    def _flush(self) -> None:
        """Append the lines that wait. Raises OSError, and the file then ends with a whole line."""
        self._follow_path()
        descriptor = self._file.fileno()
        while self._waiting:
            end = os.fstat(descriptor).st_size
            if self._file.write(self._waiting[0]) < len(self._waiting[0]):
                os.ftruncate(descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._waiting.popleft()

    def _follow_path(self) -> None:
        """Open the file that is at the path now: an editor or a copy replaces it, and a folder can be removed."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                return
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        found = self.path.open("ab+", buffering=0)
        self._file.close()
        self._file = found
        if found.seek(0, os.SEEK_END) and (found.seek(-1, os.SEEK_END), found.read(1))[1] != b"\n":
            found.write(b"\n")

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            logger.error("%s: %d lines are lost: %s", self.path, len(self._waiting), error.strerror)
        self._file.close()


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_lines(path: Path, keep_through: int) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= keep_through]
    if len(kept) == len(lines):
        return
    logger.info("%s: dropped %d lines of steps after %d", path, len(lines) - len(kept), keep_through)
    write_atomic(path, "".join(kept))


def _step_of(line: str) -> float:
    """The step of a complete line; infinity for a truncated or foreign line."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        step = None
    return step if isinstance(step, int) else math.inf


logger = logging.getLogger(__name__)

EVENTS = "events.jsonl"
EVALUATION, REWARDS = "evaluation", "rewards"
"""Fields of the event of a start: digests of how the run evaluates and of what its rewards are."""
_MOST_EARLY = 10_000
"""Events that are kept until the file is open."""
_LONGEST_REASON = 2000
"""Characters of an error's message in an event."""


class EventLog:
    """`events.jsonl`: what happened at which step of a run. Events before `open` are written when it opens."""

    def __init__(self) -> None:
        self.step = 0
        """The step in progress; every event carries it."""
        self.networks: dict[str, str] = {}
        """How fast the network between the nodes of a group of trainers is, by role."""
        self._early: deque[tuple[int, dict[str, object]]] = deque(maxlen=_MOST_EARLY)
        self._sink: JsonLinesFile | None = None

    def open(self, folder: Path, resume_at: int) -> None:
        """Writes to the folder from now on; events of steps after `resume_at` are dropped, all of them at 0."""
        self.step = resume_at
        try:
            self._sink = JsonLinesFile(folder / EVENTS, resume_at if resume_at > 0 else -1)
        except OSError as error:
            logger.warning("%s cannot be written: %s", folder / EVENTS, error.strerror)
            return
        for step, fields in self._early:
            self._sink.write(step, fields)
        self._early.clear()

    def record(self, event: str, **fields: object) -> None:
        """Records an event of the current step."""
        line = {"event": event, **fields}
        if self._sink is None:
            self._early.append((self.step, line))
        else:
            self._sink.write(self.step, line)

    def close(self) -> None:
        """Closes the file; later events are not written."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


@contextmanager
def recorded_failure(events: EventLog) -> Iterator[None]:
    """Records how the run ends if the block raises."""
    try:
        yield
    except StopRequested:
        events.record("run_ended", how="stopped")
        raise
    except BaseException as error:
        reason = str(error) or type(error).__name__
        events.record("run_ended", how="failed", error=type(error).__name__, detail=reason[:_LONGEST_REASON])
        raise
