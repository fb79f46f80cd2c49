"""The pool of environment workers: watches them, replaces those that die, and tells the engines who is there.

Engines reach environment workers by a link (`workers/contract/roles.py`), not through the controller: an episode of
eight turns costs it nothing. Every change of the pool gives all engines a new link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.cluster.event_loop import gather_all
from orchestrator.cluster.worker_group import WorkerHandle
from orchestrator.errors import WorkerError
from orchestrator.rollouts.engine_pool import Engine, EnginePool
from workers.contract.roles import Environment, EnvironmentLink

logger = logging.getLogger(__name__)

MakeLink = Callable[[Sequence[WorkerHandle[Environment]], str], EnvironmentLink]
"""Makes the link to these workers; the text says why there will be none again, or is empty."""
Launch = Callable[[str], Awaitable[WorkerHandle[Environment]]]
"""Starts the worker of this name."""

_CONNECT_TIMEOUT_S = 60.0
_MARGIN_S = 10.0
"""Time that an answer of `Environment.watch` may take beyond its own bound."""


class EnvironmentPool:
    """The environment workers of a run.

    A task for each worker waits in `Environment.watch`: it ends when the worker dies or freezes, and starts a
    replacement of the same name as long as the restart budget lasts. Episodes of a dead worker start again on another.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle[Environment]],
        engines: EnginePool,
        make_link: MakeLink,
        launch: Launch,
        watch_s: float,
        restarts: int,
    ) -> None:
        """`watch_s`: longest time to notice a frozen worker; `restarts`: replacements in the whole run."""
        self._workers = {worker.name: worker for worker in workers}
        self._engines = engines
        self._make_link = make_link
        self._launch = launch
        self._watch_s = watch_s
        self._restarts = restarts
        self.restarts_used = 0
        self._replacing: set[str] = set()
        self._watching: dict[str, asyncio.Task[None]] = {}

    @property
    def names(self) -> list[str]:
        """Workers that serve, or are being replaced."""
        return [*self._workers, *(name for name in self._replacing if name not in self._workers)]

    async def start(self) -> None:
        """Connects all engines, and begins to watch the workers."""
        await self._connect_all()
        for name in self._workers:
            self._watch(name)

    async def connect(self, engine: Engine) -> None:
        """Gives one engine the current link. Raises WorkerError."""
        await engine.connect_environments(self._link(), _CONNECT_TIMEOUT_S)

    async def join(self, worker: WorkerHandle[Environment]) -> None:
        """Adds a started worker."""
        self._workers[worker.name] = worker
        await self._connect_all()
        self._watch(worker.name)

    async def retire(self, name: str, timeout_s: float) -> None:
        """Starts no more episodes on a worker, and waits until those under way have ended, at most `timeout_s`."""
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
                if not (await worker.call(Environment.health, _CONNECT_TIMEOUT_S)).in_flight:
                    return
                await asyncio.sleep(0.5)
        except WorkerError as error:
            logger.warning("%s", error)
            return
        logger.warning("%s is removed with unfinished episodes after %g s", name, timeout_s)

    async def close(self) -> None:
        """Stops watching."""
        for task in self._watching.values():
            task.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)

    def _link(self) -> EnvironmentLink:
        lost = ""
        if not self._workers and not self._replacing:
            budget = "failures.environment_restarts"
            lost = f"no environment worker is left ({self.restarts_used} of {self._restarts} restarts used: {budget})"
        return self._make_link(list(self._workers.values()), lost)

    async def _connect_all(self) -> None:
        link = self._link()

        async def connect(engine: Engine) -> None:
            try:
                await engine.connect_environments(link, _CONNECT_TIMEOUT_S)
            except WorkerError as error:  # the engine pool notices what is wrong with it
                logger.warning("%s", error)

        await gather_all(connect(engine) for engine in self._engines.engines)

    def _watch(self, name: str) -> None:
        self._watching[name] = asyncio.create_task(self._watch_worker(name), name=f"watch {name}")

    async def _watch_worker(self, name: str) -> None:
        """Waits until the worker dies, and replaces it; ends when the budget is used up."""
        while True:
            worker = self._workers[name]
            try:
                while await worker.call(Environment.watch, self._watch_s + _MARGIN_S, self._watch_s):
                    pass
                reason = "it can start no more episodes"
            except WorkerError as error:
                reason = str(error)
            if not await self._replace(name, reason):
                return

    async def _replace(self, name: str, reason: str) -> bool:
        """Replaces a dead worker; returns whether a new one serves."""
        self._workers.pop(name).kill()
        may_start = self.restarts_used < self._restarts
        logger.warning("%s is lost: %s%s", name, reason, "; starting a replacement" if may_start else "")
        if may_start:
            self.restarts_used += 1
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
