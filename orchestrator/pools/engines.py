"""The pool of rollout engines: dispatches groups to the least-loaded engine, probes engines and replaces dead ones.

The pool removes an engine that fails a health probe, kills its process and starts a replacement with the current
weights, as long as the run's restart budget lasts. A replacement that dies of the same fault before its first group
shows that restarts do not help: waiting calls then fail with `EnginesLost` at once. When no engine is left and none is
starting, waiting calls fail with `EnginesLost` instead of waiting forever. Live scaling adds and removes engines
(`ReplicaPool.join`, `ReplicaPool.retire`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.errors import (
    EnginesLost,
    UpdateDamaged,
    WeightsNotVerified,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from troupe.orchestrator.pools.engine import (
    Engine,
    EngineLoads,
    EngineQueue,
    EngineState,
    GenerationMeter,
    MemoryLock,
    Queues,
)
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.spec.derived.sizes import engine_load
from troupe.orchestrator.spec.derived.training import resolved_sleep
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import (
    FinishedSamples,
    GroupRequest,
    GroupSummary,
)
from troupe.workers.contract.roles import RolloutEngine, TableRef

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""Wait after a replacement that did not start."""
_RENEWALS = 2
"""Times that the weights are published again for one engine that starts."""


Spawn = Callable[[str], Awaitable[Engine]]
"""Starts an engine under this name (placement, constructor and `start`)."""
BringUp = Callable[[Engine], Awaitable[None]]
"""Loads the current weights into a new engine. Raises UpdateDamaged if they have to be published again."""
Renew = Callable[[], Awaitable[None]]
"""Makes the trainers publish the current weights again, after a restart if one of them is lost."""


