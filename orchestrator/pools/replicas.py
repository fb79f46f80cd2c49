"""A pool of replicas: independent workers of one role that are started, given work, replaced and removed.

Engines, reward workers, environments, judges and the workers of the frozen reference are such replicas. Their pools add
to :class:`ReplicaPool` only what differs: how work is assigned, how a loss is noticed, and who is notified of a change.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.errors import WorkerDied, WorkerError, WorkerTimeout
from troupe.orchestrator.roles.table import row_of
from troupe.orchestrator.spec.base import RunSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PoolWorker(Protocol):
    """One worker of a pool."""

    @property
    def name(self) -> str: ...

    def kill(self) -> None: ...


ReplicaT = TypeVar("ReplicaT", bound=PoolWorker)


class RestartBudget:
    """Restarts of one role that a run makes before it gives up; steps without a loss give used ones back."""

    def __init__(self, role: str, limit: int, steps_per_restart: int = 0) -> None:
        """Nothing is used yet. `steps_per_restart`: steps without a loss after which one is refunded, or 0."""
        self.role = role
        self._limit = limit
        self._steps_per_restart = steps_per_restart
        self._steps = 0
        self.used = 0
        """Restarts in use."""
        self.total = 0
        """Restarts in the whole run."""

    @classmethod
    def of_role(cls, spec: RunSpec, role: str) -> RestartBudget:
        restarts, failures = row_of(spec, role).restarts, spec.failures
        if restarts is None:
            return cls(role, 0)
        return cls(restarts.name, restarts.limit(failures), failures.steps_per_restart)

    def take(self) -> bool:
        """Uses one restart; False if all are in use."""
        if self.used >= self._limit:
            return False
        self.used += 1
        self.total += 1
        self._steps = 0
        return True

    def after_step(self) -> None:
        self._steps += 1
        if self.used and self._steps_per_restart and self._steps >= self._steps_per_restart:
            self.used -= 1
            self._steps = 0

    def __str__(self) -> str:
        return f"{self.used} of {self._limit} restarts used: failures.{self.role}_restarts"


class Changes:
    """Wakes the tasks that wait for a condition when something has changed on which it may depend."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    async def wait_for(self, condition: Callable[[], object]) -> None:
        """Waits until the condition holds, now or after a change."""
        while not condition():
            await self._next.wait()

    def notify(self) -> None:
        """Wakes the waiting tasks, which test their conditions."""
        self._next.set()
        self._next = asyncio.Event()


