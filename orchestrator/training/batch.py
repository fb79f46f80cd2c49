"""Where a step's batch comes from: the part of the loop that differs between rollouts and examples that are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from orchestrator.errors import StopRequested
from orchestrator.handles import TableRef
from orchestrator.metrics import PhaseTimers
from workers.messages import TrainSummary

T = TypeVar("T")


@dataclass(frozen=True)
class TextPicks:
    """Pieces of text to be learnt along with a batch."""

    table: TableRef
    tokens: tuple[int, ...]
    """Of every piece of the table."""
    rows: tuple[int, ...]
    """The pieces picked."""


@dataclass(frozen=True)
class Batch:
    """One step's batch, ready for the trainers."""

    summary: TrainSummary
    table: TableRef
    units: tuple[tuple[int, ...], ...] | None = None
    """Rows that must share a micro-batch (the two answers of a pair); None: every row stands alone."""
    texts: TextPicks | None = None
    """What the policy learns along with the batch (PPO-ptx)."""

    @property
    def parts(self) -> int:
        """What a mini-batch is dealt from: units, or rows where they stand alone."""
        return len(self.summary.rows) if self.units is None else len(self.units)


class BatchSource(Protocol):
    """Gives one batch a step, keeps the books of what was trained, and says what to save to go on.

    The loop calls, step by step: `next_batch`, then `trained` once the updates are done, then `metrics`, then
    `written`; `state` at any time between two steps.
    """

    def start(self) -> None:
        """The first batch will be asked for soon."""
        ...

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """The next batch for a policy of this version. Raises StopRequested where the run is to stop meanwhile."""
        ...

    def trained(self, version: int) -> None:
        """The batch took part in its updates; the policy is now of this version."""
        ...

    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        """What to say of the batch on which `version` was trained, in a step of so many seconds."""
        ...

    async def written(self, version: int) -> None:
        """Write down the batch on which `version` was trained, where it is to be kept; may go on in the background."""
        ...

    async def flush(self) -> None:
        """Wait for whatever is still being written."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-ready: where to go on after the last batch that was trained."""
        ...

    async def probe(self) -> None:
        """Look after the workers that only this source has."""
        ...

    async def close(self) -> None:
        """Ask for nothing more."""
        ...


class HeldOut(Protocol):
    """An evaluation on data that are not trained on."""

    async def run(self, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Figures by name (`eval/...`); `progress(done, total)` is called on the way."""
        ...


async def unless_stopped(stop: asyncio.Event, work: Coroutine[object, object, T]) -> T:
    """Await `work`, or raise StopRequested as soon as `stop` is set (the work is cancelled)."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            raise StopRequested("a stop was asked for")
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()
