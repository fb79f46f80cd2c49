"""A JSON Lines file with a line or more for each step, which a resumed run continues: metrics and events."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from troupe.workers.contract.atomic_file import write_atomic

logger = logging.getLogger(__name__)

_MOST_WAITING = 10_000
"""Lines that are kept while a file cannot be written."""


class JsonLinesFile:
    """One JSON object a line, `step` and `time` (seconds since 1970) first."""

    def __init__(self, path: str | Path, keep_through: int) -> None:
        """Open for appending. `keep_through`: last step to keep; -1 for a new run. Lines of later steps and a line
        truncated by a kill are dropped, because a run resumed at that step writes them again."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _keep_lines(self.path, keep_through)
        self._file = self.path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        """Lines that could not be written yet."""

    def write(self, step: int, fields: Mapping[str, object]) -> None:
        """Append one line. nan and infinity become null, because JSON has neither. A line that cannot be written (disk
        full, read-only) is written with a later one."""
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
        """Close the file, with all lines if they can be written now."""
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
