"""The pool of rollout engines: dispatches groups to the least-loaded engine, probes engines and replaces dead ones.

The pool removes an engine that fails a health probe, kills its process and starts a replacement with the current
weights, as long as the run's restart budget lasts. A replacement that dies of the same fault before its first group
shows that restarts do not help: waiting calls then fail with `EnginesLost` at once. When no engine is left and none is
starting, waiting calls fail with `EnginesLost` instead of waiting forever. Live scaling adds and removes engines
(`ReplicaPool.join`, `ReplicaPool.retire`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import PolicyGroup, WorkerHandle
from troupe.orchestrator.errors import (
    EnginesLost,
    UpdateDamaged,
    WeightsNotVerified,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from troupe.orchestrator.pools.engine import Dispatch, Engine, EngineQueue, EngineState, GenerationMeter, Queues
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.replicas import PoolWorker, ReplicaPool, RestartBudget
from troupe.orchestrator.spec.derived.sizes import engine_load
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import FinishedSamples, GroupRequest, GroupSummary, sampled_tokens
from troupe.workers.contract.roles import GuestEngine, Reply, RolloutEngine, TableRef

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
"""Wait after a replacement that did not start."""

GuestPool = ReplicaPool[WorkerHandle[GuestEngine]]
"""Engines with frozen weights on the policy's GPUs."""
Spawn = Callable[[str], Awaitable[Engine]]
"""Starts an engine under this name (placement, constructor and `start`)."""


