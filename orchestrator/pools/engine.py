"""One rollout engine as its pool has it, and what a pool keeps about engines: loads, queues, throughput, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum

from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.workers.contract import roles


class EngineState(Enum):
    """Whether an engine receives groups."""

    SERVING = "serving"
    SUSPECT = "suspect"
    """A call failed; the engine is being probed and receives no groups until it answers."""
    LEAVING = "leaving"
    """Finishes its groups and receives no more."""
    GONE = "gone"
    """Removed from the pool; its process was killed."""


@dataclass(eq=False)
class Engine:
    """One engine and its state in the pool."""

    handle: WorkerHandle[roles.RolloutEngine]
    host: str
    version: int = 0
    outstanding: int = 0
    """Samples of the groups dispatched to it."""
    finished_ahead: int = 0
    """Number of these that were finished already, as reported with the last group that it finished."""
    finished_groups: int = 0
    predecessor_fault: str = ""
    """Fault that ended the engine that this one replaced, or empty if unknown or if it replaced none."""
    missed_probes: int = 0
    state: EngineState = EngineState.SERVING
    asleep: bool = False
    """Whether it has given its memory to the trainers. It is healthy, and groups wait in it until it has weights."""
    held: bool = False
    """Whether it keeps its weights, for an evaluation: it receives neither groups nor newer versions."""

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.handle.name

    def kill(self) -> None:
        """Ends the worker's process."""
        self.handle.kill()

    @property
    def load(self) -> int:
        """Its unfinished samples as last reported; samples finished since then still count."""
        return max(0, self.outstanding - self.finished_ahead)


class EngineLoads:
    """Engines indexed by load: finds a least-loaded engine without scanning all of them.

    Of several engines with the same load, the one that has had it longest comes first.
    """

    def __init__(self) -> None:
        self._by_load: dict[int, dict[Engine, None]] = {}
        self._load: dict[Engine, int] = {}

    def __len__(self) -> int:
        return len(self._load)

    def least(self) -> Engine | None:
        """A least-loaded engine; None if there is no engine."""
        return next(iter(self._by_load[min(self._by_load)])) if self._by_load else None

    def update(self, engine: Engine) -> None:
        """Indexes the engine by its current load."""
        self.discard(engine)
        self._load[engine] = engine.load
        self._by_load.setdefault(engine.load, {})[engine] = None

    def discard(self, engine: Engine) -> None:
        """Removes the engine from the index; does nothing if it is not there."""
        load = self._load.pop(engine, None)
        if load is not None:
            del self._by_load[load][engine]
            if not self._by_load[load]:
                del self._by_load[load]


@dataclass(frozen=True)
class EngineQueue:
    """Work that the driver has sent to one engine."""

    name: str
    state: str
    outstanding: int
    """Samples that the engine has not returned."""


@dataclass(frozen=True)
class Queues:
    """Engines, and the work that waits for them."""

    engines: tuple[EngineQueue, ...] = ()
    starting: tuple[str, ...] = ()
    waiting: int = 0
    """Groups that wait for an engine with room."""


class GenerationMeter:
    """Counts tokens, and the time in which at least one engine has a group.

    Other parts of a step, such as the updates of synchronous training, do not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active = 0
        self._since = 0.0
        """Beginning of the current stretch with groups, or the last reading in it."""
        self._seconds = 0.0
        self._tokens = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The context in which one group is generated."""
        if self._active == 0:
            self._since = self._clock()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._seconds += self._clock() - self._since

    def add(self, tokens: int) -> None:
        """Counts the tokens of a finished group."""
        self._tokens += tokens

    def read(self) -> float:
        """Tokens per second since the last reading, or 0 if nothing was generated.

        Tokens of unfinished groups count in the reading in which their group finishes.
        """
        now = self._clock()
        seconds = self._seconds + (now - self._since if self._active else 0.0)
        tokens, self._tokens, self._seconds, self._since = self._tokens, 0, 0.0, now
        return tokens / seconds if seconds > 0 else 0.0


class MemoryLock:
    """Locks the memory of GPUs that engines share with the policy.

    Keeps engines from starting while trainers hold the memory, and trainers from taking it while engines start.

    Engines that serve are not counted: they sleep before the trainers take the memory. Waiting trainers come before
    engines that have not begun.
    """

    def __init__(self) -> None:
        self._training = False
        self._starting = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Held by the trainers. Waits for the engines that are starting, each of which has a bound."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._training = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._starting)
            yield
        finally:
            self._training = False
            await self._notify()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Held by an engine that starts or loads its first weights; several can hold it. Waits for the trainers."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._training)
            self._starting += 1
        try:
            yield
        finally:
            self._starting -= 1
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
