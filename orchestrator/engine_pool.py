"""The rollout engines: who serves, who has least to do, who must be replaced.

An engine that fails a health probe is taken out, its process is killed and a fresh one is brought up (with the
current weights) within the run's restart budget. When none serves and none can be brought up, the run ends with
:class:`EnginesLost`: nobody waits for ever. Engines also come and go as they are told to (:meth:`EnginePool.join`,
:meth:`EnginePool.retire`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from orchestrator.errors import EnginesLost, WorkerDied, WorkerError
from orchestrator.handles import TableRef, WorkerHandle
from workers.messages import GroupRequest, GroupSummary

log = logging.getLogger(__name__)


class EngineState(Enum):
    """Whether an engine may be given work."""

    SERVING = "serving"
    SUSPECT = "suspect"
    LEAVING = "leaving"
    """Finishes what it has and is given nothing more."""
    GONE = "gone"


@dataclass
class Engine:
    """One engine and what is known of it."""

    handle: WorkerHandle
    host: str
    version: int = 0
    outstanding: int = 0
    missed_probes: int = 0
    state: EngineState = EngineState.SERVING

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.handle.name


@dataclass(frozen=True)
class PoolBounds:
    """Bounds of the pool."""

    max_outstanding: int
    """Samples one engine holds at most, running and queued."""
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


class EnginePool:
    """Least-outstanding dispatch over engines that come and go."""

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
        self._replacing: set[asyncio.Task[None]] = set()
        self._on_the_way: list[str] = []

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
        return await engine.handle.call_for_table(
            "generate", request, prompts, timeout_s=self.bounds.generate_timeout_s
        )

    async def acquire(self, samples: int) -> Engine:
        """Wait for a serving engine with room for `samples`, and book them on the one with least to do.

        Raises EnginesLost when no engine is left to wait for.
        """
        async with self._changed:
            while True:
                engine = self._least_outstanding(samples)
                if engine is not None:
                    engine.outstanding += samples
                    return engine
                if not self.engines and not self.awaited:
                    raise EnginesLost(
                        f"no rollout engine is left ({self.restarts_used} of {self.bounds.restarts} restarts used: "
                        f"failures.engine_restarts); the last one lost: {self._last_loss}"
                    )
                await self._changed.wait()

    async def release(self, engine: Engine, samples: int) -> None:
        """Give back what :meth:`acquire` booked."""
        async with self._changed:
            engine.outstanding -= samples
            self._changed.notify_all()

    async def report_failure(self, engine: Engine, error: WorkerError) -> None:
        """A call failed: probe the engine, and replace it unless it answers as healthy."""
        if engine.state is EngineState.LEAVING:
            await self._drop(engine, error)
            return
        if engine.state is not EngineState.SERVING:
            return
        engine.state = EngineState.SUSPECT
        log.warning("%s; probing the engine", error)
        try:
            await engine.handle.call("health", timeout_s=self.bounds.probe_timeout_s)
        except WorkerError as probe:
            log.warning("%s is taken out: %s", engine.name, probe)
            await self._take_out(engine, probe)
        else:
            if engine.state is EngineState.SUSPECT:
                engine.state = EngineState.SERVING
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

        await asyncio.gather(*(probe(engine) for engine in self.serving))

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
        engine.state = EngineState.LEAVING
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

    def _least_outstanding(self, samples: int) -> Engine | None:
        free = [
            engine
            for engine in self.serving
            if engine.outstanding == 0 or engine.outstanding + samples <= self.bounds.max_outstanding
        ]
        return min(free, key=lambda engine: engine.outstanding, default=None)

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
        engine.state = EngineState.GONE
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
        async with self._changed:
            self._changed.notify_all()
