"""One rollout engine as its pool has it, and what a pool keeps about engines: loads, queues, throughput."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import EnginesLost
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
        return self.handle.name

    def kill(self) -> None:
        self.handle.kill()

    @property
    def load(self) -> int:
        """Its unfinished samples as last reported; samples finished since then still count."""
        return max(0, self.outstanding - self.finished_ahead)

    @property
    def receives(self) -> bool:
        return self.state is EngineState.SERVING and not self.held

    def serves(self, version: int) -> None:
        """Notes that it has loaded a version, and is awake."""
        self.version, self.asleep = version, False


class Dispatch:
    """Assigns the least-loaded engine to the calls that wait, in order of arrival; of equal ones, the one that has
    had its load longest. Engines are indexed by load: no call scans all. An empty one accepts any number of
    samples."""

    def __init__(self, engines: Sequence[Engine], max_load: int, lost: Callable[[], EnginesLost | None]) -> None:
        """Nothing is assigned yet. `max_load`: most unfinished samples of one engine, running and queued."""
        self.max_load = max_load
        self._lost = lost
        self._waiting: deque[tuple[int, asyncio.Future[Engine]]] = deque()
        """Waiting calls in order of arrival: number of samples, and the future that receives the engine."""
        self._by_load: dict[int, dict[Engine, None]] = {}
        self._load: dict[Engine, int] = {}
        for engine in engines:
            self.update(engine)

    def __len__(self) -> int:
        return len(self._load)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def least(self) -> Engine | None:
        """A least-loaded engine, or None if there is no engine."""
        return next(iter(self._by_load[min(self._by_load)])) if self._by_load else None

    def has_room(self, engine: Engine, samples: int) -> bool:
        """Whether an engine accepts `samples` more."""
        return not engine.outstanding or engine.load + samples <= self.max_load

    def accept(self, load: int) -> None:
        """Raises the bound on the load of an engine to this one, if it is lower."""
        self.max_load = max(self.max_load, load)
        self.assign()

    def wait(self, samples: int) -> asyncio.Future[Engine]:
        """The engine that will have `samples` reserved for this call; fails with EnginesLost if none is left."""
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, waiter))
        self.assign()
        return waiter

    def assign(self) -> None:
        """Assigns engines to waiting calls as far as there is room; fails the calls if all engines are lost."""
        while self._waiting:
            samples, waiter = self._waiting[0]
            if not waiter.done():
                engine = self.least()
                if engine is not None and self.has_room(engine, samples):  # else no other engine has room
                    engine.outstanding += samples
                    self.update(engine)
                    waiter.set_result(engine)
                elif (lost := self._lost()) is not None:
                    waiter.set_exception(lost)
                else:
                    return
            self._waiting.popleft()

    def update(self, engine: Engine) -> None:
        """Indexes the engine by its current load, or forgets it if it receives no groups."""
        self.discard(engine)
        if engine.receives:
            load = self._load[engine] = engine.load
            self._by_load.setdefault(load, {})[engine] = None

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


class Generated(NamedTuple):
    """What the engines sampled between two readings."""

    tokens_per_s: float
    """Over the time in which at least one engine had a group; 0 if none had."""
    share: float
    """Of the time that had a group."""


class GenerationMeter:
    """Counts tokens, and the time in which at least one engine has a group: other parts of a step do not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active = 0
        self._since = 0.0
        """Beginning of the current stretch with groups, or the last reading in it."""
        self._read = clock()
        """Time of the last reading."""
        self._seconds = 0.0
        self._tokens = 0

    def __enter__(self) -> None:
        """Begins the generation of a group; any number may run at once."""
        if self._active == 0:
            self._since = self._clock()
        self._active += 1

    def __exit__(self, *raised: object) -> None:
        self._active -= 1
        if self._active == 0:
            self._seconds += self._clock() - self._since

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> Generated:
        """What was sampled since the last reading. Tokens of unfinished groups count when their group finishes."""
        now = self._clock()
        seconds = self._seconds + (now - self._since if self._active else 0.0)
        elapsed, self._read = now - self._read, now
        tokens, self._tokens, self._seconds, self._since = self._tokens, 0, 0.0, now
        return Generated(tokens / seconds if seconds > 0 else 0.0, seconds / elapsed if elapsed > 0 else 0.0)
