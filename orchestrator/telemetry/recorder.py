"""Records the timeline of every step of a run.

Nothing here ends a run: what cannot be written is reported in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.run_folder import TIMELINES, TRAJECTORIES, step_files
from troupe.orchestrator.telemetry.timeline import DRIVER, CallLog, Span, timeline_table
from troupe.workers.contract.atomic_file import replacing
from troupe.workers.contract.units import GIB

logger = logging.getLogger(__name__)

_MOST_WAITING = 1000
"""Timelines that are kept while the disk is slow."""
_FLUSH_S = 60.0


class RunRecorder:
    """Writes the timeline of every step, and deletes what is beyond the bound."""

    def __init__(
        self, calls: CallLog, events: EventLog, folder: Path | None = None, resume_at: int = 0, keep_gib: float = 0.0
    ) -> None:
        """Drops the timeline and samples after `resume_at`. `keep_gib`: GiB that they may take; 0: any."""
        self.events = events
        self._calls = calls
        self._folder = folder
        self._bound = int(keep_gib * GIB)
        self._writing: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[int, list[Span]]] = deque(maxlen=_MOST_WAITING)
        """Step and spans of the timelines to be written."""
        if folder is not None:
            _drop_after(folder, resume_at if resume_at > 0 else -1)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Records the block as a phase of the controller."""
        return self._calls.during(DRIVER, name, 0.0)

    async def end_step(self, step: int) -> None:
        """Has the spans that ended during the step written in the background. A slow disk delays no step."""
        spans = self._calls.drain()
        if self._folder is None:
            return
        self._waiting.append((step, spans))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_waiting(self._folder))

    async def _write_waiting(self, folder: Path) -> None:
        """Writes one timeline after another until none is waiting."""
        while self._waiting:
            await asyncio.to_thread(self._write, folder, *self._waiting.popleft())

    async def flush(self) -> None:
        """Waits for the timelines that are being written, for at most `_FLUSH_S` seconds."""
        if self._writing is not None:
            _, late = await asyncio.wait([self._writing], timeout=_FLUSH_S)
            if late:
                logger.warning("%d timelines are not written yet after %g s", 1 + len(self._waiting), _FLUSH_S)

    async def close(self) -> None:
        """Adds the spans that are left to the timeline of the step in progress, the last one after a complete run."""
        await self.flush()
        spans = self._calls.drain()
        if self._folder is not None and spans:
            await asyncio.to_thread(self._write, self._folder, self.events.step, spans, append=True)

    def _write(self, folder: Path, step: int, spans: Sequence[Span], *, append: bool = False) -> None:
        table = timeline_table(step, spans)
        path = folder / TIMELINES / f"step-{step:06d}.parquet"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if append and path.exists():
                table = pa.concat_tables([pq.read_table(path), table])
            with replacing(path) as unfinished:
                pq.write_table(table, unfinished, compression="zstd")
            if self._bound:
                delete_oldest(folder, self._bound)
        except (OSError, pa.ArrowException) as error:
            logger.warning("the timeline of step %d is not written: %s", step, error)


def delete_oldest(folder: Path, bound: int) -> list[int]:
    """Deletes samples and timelines of the oldest steps, but the newest, beyond `bound` bytes; returns the steps."""
    of_step: dict[int, list[Path]] = {}
    for files in _files(folder):
        for step, path in files.items():
            of_step.setdefault(step, []).append(path)
    sizes = {step: sum(_size(path) for path in paths) for step, paths in of_step.items()}
    total, deleted = sum(sizes.values()), []
    for step in sorted(sizes)[:-1]:
        if total <= bound:
            break
        for path in of_step[step]:
            path.unlink(missing_ok=True)
        total -= sizes[step]
        deleted.append(step)
    if deleted:
        logger.info("%s: deleted samples and timelines of steps %d to %d", folder, deleted[0], deleted[-1])
    return deleted


def _drop_after(folder: Path, step: int) -> None:
    for files in _files(folder):
        for number, path in files.items():
            if number > step:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("%s cannot be deleted: %s", path, error.strerror)


def _files(folder: Path) -> Iterable[dict[int, Path]]:
    return [step_files(folder / name) for name in (TRAJECTORIES, TIMELINES)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
