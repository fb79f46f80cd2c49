"""A pool of workers that other workers call: it watches them, and gives the callers a new link after every change.

Engines reach environment workers, and reward workers reach judges, by a link (`workers/contract/`), not through the
controller: an episode of eight turns costs it nothing.
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
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.workers.contract.roles import Watched

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT", bound=Watched)
CallerT = TypeVar("CallerT")
LinkT = TypeVar("LinkT")

_HEALTH_TIMEOUT_S = 60.0
_DRAIN_POLL_S = 0.5
_MARGIN_S = 10.0
"""Time that an answer of `Watched.watch` may take beyond its own bound."""


@dataclass(frozen=True)
class Callers(Generic[CallerT, LinkT]):
    """The workers that call a pool's workers."""

    present: Callable[[], Iterable[CallerT]]
    """The callers that run now."""
    connect: Callable[[CallerT, LinkT], Awaitable[None]]
    """Gives one of them a link. Raises WorkerError."""


class LinkedPool(ReplicaPool[WorkerHandle[WorkerT]], Generic[WorkerT, CallerT, LinkT]):
    """The environment or judge workers. A task for each waits in `Watched.watch` until the worker dies or freezes,
    and reports the loss; its work starts again on another."""

    def __init__(
        self,
        role: str,
        workers: Sequence[WorkerHandle[WorkerT]],
        callers: Callers[CallerT, LinkT],
        make_link: Callable[[Sequence[WorkerHandle[WorkerT]], str], LinkT],
        launch: Callable[[str], Awaitable[WorkerHandle[WorkerT]]],
        budget: RestartBudget,
        watch_s: float,
    ) -> None:
        """Watches nothing yet. `make_link`: makes the link to these workers, with why none will serve again, or
        empty; `watch_s`: longest time to notice a frozen worker."""
        super().__init__(workers, launch, budget, retry_s=None)
        self._role = role
        self._callers = callers
        self._make_link = make_link
        self._watch_s = watch_s
        self._watching: dict[WorkerHandle[WorkerT], asyncio.Task[None]] = {}
        self._connecting = asyncio.Lock()
        """Held while callers are connected, so that they get the links in order."""

    async def start(self) -> None:
        """Connects all callers, and begins to watch the workers."""
        await self._connect_all()
        for worker in self.workers:
            self._watch(worker)

    async def connect(self, caller: CallerT) -> None:
        """Gives one caller the current link. Raises WorkerError."""
        await self._callers.connect(caller, self._link())

    async def close(self) -> None:
        tasks = list(self._watching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def _add(self, worker: WorkerHandle[WorkerT]) -> None:
        super()._add(worker)
        self._watch(worker)

    async def _drained(self, worker: WorkerHandle[WorkerT]) -> None:
        try:
            while (await worker.call(Watched.health, _HEALTH_TIMEOUT_S)).in_flight:
                await asyncio.sleep(_DRAIN_POLL_S)
        except WorkerError as error:
            logger.warning("%s", error)

    async def _membership_changed(self) -> None:
        await super()._membership_changed()
        await self._connect_all()

    def _link(self) -> LinkT:
        lost = "" if self.names else f"no {self._role} worker is left ({self.budget})"
        return self._make_link(self.serving, lost)

    async def _connect_all(self) -> None:
        async with self._connecting:
            link = self._link()

            async def connect(caller: CallerT) -> None:
                try:
                    await self._callers.connect(caller, link)
                except WorkerError as error:  # the caller's own pool notices what is wrong with it
                    logger.warning("%s", error)

            await gather_all(connect(caller) for caller in self._callers.present())

    def _watch(self, worker: WorkerHandle[WorkerT]) -> None:
        task = asyncio.create_task(self._watch_worker(worker), name=f"watch {worker.name}")
        self._watching[worker] = task
        task.add_done_callback(lambda _: self._watching.pop(worker, None))

    async def _watch_worker(self, worker: WorkerHandle[WorkerT]) -> None:
        """Waits until the worker dies, freezes or leaves, and reports its loss unless it was removed."""
        try:
            while await worker.call(Watched.watch, self._watch_s + _MARGIN_S, self._watch_s):
                if worker not in self.workers:
                    return
            loss = WorkerError(worker.name, "watch", "it no longer serves")
        except WorkerError as error:
            loss = error
        await self.lose(worker, loss)
