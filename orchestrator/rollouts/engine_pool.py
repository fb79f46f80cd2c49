"""The rollout engines: who serves, who has least to do, who must be replaced.

An engine that fails a health probe is taken out, its process is killed and a fresh one is brought up (with the
current weights) within the run's restart budget. When none serves and none can be brought up, the run ends with
:class:`EnginesLost`: nobody waits for ever. Engines also come and go as they are told to (:meth:`EnginePool.join`,
:meth:`EnginePool.retire`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from orchestrator.errors import EnginesLost, WorkerDied, WorkerError
from orchestrator.handles import TableRef, WorkerHandle, together
from workers.messages import GroupRequest, GroupSummary

log = logging.getLogger(__name__)


class EngineState(Enum):
    """Whether an engine may be given work."""

    SERVING = "serving"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    """Finishes what it has and is given nothing more."""
    GONE = "gone"


@dataclass(eq=False)
class Engine:
    """One engine and what is known of it."""

    handle: WorkerHandle
    host: str
    version: int = 0
    outstanding: int = 0
    """Samples of the groups it holds."""
    finished_ahead: int = 0
    """How many of these it said were finished already, when it last finished a group."""
    missed_probes: int = 0
    state: EngineState = EngineState.SERVING

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.handle.name

    @property
    def load(self) -> int:
        """Samples it has yet to finish, as far as it has told: those finished since it last ended a group count."""
        return max(0, self.outstanding - self.finished_ahead)


@dataclass(frozen=True)
class PoolBounds:
    """Bounds of the pool."""

    max_load: int
    """Samples one engine has yet to finish at most, running and queued."""
    generate_timeout_s: float
    probe_timeout_s: float
    probe_misses: int
    """Probes missed in a row before a silent engine is taken out."""
    start_timeout_s: float
    restarts: int
    """Engines that may be replaced in the whole run."""


Spawn = Callable[[str], Awaitable[Engine]]
"""Start a fresh engine under this name (placement, constructor and `start`)."""
BringUp = Callable[[Engine], Awaitable[None]]
"""Give a fresh engine the current weights."""


class _Loads:
    """Engines by their load: the one with least to do is found without a look at the others.

    Among engines of one load the one that has had it for longest comes first.
    """

    def __init__(self) -> None:
        self._by_load: dict[int, dict[Engine, None]] = {}
        self._load: dict[Engine, int] = {}

    def least(self) -> Engine | None:
        """An engine of the least load; None where there is no engine."""
        return next(iter(self._by_load[min(self._by_load)])) if self._by_load else None

    def note(self, engine: Engine) -> None:
        """The engine is to be found by the load it has now."""
        self.forget(engine)
        self._load[engine] = engine.load
        self._by_load.setdefault(engine.load, {})[engine] = None

    def forget(self, engine: Engine) -> None:
        """The engine is not to be found; harmless where it was not before."""
        load = self._load.pop(engine, None)
        if load is not None:
            del self._by_load[load][engine]
            if not self._by_load[load]:
                del self._by_load[load]


class EnginePool:
    """Dispatch to the engine with least to do, over engines that come and go.

    A group whose samples differ in length leaves places free in its engine long before it is finished. With every group
    it finishes an engine tells how many, and these are given away: or long tails would leave half of it idle.
    """

    def __init__(self, engines: Sequence[Engine], spawn: Spawn, bounds: PoolBounds) -> None:
        self.engines = list(engines)
        self.bounds = bounds
        self.restarts_used = 0
        self.bring_up: BringUp | None = None
        self.moving = asyncio.Lock()
        """Held while weights move to the engines, and while one joins or leaves them."""
        self._spawn = spawn
        self._last_loss = ""
        self._changed = asyncio.Condition()
        self._loads = _Loads()
        """Of the engines that serve."""
        self._waiting: deque[tuple[int, asyncio.Future[Engine]]] = deque()
        """Who waits for room, in order of arrival: how many samples, and where the engine goes."""
        self._replacing: set[asyncio.Task[None]] = set()
        self._on_the_way: list[str] = []
        for engine in self.engines:
            self._loads.note(engine)

    @property
    def serving(self) -> list[Engine]:
        """Engines that may be given work."""
        return [engine for engine in self.engines if engine.state is EngineState.SERVING]

    @property
    def awaited(self) -> bool:
        """Whether a fresh engine is on its way."""
        return bool(self._on_the_way)

    @property
    def names(self) -> list[str]:
        """Engines that are to stay: those that serve or may again, and those on their way."""
        return [e.name for e in self.engines if e.state is not EngineState.LEAVING] + self._on_the_way

    async def generate(self, request: GroupRequest, prompts: TableRef, engine: Engine) -> tuple[GroupSummary, TableRef]:
        """Run a request on an engine that :meth:`acquire` returned."""
        summary, rollouts = await engine.handle.call_for_table(
            "generate", request, prompts, timeout_s=self.bounds.generate_timeout_s
        )
        engine.finished_ahead = summary.finished_ahead
        return summary, rollouts

    async def acquire(self, samples: int) -> Engine:
        """Wait for a serving engine with room for `samples`, and book them on the one with least to do.

        First come, first served. Raises EnginesLost when no engine is left to wait for.
        """
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, waiter))
        self._serve_waiting()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                await self.release(waiter.result(), samples)  # given in the very moment
            raise

    async def release(self, engine: Engine, samples: int) -> None:
        """Give back what :meth:`acquire` booked."""
        engine.outstanding -= samples
        if engine.state is EngineState.SERVING:
            self._loads.note(engine)
            self._serve_waiting()
        else:
            await self._notify()

    async def report_failure(self, engine: Engine, error: WorkerError) -> None:
        """A call failed: probe the engine, and replace it unless it answers as healthy."""
        engine.finished_ahead = 0  # of which groups is not known
        if engine.state is EngineState.LEAVING:
            await self._drop(engine, error)
            return
        if engine.state is not EngineState.SERVING:
            return
        self._turn(engine, EngineState.SUSPECT)
        log.warning("%s; probing the engine", error)
        try:
            await engine.handle.call("health", timeout_s=self.bounds.probe_timeout_s)
        except WorkerError as probe:
            log.warning("%s is taken out: %s", engine.name, probe)
            await self._take_out(engine, probe)
        else:
            if engine.state is EngineState.SUSPECT:
                self._turn(engine, EngineState.SERVING)
                await self._notify()

    async def probe_all(self) -> None:
        """Probe every serving engine; one that died, or stayed silent too often in a row, is replaced."""

        async def probe(engine: Engine) -> None:
            try:
                await engine.handle.call("health", timeout_s=self.bounds.probe_timeout_s)
            except WorkerError as error:
                engine.missed_probes += 1
                lost = isinstance(error, WorkerDied) or engine.missed_probes >= self.bounds.probe_misses
                if lost and engine.state is EngineState.SERVING:
                    log.warning("%s is taken out: %s", engine.name, error)
                    await self._take_out(engine, error)
            else:
                engine.missed_probes = 0

        await together(probe(engine) for engine in self.serving)

    async def join(self, name: str) -> None:
        """Start one more engine and let it serve once it has the current weights.

        Raises WorkerError or TimeoutError where it does not come up.
        """
        self._on_the_way.append(name)
        await self._bring(name)

    async def retire(self, name: str, timeout_s: float) -> None:
        """Let the engine finish what it has, within the bound, and count it out; its process is the caller's to end.

        What is not done in time is handed back: it fails with the process, and its groups go to other engines.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: name not in self._on_the_way)
        engine = next((engine for engine in self.engines if engine.name == name), None)
        if engine is None:
            return
        self._turn(engine, EngineState.LEAVING)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not engine.outstanding)
        except TimeoutError:
            log.warning("%s leaves with %d samples unfinished after %g s", name, engine.outstanding, timeout_s)
        async with self.moving:
            if engine in self.engines:
                self.engines.remove(engine)
        await self._notify()

    async def close(self) -> None:
        """Stop replacing engines."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)

    def _turn(self, engine: Engine, state: EngineState) -> None:
        """The engine is in this state from now on."""
        engine.state = state
        if state is EngineState.SERVING:
            self._loads.note(engine)
        else:
            self._loads.forget(engine)

    def _serve_waiting(self) -> None:
        """Give room to those who wait, as far as there is any; nobody waits for engines that are all lost."""
        while self._waiting:
            samples, waiter = self._waiting[0]
            if not waiter.done():
                engine = self._with_room(samples)
                if engine is not None:
                    engine.outstanding += samples
                    self._loads.note(engine)
                    waiter.set_result(engine)
                elif not self.engines and not self.awaited:
                    waiter.set_exception(
                        EnginesLost(
                            f"no rollout engine is left ({self.restarts_used} of {self.bounds.restarts} restarts "
                            f"used: failures.engine_restarts); the last one lost: {self._last_loss}"
                        )
                    )
                else:
                    return
            self._waiting.popleft()

    def _with_room(self, samples: int) -> Engine | None:
        """The engine with least to do if it has room; if not, no other one has."""
        engine = self._loads.least()
        if engine is None or (engine.outstanding and engine.load + samples > self.bounds.max_load):
            return None
        return engine

    async def _take_out(self, engine: Engine, error: WorkerError) -> None:
        """Drop the engine, and unless it was leaving have a fresh one take its place while the budget lasts."""
        if engine.state is not EngineState.LEAVING and self.restarts_used < self.bounds.restarts:
            self.restarts_used += 1
            self._on_the_way.append(engine.name)
            task = asyncio.create_task(self._replace(engine.name))
            self._replacing.add(task)
            task.add_done_callback(self._replaced)
        await self._drop(engine, error)

    async def _drop(self, engine: Engine, error: WorkerError) -> None:
        if engine.state is EngineState.GONE:
            return
        self._turn(engine, EngineState.GONE)
        self._last_loss = str(error)
        engine.handle.kill()
        if engine in self.engines:
            self.engines.remove(engine)
        await self._notify()

    async def _bring(self, name: str) -> None:
        try:
            engine = await asyncio.wait_for(self._spawn(name), self.bounds.start_timeout_s)
            async with self.moving:
                if self.bring_up is not None:
                    await self.bring_up(engine)
                self.engines.append(engine)
                self._loads.note(engine)
        finally:
            self._on_the_way.remove(name)
            await self._notify()

    async def _replace(self, name: str) -> None:
        try:
            await self._bring(name)
        except (WorkerError, TimeoutError) as error:
            log.error("a fresh %s could not be brought up: %s", name, error)
        else:
            log.warning("%s is back", name)

    def _replaced(self, task: asyncio.Task[Any]) -> None:
        self._replacing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("replacing an engine failed: %s", task.exception())

    async def _notify(self) -> None:
        """Engines came, went or are idle."""
        self._serve_waiting()
        async with self._changed:
            self._changed.notify_all()
