"""How services see workers: by name and method, whether behind them is a Ray actor or a plain object in a test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
TableRef = Any
"""A reference to an Arrow table in the object store (in tests with fakes: the table itself)."""


class WorkerHandle(Protocol):
    """One worker."""

    @property
    def name(self) -> str:
        """Role and index, as in `rollout-0`."""
        ...

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run a method that returns scalars.

        Raises WorkerDied, WorkerTimeout or WorkerRaised (`orchestrator.errors`).
        """
        ...

    async def call_for_table(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, TableRef]:
        """Run a method that returns (summary, table); the table stays where it is and comes back as a reference."""
        ...

    def kill(self) -> None:
        """End the worker's process at once."""
        ...


class EngineLink(Protocol):
    """vLLM's weight-sync client, driving all engines at once from inside the trainer (device back-ends)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join the transfer."""
        ...

    def start_weight_update(self) -> None:
        """Freeze every engine for an update."""
        ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights on every engine."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new version on every engine."""
        ...


Link = Callable[[Sequence[WorkerHandle]], EngineLink]
"""Make the link to these engines."""


class Gang:
    """The ranks of one role, called together and in the same order on every rank."""

    def __init__(
        self, role: str, workers: Sequence[WorkerHandle], micro_batch_tokens: int, shares_prompts: bool = False
    ) -> None:
        """`shares_prompts`: the model trains the samples of a group behind one copy of their prompt exactly."""
        self.role = role
        self.shares_prompts = shares_prompts
        self.workers = tuple(workers)
        self.micro_batch_tokens = micro_batch_tokens

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return len(self.workers)

    async def broadcast(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The same call on every rank; results by rank."""
        return await together(worker.call(method, *args, timeout_s=timeout_s) for worker in self.workers)

    async def scatter(self, method: str, parts: Sequence[Any], *args: Any, timeout_s: float) -> list[Any]:
        """The same method with `parts[rank]` as first argument; results by rank."""
        return await together(
            worker.call(method, part, *args, timeout_s=timeout_s)
            for worker, part in zip(self.workers, parts, strict=True)
        )

    async def scatter_for_tables(
        self, method: str, parts: Sequence[Any], *args: Any, timeout_s: float
    ) -> list[tuple[Any, TableRef]]:
        """As :meth:`scatter`, for methods that return (summary, table)."""
        return await together(
            worker.call_for_table(method, part, *args, timeout_s=timeout_s)
            for worker, part in zip(self.workers, parts, strict=True)
        )


_SUBMITTED_AT_ONCE = 16


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls side by side, submitted in order; the first error ends the others and is raised.

    Calls to thousands of workers hold up nothing else: after every few of them whatever is ready has its turn.
    """
    rest = iter(calls)
    first = list(itertools.islice(rest, 2))
    if len(first) == 1:
        return [await first[0]]  # needs no task of its own
    results: dict[int, T] = {}

    def keep(number: int, task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            results[number] = task.result()  # and the task is let go of, however many are still under way

    submitted = 0
    try:
        async with asyncio.TaskGroup() as group:
            for submitted, call in enumerate(itertools.chain(first, rest), 1):
                group.create_task(call).add_done_callback(partial(keep, submitted))
                if submitted % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(1, submitted + 1)]
