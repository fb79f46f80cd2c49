"""Workers come and go while a run goes on: as the user asks, and by how long the trainer waits for samples.

The number of workers a role should have stands in the spec, which may change while the run goes on
(`orchestrator/live_spec.py`). For every role that scales, :class:`Crew` brings the number there is to the number
there should be: new engines serve once they have the current weights, leaving workers finish what they have first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.console import Console
from orchestrator.engine_pool import EnginePool
from orchestrator.errors import TroupeError, UsageError
from orchestrator.handles import WorkerHandle
from orchestrator.live_spec import changed, differences
from orchestrator.scoring import RewardPool, TokenScorer
from orchestrator.spec import Spec
from orchestrator.spec_sections import AutoscaleConfig, RoleName

log = logging.getLogger(__name__)

_FAILURES = (TroupeError, TimeoutError)
"""What the coming of a worker may fail with."""


class Seats(Protocol):
    """Where workers sit (`orchestrator.cast.Casting`)."""

    async def make_room(self, name: str) -> None:
        """Reserve a seat. Raises DoesNotFit."""
        ...

    async def replica(self, name: str) -> WorkerHandle:
        """Start a reward or reference worker in its seat. Raises WorkerError."""
        ...

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """End a worker, if there is one, and give back its seat."""
        ...


@dataclass(frozen=True)
class LeaveBounds:
    """How long a worker that leaves may take, in seconds."""

    finish_s: float
    close_s: float


class ScaledWorkers(ABC):
    """The workers of one role, which come and go."""

    def __init__(self, seats: Seats, bounds: LeaveBounds) -> None:
        self._seats = seats
        self._bounds = bounds

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Those that are to stay, and those on their way."""

    @property
    def at_work(self) -> int:
        """How many take part now."""
        return len(self.names)

    async def add(self, name: str) -> None:
        """Start one more. Raises TroupeError or TimeoutError where it does not come up; nothing of it is left then."""
        await self._seats.make_room(name)
        try:
            await self._join(name)
        except _FAILURES:
            await self._seats.dismiss(name, self._bounds.close_s)
            raise

    async def remove(self, name: str) -> None:
        """Let one finish what it has, within a bound, and end it."""
        await self._leave(name)
        await self._seats.dismiss(name, self._bounds.close_s)

    @abstractmethod
    async def _join(self, name: str) -> None:
        """Start a worker in its seat and have it take part."""

    @abstractmethod
    async def _leave(self, name: str) -> None:
        """Return when the worker has finished, or may not take longer."""


class ScaledEngines(ScaledWorkers):
    """Rollout engines: one serves once it has the current weights; what a leaving one does not finish in time goes to
    the others."""

    def __init__(self, pool: EnginePool, seats: Seats, bounds: LeaveBounds) -> None:
        super().__init__(seats, bounds)
        self._pool = pool

    @property
    def names(self) -> list[str]:
        """Engines that serve, or will."""
        return self._pool.names

    @property
    def at_work(self) -> int:
        """Engines that are given groups."""
        return len(self._pool.serving)

    async def _join(self, name: str) -> None:
        await self._pool.join(name)

    async def _leave(self, name: str) -> None:
        await self._pool.retire(name, self._bounds.finish_s)


class ScaledRewardWorkers(ScaledWorkers):
    """Reward workers: what a leaving one does not finish in time goes to the others."""

    def __init__(self, pool: RewardPool, seats: Seats, bounds: LeaveBounds) -> None:
        super().__init__(seats, bounds)
        self._pool = pool

    @property
    def names(self) -> list[str]:
        """Workers that are given groups."""
        return self._pool.names

    async def _join(self, name: str) -> None:
        self._pool.join(await self._seats.replica(name))

    async def _leave(self, name: str) -> None:
        try:
            await asyncio.wait_for(self._pool.retire(name), self._bounds.finish_s)
        except TimeoutError:
            log.warning("%s leaves without having finished within %g s", name, self._bounds.finish_s)


class ScaledScorers(ScaledWorkers):
    """Workers of a frozen model that scores tokens wave by wave: they come and go between two waves."""

    def __init__(self, scorer: TokenScorer, seats: Seats, bounds: LeaveBounds) -> None:
        super().__init__(seats, bounds)
        self._scorer = scorer

    @property
    def names(self) -> list[str]:
        """Workers that take part in every wave."""
        return [worker.name for worker in self._scorer.gang.workers]

    async def _join(self, name: str) -> None:
        worker = await self._seats.replica(name)
        await self._scorer.resize(lambda workers: [*workers, worker])

    async def _leave(self, name: str) -> None:
        await self._scorer.resize(lambda workers: [worker for worker in workers if worker.name != name])


@dataclass(frozen=True)
class RoleState:
    """How a role stands."""

    role: str
    wanted: int
    there: int
    """Workers that take part now."""
    moving: bool
    """Some are starting or leaving."""
    min_workers: int
    max_workers: int | None

    def __str__(self) -> str:
        most = "" if self.max_workers is None else f" to {self.max_workers}"
        moving = f", {self.there} now" if self.moving else ""
        short = f", {self.there} there" if not self.moving and self.there != self.wanted else ""
        workers = "worker" if self.wanted == 1 else "workers"
        return f"{self.role}: {self.wanted} {workers}{moving}{short} (from {self.min_workers}{most})"