class EnginePool(ReplicaPool[Engine]):
    """Dispatches groups to the least-loaded engine while engines join, leave, die and are replaced.

    A group whose samples differ in length frees places in its engine long before the whole group is finished. Engines
    report these places with every group that they finish (`Engine.finished_ahead`) and the pool fills them; otherwise
    long tails would leave half of an engine idle.

    Callers wait in `acquire` for an engine with room; they are unblocked in order of arrival by `release`, by an engine
    that joins, recovers or is replaced, and by the loss of the last engine.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        spawn: Spawn,
        spec: RolloutSpec,
        on_loss: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(engines, spawn, RestartBudget.of_role(spec, "rollout"), _RETRY_S, on_loss)
        self.spec = spec
        self.max_load = engine_load(spec)
        """Most unfinished samples of one engine, running and queued."""
        self.meter = GenerationMeter()
        self.bring_up: BringUp | None = None
        self.renew: Renew | None = None
        """If None, an engine does not start while the current weights are damaged."""
        self.transfer_lock = asyncio.Lock()
        """Held while weights are transferred to the engines, and while an engine joins or leaves the pool."""
        self.version = 0
        """The version whose transfer to the engines began last."""
        self.memory = MemoryLock()
        """Shared with the trainers if engines run on their GPUs."""
        self._sleeps = resolved_sleep(spec) != "none"
        self._spawn = spawn
        self._faults: dict[str, str] = {}
        """Faults that ended the engines that are being replaced, by name."""
        self._repeated_fault = ""
        """Why no further engine is started: a replacement died as its predecessor did; empty before that."""
        self._loads = EngineLoads()
        """Loads of the serving engines."""
        self._waiting: deque[tuple[int, asyncio.Future[Engine]]] = deque()
        """Calls of `acquire` in order of arrival: number of samples, and the future that receives the engine."""
        for engine in self.workers:
            self._loads.update(engine)

    def follow(self, spec: RolloutSpec) -> None:
        """Adapts to more environment workers or fewer engines: each engine gets more of the episodes.

        Its bound is never lowered: while the engines start among which the episodes are to be divided, the others still
        have all of them.
        """
        self.max_load = max(self.max_load, engine_load(spec))
        self._serve_waiting()

    @property
    def engines(self) -> list[Engine]:
        """Engines that run, including engines that are being probed or finish their groups."""
        return self.workers

    @property
    def serving(self) -> list[Engine]:
        """Engines that receive groups."""
        return [engine for engine in self.workers if engine.state is EngineState.SERVING]

    @property
    def receivers(self) -> list[Engine]:
        """Engines that load a new version of the weights: all that are not held, or all if all are."""
        return [engine for engine in self.workers if not engine.held] or list(self.workers)

    def queues(self) -> Queues:
        """Work that waits for the engines. May be called from any thread."""
        engines = [
            EngineQueue(e.name, "asleep" if e.asleep else "evaluating" if e.held else e.state.value, e.outstanding)
            for e in list(self.workers)
        ]
        return Queues(tuple(engines), tuple(self.starting), len(self._waiting))

    async def generate(
        self, request: GroupRequest, prompts: TableRef, engine: Engine, finished: TableRef | None = None
    ) -> tuple[GroupSummary, TableRef]:
        """Runs a request on an engine returned by `acquire`; `finished` has the rows of `request.finished`."""
        timeout_s = self.spec.schedule.generate_timeout_s
        with self.meter.generating():
            summary, rollouts = await engine.handle.call_for_table(
                RolloutEngine.generate, timeout_s, request, prompts, finished
            )
        before = sum(sample.sampled_tokens for sample in request.finished)
        self.meter.add(sum(sample.sampled_tokens for sample in summary.samples) - before)
        engine.finished_ahead = summary.finished_ahead
        engine.finished_groups += 1
        return summary, rollouts

    async def finished_samples(self, timeout_s: float) -> list[tuple[tuple[FinishedSamples, ...], TableRef]]:
        """The finished samples of groups that run, by engine. An engine that does not answer in time has none."""

        async def ask(engine: Engine) -> tuple[tuple[FinishedSamples, ...], TableRef] | None:
            try:
                return await engine.handle.call_for_table(RolloutEngine.finished_samples, timeout_s)
            except WorkerError as error:
                logger.warning("its finished samples are not kept: %s", error)
                return None

        answers = await gather_all(ask(engine) for engine in list(self.engines) if engine.outstanding)
        return [answer for answer in answers if answer is not None]

    async def acquire(self, samples: int) -> Engine:
        """Waits for a serving engine with room for `samples` and reserves them on the least-loaded one.

        Calls are served in order of arrival. An engine without samples accepts any number of them.

        Raises:
            EnginesLost: No engine is left and none is starting.
        """
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, waiter))
        self._serve_waiting()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                await self.release(waiter.result(), samples)  # assigned just before the cancellation
            raise

    def hold(self) -> Engine | None:
        """Takes the least-loaded engine, with its weights, out of the dispatch; returns None if no other would serve.

        It finishes the groups that it has. `end_hold` ends this.
        """
        engine = self._loads.least() if len(self._loads) > 1 else None
        if engine is not None:
            engine.held = True
            self._loads.discard(engine)
        return engine

    async def none_held(self) -> None:
        """Waits until every engine whose hold has ended receives groups again, or is lost."""
        await self._wait_for(lambda: not any(engine.held for engine in self.workers))

    async def reserve(self, engine: Engine, samples: int) -> bool:
        """Reserves `samples` on a held engine; returns False if it is lost or leaves. One caller may wait at a time."""

        def gone() -> bool:
            return engine not in self.workers or engine.state is EngineState.LEAVING

        def room() -> bool:
            fits = not engine.outstanding or engine.load + samples <= self.max_load
            return engine.state is EngineState.SERVING and fits

        await self._wait_for(lambda: gone() or room())
        if gone():
            return False
        engine.outstanding += samples
        return True

    def end_hold(self, engine: Engine) -> None:
        """Makes a held engine receive groups again, in the background, once it has the other engines' weights."""
        task = asyncio.create_task(self._rejoin(engine), name=f"rejoin {engine.name}")
        self._replacing.add(task)
        task.add_done_callback(self._replaced)

    async def release(self, engine: Engine, samples: int) -> None:
        """Returns what `acquire` or `reserve` reserved."""
        engine.outstanding -= samples
        if engine.state is EngineState.SERVING and not engine.held:
            self._loads.update(engine)
            self._serve_waiting()
        else:
            await self._notify()

    async def sample(
        self, request: GroupRequest, prompts: TableRef, attempts: int = 1
    ) -> tuple[GroupSummary, TableRef]:
        """Samples a group on up to `attempts` engines, one after another. Raises the WorkerError of the last."""
        while True:
            engine = await self.acquire(request.samples)
            try:
                return await self.generate(request, prompts, engine)
            except WorkerError as error:
                await self.report_failure(engine, error)
                attempts -= 1
                if not attempts:
                    raise
            finally:
                await self.release(engine, request.samples)

    async def report_failure(self, engine: Engine, error: WorkerError, *, in_transfer: bool = False) -> None:
        """Probes an engine after a failed call, and replaces it unless it answers as healthy.

        Args:
            engine: The engine.
            error: How the call failed.
            in_transfer: The call was part of a transfer of weights, whose lock is held by the caller. Otherwise an
                engine that a transfer has closed is probed again once the transfer, which may open it, has ended.
        """
        engine.finished_ahead = 0  # the groups to which these belonged are unknown
        if engine.state is EngineState.LEAVING:
            await self.lose(engine, error)
            return
        if engine.state is not EngineState.SERVING:
            return
        self._set_state(engine, EngineState.SUSPECT)
        logger.warning("%s; probing the engine", error)
        failed = await self._probe(engine)
        transferring = self.transfer_lock.locked() and not in_transfer
        if transferring and failed is not None and not isinstance(failed, WorkerDied):
            async with self.transfer_lock:
                failed = await self._probe(engine)
        if failed is not None:
            await self.lose(engine, failed)
        else:
            if engine.state is EngineState.SUSPECT:
                self._set_state(engine, EngineState.SERVING)
                await self._notify()

    async def _probe(self, engine: Engine) -> WorkerError | None:
        """Why the engine is not healthy, or None if it is."""
        try:
            await engine.handle.call(RolloutEngine.health, self.spec.failures.health_interval_s)
        except WorkerError as error:
            return error
        return None

    async def probe_all(self) -> None:
        """Probes every serving engine; replaces one that died or missed `probe_misses` consecutive probes.

        A probe that times out during a transfer of weights does not count: an engine answers after its update. The
        transfer has a separate timeout.
        """

        async def probe(engine: Engine) -> None:
            transferring = self.transfer_lock.locked()
            try:
                await engine.handle.call(RolloutEngine.health, self.spec.failures.health_interval_s)
            except WorkerError as error:
                if isinstance(error, WorkerTimeout) and (transferring or self.transfer_lock.locked()):
                    return
                engine.missed_probes += 1
                lost = isinstance(error, WorkerDied) or engine.missed_probes >= self.spec.failures.health_misses
                if lost and engine.state is EngineState.SERVING:
                    await self.lose(engine, error)
            else:
                engine.missed_probes = 0

        await gather_all(probe(engine) for engine in self.serving)

    async def sleep(self, timeout_s: float) -> None:
        """Makes every engine give its memory to the trainers; replaces one that does not, once they have returned it.

        Unfinished groups, which exist only when trainers are restarted, continue afterwards.
        """

        async def sleep(engine: Engine) -> None:
            try:
                await engine.handle.call(RolloutEngine.sleep, timeout_s)
            except WorkerError as error:
                await self.lose(engine, error)
            else:
                engine.asleep = True

        async with self.transfer_lock:
            await gather_all(sleep(engine) for engine in list(self.engines))

    async def lose(self, worker: Engine, error: WorkerError, may_replace: bool = True) -> None:
        """Ends a lost engine and replaces it, unless it died like the engine that it replaced, before a first group."""
        if worker not in self.workers:
            return
        fault = error.fault if isinstance(error, WorkerDied) else ""
        leaving = worker.state is EngineState.LEAVING
        repeated = bool(fault) and fault == worker.predecessor_fault and not worker.finished_groups and not leaving
        if repeated:
            self._repeated_fault = f"{worker.name} died like the engine that it replaced, before a first group: {error}"
        self._faults[worker.name] = fault
        await super().lose(worker, error, may_replace and not repeated)
        if worker.name not in self.starting:
            self._faults.pop(worker.name, None)

    def _set_state(self, engine: Engine, state: EngineState) -> None:
        """Changes the state of the engine; only serving engines have an indexed load."""
        engine.state = state
        if state is EngineState.SERVING and not engine.held:
            self._loads.update(engine)
        else:
            self._loads.discard(engine)

    def _serve_waiting(self) -> None:
        """Assigns engines to waiting calls in order, as far as there is room; fails them if all engines are lost."""
        while self._waiting:
            samples, waiter = self._waiting[0]
            if not waiter.done():
                engine = self._with_room(samples)
                if engine is not None:
                    engine.outstanding += samples
                    self._loads.update(engine)
                    waiter.set_result(engine)
                elif self._repeated_fault:
                    waiter.set_exception(EnginesLost(self._repeated_fault))
                elif not self.workers and not self.starting:
                    waiter.set_exception(
                        EnginesLost(f"no rollout engine is left ({self.budget}); the last loss: {self.last_loss}")
                    )
                else:
                    return
            self._waiting.popleft()

    def _with_room(self, samples: int) -> Engine | None:
        """The least-loaded engine, if it has room; if it has none, no other engine has."""
        engine = self._loads.least()
        if engine is None or (engine.outstanding and engine.load + samples > self.max_load):
            return None
        return engine

    async def _start(self, name: str) -> None:
        """Starts an engine, loads the current weights into it and adds it to the serving engines."""
        engine: Engine | None = None
        try:
            for renewals in itertools.count():
                async with self._starting_memory():
                    if engine is None:
                        engine = await asyncio.wait_for(self._spawn(name), self.spec.schedule.start_timeout_s)
                    try:
                        await self._admit(engine)
                        return
                    except UpdateDamaged as error:
                        if self.renew is None or renewals == _RENEWALS:
                            raise
                        logger.warning("%s; the trainers publish the weights again", error)
                        if self._sleeps:
                            await engine.handle.call(RolloutEngine.sleep, self.spec.schedule.sync_timeout_s)
                # Here neither the lock nor the memory is taken: trainers that are restarted for it push their weights.
                await self.renew()
        except BaseException:
            if engine is not None:
                engine.kill()
            raise

    def _starting_memory(self) -> AbstractAsyncContextManager[None]:
        """Holds the memory for the start of an engine if trainers share its GPU."""
        return self.memory.starting() if self._sleeps else nullcontext()

    async def _admit(self, engine: Engine) -> None:
        """Loads the current weights into a started engine and adds it."""
        async with self.transfer_lock:
            if self.bring_up is not None:
                await self.bring_up(engine)
            engine.predecessor_fault = self._faults.pop(engine.name, "")
            self._add(engine)

    async def _rejoin(self, engine: Engine) -> None:
        """Loads the weights into a released engine, which then receives groups; it is lost if it cannot load them."""
        try:
            for renewals in itertools.count():
                try:
                    if await self._admit_held(engine):
                        return
                except UpdateDamaged:
                    if self.renew is None or renewals == _RENEWALS:
                        raise
                    await self.renew()  # see `_start`
        except (WorkerError, WeightsNotVerified, TimeoutError) as error:
            lost = error if isinstance(error, WorkerError) else WorkerError(engine.name, "update_weights", str(error))
            await self.lose(engine, lost)

    async def _admit_held(self, engine: Engine) -> bool:
        """Loads the current weights into a held engine and ends its hold, or waits until its samples have ended.

        Weights that turn out to be others while they are loaded must not meet samples.
        """
        async with self.transfer_lock:
            stale = engine.version != self.version
            if not stale or not engine.outstanding or engine not in self.workers:
                if stale and self.bring_up is not None and engine in self.workers:
                    await self.bring_up(engine)
                engine.held = False
                if engine in self.workers and engine.state is EngineState.SERVING:
                    self._loads.update(engine)
                await self._notify()
                return True
        await self._wait_for(lambda: not engine.outstanding or engine not in self.workers)
        return False

    def _add(self, worker: Engine) -> None:
        super()._add(worker)
        self._loads.update(worker)

    def _unassign(self, worker: Engine) -> None:
        self._set_state(worker, EngineState.LEAVING if worker in self.workers else EngineState.GONE)

    async def _drained(self, worker: Engine) -> None:
        await self._wait_for(lambda: not worker.outstanding)

    async def _remove(self, worker: Engine) -> None:
        async with self.transfer_lock:
            await super()._remove(worker)

    async def _notify(self) -> None:
        self._serve_waiting()
        await super()._notify()