class ReplicaPool(Generic[ReplicaT]):
    """The replicas of one role. A lost one is replaced by one of the same name within the restart budget; until then
    the others do its work. The pool runs a task only while it starts a replacement."""

    def __init__(
        self,
        workers: Iterable[ReplicaT],
        launch: Callable[[str], Awaitable[ReplicaT]] | None = None,
        budget: RestartBudget | None = None,
        retry_s: float | None = 0.0,
        on_loss: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """Starts nothing. `launch`: starts the worker of a name, or None for none; `budget`: restarts, or None to
        replace none; `retry_s`: wait before a failed start is repeated, or None; `on_loss`: called with the name
        before a replacement starts."""
        self.workers = list(workers)
        """Workers that run, including workers that finish their work before their removal."""
        self.starting: list[str] = []
        """Names of the workers that are being started."""
        self.budget = budget or RestartBudget("no", 0)
        self.last_loss: WorkerError | TimeoutError | None = None
        """Error with which a worker was lost, or its replacement did not start."""
        self._on_loss = on_loss
        self._launch = launch
        self._retry_s = retry_s
        self._leaving: set[ReplicaT] = set()
        self._calls: Counter[ReplicaT] = Counter()
        """Running calls of each worker."""
        self._closed = False
        self._replacing: set[asyncio.Task[None]] = set()
        self._changes = Changes()

    @property
    def serving(self) -> list[ReplicaT]:
        """Workers that receive work."""
        return [worker for worker in self.workers if worker not in self._leaving]

    @property
    def names(self) -> list[str]:
        """Workers that run or are being started; not workers that are being removed."""
        return [*(worker.name for worker in self.workers if worker not in self._leaving), *self.starting]

    async def call(self, call: Callable[[ReplicaT], Awaitable[T]]) -> T:
        """Runs a call on the least-loaded worker, or waits for one that starts; a lost worker's call is repeated.
        Raises WorkerError if the call failed, or every worker was lost and none can be replaced."""
        while True:
            if not (serving := self.serving):
                await self._changes.wait_for(lambda: self.serving or not self.starting)
                if not (serving := self.serving):
                    raise self.exhausted()
            worker = min(serving, key=self._calls.__getitem__)
            try:
                with self.busy(worker):
                    return await call(worker)
            except (WorkerDied, WorkerTimeout) as error:
                await self.lose(worker, error)

    @contextmanager
    def busy(self, *workers: ReplicaT) -> Iterator[None]:
        """Counts a call of these workers while the block runs; a worker is not removed before its calls have ended."""
        for worker in workers:
            self._calls[worker] += 1
        try:
            yield
        finally:
            for worker in workers:
                self._calls[worker] -= 1
            if self._leaving:
                self._notify()

    async def join(self, name: str) -> None:
        """Starts one more worker. Raises WorkerError, or TimeoutError if it did not start in time."""
        self.starting.append(name)
        try:
            await self._start(name)
        finally:
            await self._started(name)

    async def retire(self, name: str, timeout_s: float) -> None:
        """Removes a worker once it has started and finished its work, which it has `timeout_s` seconds for; the
        caller ends its process. Unfinished work then fails and is repeated on others."""
        await self.until_started(name)
        worker = next((worker for worker in self.workers if worker.name == name), None)
        if worker is None:
            return
        self._leaving.add(worker)
        self._unassign(worker)
        await self._membership_changed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained(worker)
        except TimeoutError:
            logger.warning("%s is removed with unfinished work after %g s", name, timeout_s)
        await self._remove(worker)
        self._leaving.discard(worker)
        self._notify()

    async def renew(self) -> None:
        """Ends all workers and starts others of their names, at no restart's cost. Raises WorkerError, TimeoutError."""
        for name in tuple(self.starting):
            await self.until_started(name)

        async def restart(worker: ReplicaT) -> None:
            self.workers.remove(worker)
            self._unassign(worker)
            worker.kill()
            await self.join(worker.name)

        await gather_all(restart(worker) for worker in self.serving)

    async def until_started(self, name: str) -> None:
        """Waits until no worker of this name is being started."""
        await self._changes.wait_for(lambda: name not in self.starting)

    async def lose(self, worker: ReplicaT, error: WorkerError, may_replace: bool = True) -> None:
        """Ends a lost worker's process and starts a replacement within the budget, unless it is to be removed."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self._unassign(worker)
        self.last_loss = error
        worker.kill()
        may_replace = may_replace and not self._closed and self._launch is not None and worker not in self._leaving
        replaced = may_replace and self.budget.take()
        logger.warning("%s is lost: %s%s", worker.name, error, "; starting a replacement" if replaced else "")
        if replaced:
            self.starting.append(worker.name)
            task = asyncio.create_task(self._replace(worker.name), name=f"replace {worker.name}")
            self._replacing.add(task)
            task.add_done_callback(self._replaced)
        else:
            await self._lost(worker.name)
        await self._membership_changed()

    def exhausted(self) -> WorkerError:
        """The error of work that no worker is left for."""
        loss = self.last_loss
        if not isinstance(loss, WorkerError):
            return WorkerError("pool", "call", f"no worker is left: {loss} ({self.budget})")
        if self._launch is None:
            return loss
        error = WorkerError(loss.worker, loss.method, f"{loss.detail} ({self.budget})")
        error.__cause__ = loss
        return error

    async def close(self) -> None:
        """Cancels the start of replacements; workers that are lost from now on are not replaced."""
        self._closed = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)

    async def _start(self, name: str) -> None:
        if self._launch is None:
            raise WorkerError(name, "start", "the pool starts no workers")
        self._add(await self._launch(name))

    def _add(self, worker: ReplicaT) -> None:
        """Adds a started worker, which receives work from now on."""
        self.workers.append(worker)

    def _unassign(self, worker: ReplicaT) -> None:
        """Gives a lost or leaving worker no more work."""

    async def _drained(self, worker: ReplicaT) -> None:
        """Waits until a leaving worker has finished its work."""
        await self._changes.wait_for(lambda: not self._calls[worker])

    async def _remove(self, worker: ReplicaT) -> None:
        """Removes a worker that has finished its work."""
        if worker in self.workers:
            self.workers.remove(worker)

    async def _replace(self, name: str) -> None:
        """Starts a replacement, again while the restart budget lasts. The node of a worker may be lost with it, which
        Ray finds out later: until then a replacement dies there too."""
        try:
            await self._lost(name)
            while True:
                try:
                    await self._start(name)
                except (WorkerError, TimeoutError) as error:
                    self.last_loss = error
                    if self._retry_s is None or not self.budget.take():
                        logger.error("cannot start a replacement for %s: %s", name, error)
                        return
                    logger.error("cannot start a replacement for %s: %s; trying again", name, error)
                    await asyncio.sleep(self._retry_s)
                else:
                    logger.warning("%s was replaced and serves again", name)
                    return
        finally:
            await self._started(name)

    def _replaced(self, task: asyncio.Task[Any]) -> None:
        """Forgets a task of `_replace` that has ended."""
        self._replacing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("replacing a worker failed: %s", task.exception())

    async def _lost(self, name: str) -> None:
        if self._on_loss is not None:
            await self._on_loss(name)

    async def _started(self, name: str) -> None:
        self.starting.remove(name)
        await self._membership_changed()

    async def _membership_changed(self) -> None:
        """Called after a worker has begun to serve or serves no more, and after a start has failed."""
        self._notify()

    def _notify(self) -> None:
        """Called after every change that a waiting task may wait for."""
        self._changes.notify()
