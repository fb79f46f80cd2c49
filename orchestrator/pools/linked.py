"""A pool of workers that other workers call: watches them, replaces those that die, and tells the callers who is there.

Engines reach environment workers, and reward workers reach judges, by a link (`workers/contract/`), not through the
controller: an episode of eight turns costs it nothing. Every change of the pool gives all callers a new link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.pools.restart_budget import RestartBudget
from troupe.workers.contract.roles import Watched

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT", bound=Watched)
CallerT = TypeVar("CallerT")
LinkT = TypeVar("LinkT")

_HEALTH_TIMEOUT_S = 60.0
_MARGIN_S = 10.0
"""Time that an answer of `Watched.watch` may take beyond its own bound."""


@dataclass(frozen=True)
class Callers(Generic[CallerT, LinkT]):
    """The workers that call those of a pool."""

    present: Callable[[], Iterable[CallerT]]
    """Those that run now."""
    connect: Callable[[CallerT, LinkT], Awaitable[None]]
    """Gives one of them a link. Raises WorkerError."""


@dataclass(frozen=True)
class PoolLimits:
    """When a worker counts as lost, and how many may be."""

    watch_s: float
    """Longest time to notice a frozen worker."""
    restarts: int
    """Replacements that may be in use at once (`RestartBudget`)."""
    role: str
    """`failures.{role}_restarts` is the limit."""
    steps_per_restart: int = 0
    """Steps without a loss that give one back; 0: none is given back."""


class LinkedPool(Generic[WorkerT, CallerT, LinkT]):
    """The workers of one role.

    A task for each worker waits in `Watched.watch`: it ends when the worker dies or freezes, and starts a replacement
    of the same name as long as the restart budget lasts. What a dead worker had under way starts again on another.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle[WorkerT]],
        callers: Callers[CallerT, LinkT],
        make_link: Callable[[Sequence[WorkerHandle[WorkerT]], str], LinkT],
        launch: Callable[[str], Awaitable[WorkerHandle[WorkerT]]],
        limits: PoolLimits,
    ) -> None:
        """Watches nothing yet.

        Args:
            workers: Those that have started.
            callers: The workers that call them.
            make_link: Makes the link to these workers; the text says why there will be none again, or is empty.
            launch: Starts the worker of this name.
            limits: When a worker counts as lost.
        """
        self._workers = {worker.name: worker for worker in workers}
        self._callers = callers
        self._make_link = make_link
        self._launch = launch
        self._limits = limits
        self.budget = RestartBudget(limits.role, limits.restarts, limits.steps_per_restart)
        self._replacing: set[str] = set()
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def names(self) -> list[str]:
        """Workers that serve, or are being replaced."""
        return [*self._workers, *(name for name in self._replacing if name not in self._workers)]

    async def start(self) -> None:
        """Connects all callers, and begins to watch the workers."""
        await self._connect_all()
        for name in self._workers:
            self._watch(name)

    async def connect(self, caller: CallerT) -> None:
        """Gives one caller the current link. Raises WorkerError."""
        await self._callers.connect(caller, self._link())

    async def join(self, worker: WorkerHandle[WorkerT]) -> None:
        """Adds a started worker."""
        self._workers[worker.name] = worker
        await self._connect_all()
        self._watch(worker.name)

    async def retire(self, name: str, timeout_s: float) -> None:
        """Gives a worker no more work, and waits until what it does has ended, at most `timeout_s`."""
        task = self._watching.pop(name, None)
        if task is not None:
            task.cancel()
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        await self._connect_all()
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            while asyncio.get_running_loop().time() < deadline:
                if not (await worker.call(Watched.health, _HEALTH_TIMEOUT_S)).in_flight:
                    return
                await asyncio.sleep(0.5)
        except WorkerError as error:
            logger.warning("%s", error)
            return
        logger.warning("%s is removed with unfinished work after %g s", name, timeout_s)

    async def close(self) -> None:
        """Stops watching."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    def _link(self) -> LinkT:
        lost = ""
        if not self._workers and not self._replacing:
            lost = f"no {self._limits.role} worker is left ({self.budget})"
        return self._make_link(list(self._workers.values()), lost)

    async def _connect_all(self) -> None:
        link = self._link()

        async def connect(caller: CallerT) -> None:
            try:
                await self._callers.connect(caller, link)
            except WorkerError as error:  # the caller's own pool notices what is wrong with it
                logger.warning("%s", error)

        await gather_all(connect(caller) for caller in self._callers.present())

    def _watch(self, name: str) -> None:
        self._watching[name] = asyncio.create_task(self._watch_worker(name), name=f"watch {name}")

    async def _watch_worker(self, name: str) -> None:
        """Waits until the worker dies, and replaces it; ends when the budget is used up."""
        watch_s = self._limits.watch_s
        while True:
            worker = self._workers[name]
            try:
                while await worker.call(Watched.watch, watch_s + _MARGIN_S, watch_s):
                    pass
                reason = "it no longer serves"
            except WorkerError as error:
                reason = str(error)
            if not await self._replace(name, reason):
                return

    async def _replace(self, name: str, reason: str) -> bool:
        """Replaces a dead worker; returns whether a new one serves."""
        self._workers.pop(name).kill()
        may_start = self.budget.take()
        logger.warning("%s is lost: %s%s", name, reason, "; starting a replacement" if may_start else "")
        if may_start:
            self._replacing.add(name)
        await self._connect_all()
        if not may_start:
            return False
        try:
            self._workers[name] = await self._launch(name)
        except (WorkerError, TimeoutError) as error:
            logger.error("%s did not start again: %s", name, error)
        finally:
            self._replacing.discard(name)
        await self._connect_all()
        return name in self._workers