class EnginePool(ReplicaPool[Engine]):
    """Dispatches groups to the least-loaded engine while engines join, leave, die and are replaced. Engines report
    the places that finished samples of running groups have freed (`Engine.finished_ahead`), which the pool fills:
    long tails would leave half of an engine idle. Callers wait in `acquire` for room; they are unblocked in order
    by `release`, an engine that joins or recovers, and the loss of the last engine."""

    def __init__(
        self,
        engines: Sequence[Engine],
        spawn: Spawn,
        spec: RolloutSpec,
        weights: PoolWeights,
        on_loss: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(engines, spawn, RestartBudget.of_role(spec, "rollout"), _RETRY_S, on_loss)
        self.spec = spec
        self.weights = weights
        self.meter = GenerationMeter()
        self.dispatch = Dispatch(self.workers, engine_load(spec), self._all_lost)
        self.sleeps = "rollout" in spec.roles.sleepers()
        self._spawn = spawn
        self._faults: dict[str, str] = {}
        """Faults that ended the engines that are being replaced, by name."""
        self._repeated_fault = ""
        """Why no further engine is started: a replacement died as its predecessor did; empty before that."""

    def follow(self, spec: RolloutSpec) -> None:
        """Adapts to more environment workers or fewer engines: each engine gets more episodes. Its bound is never
        lowered: until the engines that share them have started, the others have all of them."""
        self.dispatch.accept(engine_load(spec))

    @property
    def serving(self) -> list[Engine]:
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
        return Queues(tuple(engines), tuple(self.starting), self.dispatch.waiting)

    async def generate(
        self, request: GroupRequest, prompts: TableRef, engine: Engine, finished: TableRef | None = None
    ) -> tuple[GroupSummary, TableRef]:
        """Runs a request on an engine returned by `acquire`; `finished` has the rows of `request.finished`."""
        timeout_s = self.spec.schedule.generate_timeout_s
        with self.meter:
            summary, rollouts = await engine.handle.call_for_table(
                RolloutEngine.generate, timeout_s, request, prompts, finished
            )
        self.meter.add(sum(sampled_tokens(summary.samples)) - sum(sampled_tokens(request.finished)))
        engine.finished_ahead = summary.finished_ahead
        engine.finished_groups += 1
        return summary, rollouts

    async def acquire(self, samples: int) -> Engine:
        """Reserves `samples` on the least-loaded engine, once one has room. Raises EnginesLost if none is left."""
        waiter = self.dispatch.wait(samples)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result(), samples)  # assigned just before the cancellation
            raise

    def hold(self) -> Engine | None:
        """Takes the least-loaded engine, with its weights, out of the dispatch; None if no other would serve."""
        engine = self.dispatch.least() if len(self.dispatch) > 1 else None
        if engine is not None:
            engine.held = True
            self.dispatch.update(engine)
        return engine

    async def none_held(self) -> None:
        """Waits until every engine whose hold has ended receives groups again, or is lost."""
        await self._changes.wait_for(lambda: not any(engine.held for engine in self.workers))

    async def reserve(self, engine: Engine, samples: int) -> bool:
        """Reserves `samples` on a held engine; returns False if it is lost or leaves. One caller may wait at a time."""

        def gone() -> bool:
            return engine not in self.workers or engine.state is EngineState.LEAVING

        def room() -> bool:
            return engine.state is EngineState.SERVING and self.dispatch.has_room(engine, samples)

        await self._changes.wait_for(lambda: gone() or room())
        if gone():
            return False
        engine.outstanding += samples
        return True

    def end_hold(self, engine: Engine) -> None:
        """Makes a held engine receive groups again, in the background, once it has the other engines' weights."""
        task = asyncio.create_task(self._rejoin(engine), name=f"rejoin {engine.name}")
        self._replacing.add(task)
        task.add_done_callback(self._replaced)

    def release(self, engine: Engine, samples: int) -> None:
        """Returns what `acquire` or `reserve` reserved."""
        engine.outstanding -= samples
        if engine.receives:
            self.dispatch.update(engine)
            self.dispatch.assign()
        else:
            self._notify()

    async def report_failure(self, engine: Engine, error: WorkerError, *, in_transfer: bool = False) -> None:
        """Probes an engine after a failed call, and replaces it unless it is healthy. `in_transfer`: the caller
        holds the lock of a transfer; else an engine that one has closed is probed again once the transfer has
        ended."""
        engine.finished_ahead = 0  # the groups to which these belonged are unknown
        if engine.state is EngineState.LEAVING:
            await self.lose(engine, error)
            return
        if engine.state is not EngineState.SERVING and not (in_transfer and engine.state is EngineState.SUSPECT):
            return  # whoever suspects it probes it, but a transfer does not go on before it knows
        self._set_state(engine, EngineState.SUSPECT)
        logger.warning("%s; probing the engine", error)
        was_transferring = self.weights.lock.locked()
        failed = await self._probe(engine)
        transferring = was_transferring or self.weights.lock.locked()
        if transferring and not in_transfer and failed is not None and not isinstance(failed, WorkerDied):
            async with self.weights.lock:
                failed = await self._probe(engine)
        if failed is not None:
            await self.lose(engine, failed)
        else:
            if engine.state is EngineState.SUSPECT:
                self._set_state(engine, EngineState.SERVING)
                self._notify()

    async def _probe(self, engine: Engine) -> WorkerError | None:
        """Why the engine is not healthy, or None if it is."""
        try:
            await engine.handle.call(RolloutEngine.health, self.spec.failures.health_interval_s)
        except WorkerError as error:
            return error
        return None

    async def probe_all(self) -> None:
        """Probes every serving engine; replaces one that died or missed `probe_misses` consecutive probes. Timeouts
        during a transfer of weights do not count."""

        async def probe(engine: Engine) -> None:
            transferring = self.weights.lock.locked()
            failed = await self._probe(engine)
            if isinstance(failed, WorkerTimeout) and (transferring or self.weights.lock.locked()):
                return
            engine.missed_probes = 0 if failed is None else engine.missed_probes + 1
            lost = isinstance(failed, WorkerDied) or engine.missed_probes >= self.spec.failures.health_misses
            if failed is not None and lost and engine.state is EngineState.SERVING:
                await self.lose(engine, failed)

        await gather_all(probe(engine) for engine in self.serving)

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
        engine.state = state
        self.dispatch.update(engine)

    def _all_lost(self) -> EnginesLost | None:
        """Why no engine will receive groups again, or None."""
        if self._repeated_fault:
            return EnginesLost(self._repeated_fault)
        if not self.workers and not self.starting:
            return EnginesLost(f"no rollout engine is left ({self.budget}); the last loss: {self.last_loss}")
        return None

    async def _start(self, name: str) -> None:
        """Starts an engine, loads the current weights into it and adds it to the serving engines."""
        started: list[Engine] = []

        async def start() -> None:
            async with self.weights.memory.starting():
                if not started:
                    started.append(await asyncio.wait_for(self._spawn(name), self.spec.schedule.start_timeout_s))
                (engine,) = started
                try:
                    async with self.weights.lock:
                        await self.weights.load(engine)
                        engine.predecessor_fault = self._faults.pop(name, "")
                        self._add(engine)
                except UpdateDamaged:
                    if self.sleeps:  # until there are weights that it can load
                        await engine.handle.call(RolloutEngine.sleep, self.spec.schedule.sync_timeout_s)
                    raise

        try:
            await self.weights.renewing(start)
        except BaseException:
            for engine in started:
                engine.kill()
            raise

    async def _rejoin(self, engine: Engine) -> None:
        """Loads the weights into a released engine, which then receives groups, unless they turn out to be others;
        it is lost if it cannot load them."""

        async def admit() -> None:
            while True:
                async with self.weights.lock:
                    stale = engine.version != self.weights.version
                    if not stale or not engine.outstanding or engine not in self.workers:
                        if stale and engine in self.workers:
                            await self.weights.load(engine)
                        engine.held = False
                        self.dispatch.update(engine)
                        self._notify()
                        return
                await self._changes.wait_for(lambda: not engine.outstanding or engine not in self.workers)

        try:
            await self.weights.renewing(admit)
        except (WorkerError, WeightsNotVerified, TimeoutError) as error:
            lost = error if isinstance(error, WorkerError) else WorkerError(engine.name, "update_weights", str(error))
            await self.lose(engine, lost)

    def _add(self, worker: Engine) -> None:
        super()._add(worker)
        self.dispatch.update(worker)

    def _unassign(self, worker: Engine) -> None:
        self._set_state(worker, EngineState.LEAVING if worker in self.workers else EngineState.GONE)

    async def _drained(self, worker: Engine) -> None:
        await self._changes.wait_for(lambda: not worker.outstanding)

    async def _remove(self, worker: Engine) -> None:
        async with self.weights.lock:
            await super()._remove(worker)

    def _notify(self) -> None:
        self.dispatch.assign()
        super()._notify()