class Crew:
    """The roles of a run that scale, held to what the spec says now."""

    def __init__(
        self,
        spec: Spec,
        roles: Mapping[RoleName, ScaledWorkers],
        console: Console,
        save: Callable[[Spec], None],
        file: str,
    ) -> None:
        """`save` writes down every spec the run has had, in `file`."""
        self.spec = spec
        self._roles = roles
        self._console = console
        self._save = save
        self._file = file
        self._wanted = {role: config.workers for role, config in spec.roles.scaled().items()}
        self._moves: dict[RoleName, asyncio.Task[None]] = {}
        self._waits: list[float] = []

    def change(self, changes: Mapping[str, Any]) -> None:
        """Set fields of the spec (dotted path to value); workers come and go by it in the background.

        Raises SpecError where the changed spec could not work, UsageError where a field cannot change now.
        """
        wanted = changed(self.spec, changes, self._file)
        refused = [str(difference) for difference in differences(self.spec, wanted) if difference.refused]
        if refused:
            raise UsageError("; ".join(refused))
        self.spec = wanted
        self._save(wanted)
        self._waits.clear()
        for role, config in wanted.roles.scaled().items():
            self._wanted[role] = config.workers
            if not self._moving(role):
                self._moves[role] = asyncio.create_task(self._move(role))
                self._moves[role].add_done_callback(_told)

    def states(self) -> tuple[RoleState, ...]:
        """How every role that scales stands."""
        return tuple(
            RoleState(
                role,
                self._wanted[role],
                self._roles[role].at_work,
                self._moving(role),
                config.min_workers,
                config.max_workers,
            )
            for role, config in self.spec.roles.scaled().items()
        )

    def after_step(self, wait: float) -> dict[str, float]:
        """How many workers there are (`workers/ROLE`), once the autoscaling rule has seen a step.

        :param wait: share of the step for which the trainer waited for samples
        """
        rule, rollout = self.spec.roles.rollout.autoscale, self.spec.roles.rollout
        if rule is not None and not self._moving("rollout"):
            self._waits.append(wait)
            wanted = self._wanted["rollout"] + step_of(self._waits, rule)
            if rollout.min_workers <= wanted <= (rollout.max_workers or wanted) and wanted != self._wanted["rollout"]:
                self._console.message(f"the trainer waits for {wait:.0%} of a step: {wanted} engine(s) now")
                self.change({"roles.rollout.workers": wanted})
        return {f"workers/{state.role}": float(state.there) for state in self.states()}

    async def close(self) -> None:
        """Start and end no more workers."""
        for task in self._moves.values():
            task.cancel()
        await asyncio.gather(*self._moves.values(), return_exceptions=True)

    def _moving(self, role: RoleName) -> bool:
        return role in self._moves and not self._moves[role].done()

    async def _move(self, role: RoleName) -> None:
        """Bring the number there is to the number there should be, which may change meanwhile."""
        workers = self._roles[role]
        while (wanted := self._wanted[role]) != len(workers.names):
            names = sorted(workers.names, key=_index)
            if len(names) < wanted:
                free = (name for i in itertools.count() if (name := f"{role}-{i}") not in names)
                coming = list(itertools.islice(free, wanted - len(names)))
                self._console.message(f"{role}: {len(names)} -> {wanted} workers: {', '.join(coming)} starting")
                missing = await asyncio.gather(*(self._add(role, name) for name in coming))
                if any(missing) and self._wanted[role] == wanted:
                    self._wanted[role] = len(workers.names)  # until somebody asks again
            else:
                leaving = names[wanted:]
                self._console.message(f"{role}: {len(names)} -> {wanted} workers: {', '.join(leaving)} leaving")
                await asyncio.gather(*(workers.remove(name) for name in leaving))
            self._console.message(f"{role}: {len(workers.names)} workers")

    async def _add(self, role: RoleName, name: str) -> bool:
        """Whether the worker is missing still."""
        try:
            await self._roles[role].add(name)
        except _FAILURES as error:
            self._console.message(f"{name} could not be added: {error or 'it did not start in time'}")
            return True
        return False


def _told(move: asyncio.Task[None]) -> None:
    if not move.cancelled() and (error := move.exception()) is not None:
        log.error("scaling failed: %s", error)


def step_of(waits: Sequence[float], rule: AutoscaleConfig) -> int:
    """What the last steps ask for: 1 for one more engine, -1 for one fewer, 0 for neither.

    :param waits: share of each step for which the trainer waited for samples, the newest last
    """
    recent = waits[-rule.steps :]
    if len(recent) < rule.steps:
        return 0
    return int(min(recent) > rule.max_wait) - int(max(recent) < rule.min_wait)


def _index(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
