"""The rollout engines: who serves, who has least to do, who must be replaced.

An engine that fails a health probe is taken out, its process is killed and a fresh one is brought up (with the
current weights) within the run's restart budget. When none serves and none can be brought up, the run ends with
:class:`EnginesLost`: nobody waits for ever.
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
        self._spawn = spawn
        self._last_loss = ""
        self._changed = asyncio.Condition()
        self._replacing: set[asyncio.Task[None]] = set()

    @property
    def serving(self) -> list[Engine]:
        """Engines that may be given work."""
        return [engine for engine in self.engines if engine.state is EngineState.SERVING]

    @property
    def replacing(self) -> bool:
        """Whether a fresh engine is on its way."""
        return bool(self._replacing)

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
                if not self.engines and not self._replacing:
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
            async with self._changed:
                engine.state = EngineState.SERVING
                self._changed.notify_all()

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
        engine.state = EngineState.GONE
        self._last_loss = str(error)
        engine.handle.kill()
        async with self._changed:
            self.engines.remove(engine)
            if self.restarts_used < self.bounds.restarts:
                self.restarts_used += 1
                task = asyncio.create_task(self._replace(engine.name))
                self._replacing.add(task)
                task.add_done_callback(self._replaced)
            self._changed.notify_all()

    async def _replace(self, name: str) -> None:
        try:
            engine = await asyncio.wait_for(self._spawn(name), self.bounds.start_timeout_s)
            if self.bring_up is not None:
                await self.bring_up(engine)
        except (WorkerError, TimeoutError) as error:
            log.error("a fresh %s could not be brought up: %s", name, error)
            return
        log.warning("%s is back", name)
        self.engines.append(engine)

    def _replaced(self, task: asyncio.Task[Any]) -> None:
        self._replacing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("replacing an engine failed: %s", task.exception())
        self._wake = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
