"""Calls to the trainers, repeated once whoever restarts lost trainers has done so.

The trainers' groups exist before anything that can restore them: updates, checkpoints and weight sync need the groups.
They share a `RecoverableCalls`, which a run's recovery (`orchestrator/training/recovery.py`) joins later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from troupe.orchestrator.errors import WorkerError

T = TypeVar("T")


class Restorer(Protocol):
    """Restarts lost trainers and restores their state."""

    async def find_lost(self, error: WorkerError) -> WorkerError | None:
        """The loss of a trainer that explains a failed call, or None if it has another cause."""
        ...

    async def restore(self, lost: WorkerError) -> None:
        """Restarts and restores all trainers, without calls under way. Raises WorkerError if that is not possible."""
        ...


class RecoverableCalls:
    """Repeats calls that failed because a trainer was lost. Without a restorer a lost trainer is an error."""

    def __init__(self) -> None:
        self._restorer: Restorer | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = 0
        self._calls: set[asyncio.Task[Any]] = set()
        """Calls of `retry` under way. A restart ends them first: none may reach a trainer that is not restored yet."""
        self._interrupted: set[asyncio.Task[Any]] = set()
        """The calls that a restart has ended."""

    def recover_with(self, restorer: Restorer) -> None:
        """Makes the restorer bring lost trainers back from now on."""
        self._restorer = restorer

    async def retry(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `call`, which is repeated after the trainers were restarted because one was lost. Raises
        WorkerError if the call failed for another reason, or the trainers cannot be restarted."""
        while True:
            if self._restarting is not None:
                await asyncio.shield(self._restarting)
            before, task = self._restarts, asyncio.ensure_future(call())
            self._calls.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if task not in self._interrupted or _is_cancelled():
                    raise
            except WorkerError as error:
                restorer = self._restorer
                lost = None if restorer is None else await restorer.find_lost(error)
                if restorer is None or lost is None:
                    raise
                await self._recover(restorer, before, lost)
            finally:
                self._calls.discard(task)
                self._interrupted.discard(task)

    async def close(self) -> None:
        """Ends a restart that is under way."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)

    async def _recover(self, restorer: Restorer, before: int, lost: WorkerError) -> None:
        """Restarts the trainers, unless that was done since `before` restarts. Raises WorkerError."""
        if self._restarts == before:
            if self._restarting is None:
                self._restarting = asyncio.create_task(self._restart(restorer, lost), name="restart trainers")
                self._restarting.add_done_callback(self._restarted)
            await asyncio.shield(self._restarting)

    async def _restart(self, restorer: Restorer, lost: WorkerError) -> None:
        """Ends the calls under way, to be repeated, and restores the trainers: the remaining calls of a step would
        otherwise reach trainers that are restarted and not yet restored."""
        for task in self._calls:
            if task.cancel():
                self._interrupted.add(task)
        await asyncio.gather(*self._calls, return_exceptions=True)
        await restorer.restore(lost)

    def _restarted(self, task: asyncio.Task[None]) -> None:
        self._restarting = None
        if not task.cancelled() and task.exception() is None:
            self._restarts += 1


def _is_cancelled() -> bool:
    """Whether the running task itself is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