async def sample_group(
    pool: EnginePool, request: GroupRequest, prompts: TableRef, attempts: int = 1
) -> tuple[GroupSummary, TableRef]:
    """Samples a group on up to `attempts` engines, one after another. Raises the WorkerError of the last."""
    while True:
        engine = await pool.acquire(request.samples)
        try:
            return await pool.generate(request, prompts, engine)
        except WorkerError as error:
            await pool.report_failure(engine, error)
            attempts -= 1
            if not attempts:
                raise
        finally:
            pool.release(engine, request.samples)


async def finished_samples(
    engines: Iterable[Engine], timeout_s: float
) -> list[tuple[tuple[FinishedSamples, ...], TableRef]]:
    """The finished samples of groups that run, by engine. An engine that does not answer in time has none."""

    async def ask(engine: Engine) -> tuple[tuple[FinishedSamples, ...], TableRef] | None:
        try:
            return await engine.handle.call_for_table(RolloutEngine.finished_samples, timeout_s)
        except WorkerError as error:
            logger.warning("its finished samples are not kept: %s", error)
            return None

    answers = await gather_all(ask(engine) for engine in engines if engine.outstanding)
    return [answer for answer in answers if answer is not None]


@asynccontextmanager
async def trainer_memory(
    pool: EnginePool, frozen: Sequence[GuestPool], policy: PolicyGroup, timeout_s: float
) -> AsyncIterator[None]:
    """Gives the trainers the memory of the GPUs that they share with engines, for the updates of a step. In the
    block the engines sleep; unfinished groups, which exist when trainers are restarted, continue afterwards. Then
    the optimizer is offloaded, engines with frozen weights (`frozen`) wake, and one of the policy takes back its KV
    cache once it has verified the new weights. After an error nothing is moved: trainers are restarted, or the run
    ends. An engine that does not sleep or wake is replaced. Raises WorkerError."""

    async def sleep(engine: Engine) -> None:
        engine.asleep = await _called(pool, engine, engine.handle.call(RolloutEngine.sleep, timeout_s))

    async def call_frozen(method: Callable[[GuestEngine], Reply[None]]) -> None:
        workers = [(guests, worker) for guests in frozen for worker in guests.workers]
        await gather_all(_called(guests, worker, worker.call(method, timeout_s)) for guests, worker in workers)

    async with pool.weights.memory.training():
        async with pool.weights.lock:
            await gather_all(sleep(engine) for engine in (list(pool.workers) if pool.sleeps else ()))
        await call_frozen(GuestEngine.sleep)
        yield
        await policy.offload_states(timeout_s=timeout_s)
        await call_frozen(GuestEngine.wake)


async def _called(pool: ReplicaPool[Any], worker: PoolWorker, call: Awaitable[None]) -> bool:
    """Whether a call of this worker has succeeded; after a failed one it is replaced."""
    try:
        await call
    except WorkerError as error:
        await pool.lose(worker, error)
        return False
    return True
