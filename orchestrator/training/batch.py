"""Interfaces between the loop and its data: the part that differs between rollouts and offline data."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from troupe.orchestrator.cluster.worker_group import WorkerGroup
from troupe.orchestrator.data.texts import TextPicks
from troupe.orchestrator.errors import StopRequested
from troupe.orchestrator.telemetry.metrics import PhaseTimers
from troupe.orchestrator.training.checkpoint import Checkpoint
from troupe.orchestrator.training.micro_batches import plan_ranks
from troupe.workers.contract.messages import RankPlan, TrainSummary
from troupe.workers.contract.roles import TableRef

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """The batch of one step, ready for the trainers."""

    summary: TrainSummary
    table: TableRef
    units: tuple[tuple[int, ...], ...] | None = None
    """Rows that must share a micro-batch (the two responses of a pair), or None if rows are independent."""
    texts: TextPicks | None = None
    """Plain texts on which the policy trains along with the batch (PPO-ptx)."""


@dataclass(frozen=True)
class SourceSnapshot:
    """State of a source and of its untrained work, for a checkpoint."""

    state: dict[str, Any]
    """JSON-ready state from which a run resumes after the last trained batch."""
    ledger: dict[str, Any]
    """State of the ledger at the same moment."""
    samples: int = 0
    """Finished samples of open groups."""
    write: Callable[[Path], Awaitable[int]] | None = None
    """Writes these samples into the folder of a checkpoint and returns how many. None without samples."""


class BatchSource(Protocol):
    """Supplies one batch per step. The loop calls `next_batch`, `mark_trained` after the updates, `metrics` and
    `save_trajectories` in each step, and `snapshot` between two. Methods that are not abstract do nothing by
    default."""

    @abstractmethod
    async def restore(self, found: Checkpoint) -> int:
        """Takes over what `snapshot` returned, before the start. Returns how many finished samples of the checkpoint
        are not sampled again. Raises CheckpointError if it is the state of another kind of run; DataError if the order
        of the data cannot continue."""

    def start(self) -> None:
        """Starts work on the first batch."""

    @abstractmethod
    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """Waits for the next batch for a policy of this version. Raises StopRequested if the run is to stop."""

    @abstractmethod
    def mark_trained(self, version: int) -> None:
        """Records the last batch as trained; the policy now has this version."""

    def mark_served(self, version: int) -> None:
        """Records that every engine serves this version, which is trained or being recorded as trained."""

    @abstractmethod
    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        """Metrics of the batch on which `version` was trained, in a step that took `seconds`."""

    async def save_trajectories(self, version: int) -> None:
        """Writes the samples on which `version` was trained, if the run keeps them; may continue in the background."""

    async def flush(self) -> None:
        """Waits until everything is written."""

    @abstractmethod
    async def snapshot(self) -> SourceSnapshot:
        """Returns what to save after the last trained batch, all as of one moment."""

    async def probe(self) -> None:
        """Probes the workers that only this source uses."""

    async def close(self) -> None:
        """Stops all work in flight."""


class HeldOutEvaluation(Protocol):
    """An evaluation on held-out data."""

    async def run(self, step: int, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Metrics by name (`eval/...`) after `step` steps; calls `progress(done, total)` during the evaluation."""
        ...


class EvaluationBesideTraining(Protocol):
    """An evaluation on held-out data that training does not wait for."""

    async def begin(self, step: int) -> Coroutine[Any, Any, dict[str, float]] | None:
        """Begins an evaluation after `step` steps, or None if training has to wait. It may raise EvaluationLost."""
        ...


async def unless_failed(watch: asyncio.Task[Any], work: Coroutine[object, object, T]) -> T:
    """Awaits `work`, which is cancelled if `watch` fails first; then raises what `watch` raised."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            watch.result()
        return await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Awaits `work`. Raises StopRequested if `stop` was set; `work` is cancelled."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            raise StopRequested("the run was asked to stop")
        return task.result()
    finally:
        stopped.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # it ends its work while Ray is still running


def plan_rows(lengths: Sequence[int], group: WorkerGroup[Any]) -> list[RankPlan]:
    """A plan of rows with these tokens for each share of a group."""
    size = group.data_parallel_size, group.micro_batch_tokens
    return plan_ranks(lengths, range(len(lengths)), *size, packed=group.packs)
