"""Scaling of an active run: workers are added and removed on request, and by how long the trainer waits for samples.

The spec holds the number of workers of each role and may change while the run is active (`orchestrator/live/diff.py`).
:class:`WorkerScaler` brings every role that scales to that number: a new engine serves once it has the current weights,
and a worker that is removed first finishes its outstanding work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.diff import changed, differences
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.linked import LinkedPool
from troupe.orchestrator.reporting.console import Console
from troupe.orchestrator.rollouts.scoring import RewardPool, TokenScorer
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import AutoscaleConfig, RoleName
from troupe.workers.contract.roles import Reward

logger = logging.getLogger(__name__)

_FAILURES = (TroupeError, TimeoutError)
"""Errors with which a worker may fail to start."""


class ReplicaLauncher(Protocol):
    """Starts and stops single workers (implemented by `troupe.orchestrator.launcher.WorkerLauncher`)."""

    async def make_room(self, name: str) -> None:
        """Reserve the resources of a worker. Raises DoesNotFit."""
        ...

    async def replica(self, name: str) -> WorkerHandle:
        """Start a reward, reference, environment or judge worker on its reserved resources. Raises WorkerError."""
        ...

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """Stop a worker, if it exists, and release its resources."""
        ...


@dataclass(frozen=True)
class RemovalTimeouts:
    """Timeouts of the removal of a worker, in seconds."""

    finish_s: float
    """To finish its outstanding work."""
    close_s: float
    """To shut down."""


class ScaledWorkers(ABC):
    """The workers of one role that scales."""

    def __init__(self, launcher: ReplicaLauncher, timeouts: RemovalTimeouts) -> None:
        self._launcher = launcher
        self._timeouts = timeouts

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Workers that run or start; workers that are being removed do not count."""

    @property
    def running(self) -> int:
        """Number of workers that receive work now."""
        return len(self.names)

    async def add(self, name: str) -> None:
        """Add a worker.

        Raises:
            TroupeError: The worker did not start; its resources are released.
            TimeoutError: It did not start in time; its resources are released.
        """
        await self._launcher.make_room(name)
        try:
            await self._join(name)
        except _FAILURES:
            await self._launcher.dismiss(name, self._timeouts.close_s)
            raise

    async def remove(self, name: str) -> None:
        """Let a worker finish its outstanding work within the timeout, then stop it."""
        await self._drain(name)
        await self._launcher.dismiss(name, self._timeouts.close_s)

    @abstractmethod
    async def _join(self, name: str) -> None:
        """Start a worker on its reserved resources and give it work."""

    @abstractmethod
    async def _drain(self, name: str) -> None:
        """Give the worker no new work; return when it has finished its work or the timeout has passed."""


class ScaledEngines(ScaledWorkers):
    """Rollout engines. An engine serves once it has the current weights; groups that a removed engine does not finish
    in time are rescheduled on the others."""

    def __init__(self, pool: EnginePool, launcher: ReplicaLauncher, timeouts: RemovalTimeouts) -> None:
        super().__init__(launcher, timeouts)
        self._pool = pool

    @property
    def names(self) -> list[str]:
        """Engines that serve or start."""
        return self._pool.names

    @property
    def running(self) -> int:
        """Number of engines that receive groups."""
        return len(self._pool.serving)

    async def _join(self, name: str) -> None:
        await self._pool.join(name)

    async def _drain(self, name: str) -> None:
        await self._pool.retire(name, self._timeouts.finish_s)


class ScaledRewardWorkers(ScaledWorkers):
    """Reward workers. Groups that a removed worker does not score in time are rescheduled on the others."""

    def __init__(
        self,
        pool: RewardPool,
        launcher: ReplicaLauncher,
        timeouts: RemovalTimeouts,
        start: Callable[[str], Awaitable[WorkerHandle[Reward]]],
    ) -> None:
        """`start`: starts a worker on its reserved resources, ready to score. Raises WorkerError."""
        super().__init__(launcher, timeouts)
        self._pool = pool
        self._start = start

    @property
    def names(self) -> list[str]:
        """Workers that receive groups."""
        return self._pool.names

    async def _join(self, name: str) -> None:
        self._pool.join(await self._start(name))

    async def _drain(self, name: str) -> None:
        try:
            await asyncio.wait_for(self._pool.retire(name), self._timeouts.finish_s)
        except TimeoutError:
            logger.warning("%s is removed with unfinished work after %g s", name, self._timeouts.finish_s)


class ScaledLinked(ScaledWorkers):
    """Environment or judge workers. What a removed worker does not end in time starts again on the others."""

    def __init__(self, pool: LinkedPool[Any, Any, Any], launcher: ReplicaLauncher, timeouts: RemovalTimeouts) -> None:
        super().__init__(launcher, timeouts)
        self._pool = pool

    @property
    def names(self) -> list[str]:
        """Workers that serve, or are being replaced."""
        return self._pool.names

    async def _join(self, name: str) -> None:
        await self._pool.join(await self._launcher.replica(name))

    async def _drain(self, name: str) -> None:
        await self._pool.retire(name, self._timeouts.finish_s)


class ScaledScorers(ScaledWorkers):
    """Workers of a frozen model that scores tokens in waves; they are added and removed between two waves."""

    def __init__(self, scorer: TokenScorer, launcher: ReplicaLauncher, timeouts: RemovalTimeouts) -> None:
        super().__init__(launcher, timeouts)
        self._scorer = scorer

    @property
    def names(self) -> list[str]:
        """Workers that participate in every wave."""
        return [worker.name for worker in self._scorer.group.workers]

    async def _join(self, name: str) -> None:
        worker = await self._launcher.replica(name)
        await self._scorer.resize(lambda workers: [*workers, worker])

    async def _drain(self, name: str) -> None:
        await self._scorer.resize(lambda workers: [worker for worker in workers if worker.name != name])


@dataclass(frozen=True)
class RoleState:
    """Number of workers of a role that scales."""

    role: str
    wanted: int
    """Workers the role is scaled to: the spec's number, or what is left of it after a failed start."""
    running: int
    """Workers that receive work now."""
    scaling: bool
    """Whether workers are being added or removed."""
    min_workers: int
    max_workers: int | None

    def __str__(self) -> str:
        text = f"{self.role}: {self.wanted} {'worker' if self.wanted == 1 else 'workers'}"
        if self.scaling or self.running != self.wanted:
            text += f", {self.running} running"
        if self.scaling:
            text += ", scaling"
        limits = f"min {self.min_workers}" + ("" if self.max_workers is None else f", max {self.max_workers}")
        return f"{text} ({limits})"


class WorkerScaler:
    """Brings every role that scales to the number of workers in the current spec.

    One background task per role adds and removes workers until the role has the wanted number, which may change
    meanwhile. A task waits for workers to start (limited by the launcher's timeouts) or to finish their work (limited
    by `RemovalTimeouts`); :meth:`close` cancels it.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        roles: Mapping[RoleName, ScaledWorkers],
        console: Console,
        save: Callable[[RolloutSpec], None],
        file: str,
    ) -> None:
        """Scale the given roles.

        Args:
            spec: The spec of the run at its start.
            roles: The workers of each role that scales.
            console: Receives a line for every change.
            save: Writes each changed spec to `file`.
            file: The run's spec file, as error messages name it.
        """
        self.spec = spec
        self._roles = roles
        self._console = console
        self._save = save
        self._file = file
        self._wanted = {role: config.workers for role, config in spec.roles.scaled().items()}
        self._tasks: dict[RoleName, asyncio.Task[None]] = {}
        self._waits: list[float] = []

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the spec; workers are added and removed in the background.

        A changed spec that cannot be saved (disk full, ...) is logged; the run scales nevertheless.

        Args:
            changes: Dotted path to value.

        Raises:
            SpecError: The changed spec is invalid.
            UsageError: A field cannot change while the run is active.
        """
        wanted = changed(self.spec, changes, self._file)
        refused = [str(difference) for difference in differences(self.spec, wanted) if difference.refused]
        if refused:
            raise UsageError("; ".join(refused))
        self.spec = wanted
        try:
            self._save(wanted)
        except OSError as error:
            logger.warning("the spec cannot be saved, a resumed run will not have this change: %s", error)
        self._waits.clear()
        for role, config in wanted.roles.scaled().items():
            self._wanted[role] = config.workers
            if not self._is_scaling(role):
                self._tasks[role] = asyncio.create_task(self._scale(role))
                self._tasks[role].add_done_callback(_log_failure)

    def states(self) -> tuple[RoleState, ...]:
        """The state of every role that scales."""
        return tuple(
            RoleState(
                role,
                self._wanted[role],
                self._roles[role].running,
                self._is_scaling(role),
                config.min_workers,
                config.max_workers,
            )
            for role, config in self.spec.roles.scaled().items()
        )

    def after_step(self, wait: float) -> dict[str, float]:
        """Apply the autoscaling rule after a step.

        Args:
            wait: Fraction of the step (0 to 1) for which the trainer waited for samples.

        Returns:
            The number of workers of each role that scales, as `workers/ROLE`.
        """
        rule, rollout = self.spec.roles.rollout.autoscale, self.spec.roles.rollout
        if rule is not None and not self._is_scaling("rollout"):
            self._waits.append(wait)
            wanted = self._wanted["rollout"] + autoscale_step(self._waits, rule)
            if rollout.min_workers <= wanted <= (rollout.max_workers or wanted) and wanted != self._wanted["rollout"]:
                self._console.message(
                    f"autoscale: the trainer waited for {wait:.0%} of the step; scaling to {wanted} engine(s)"
                )
                self.change({"roles.rollout.workers": wanted})
        return {f"workers/{state.role}": float(state.running) for state in self.states()}

    async def close(self) -> None:
        """Stop scaling; workers keep running."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _is_scaling(self, role: RoleName) -> bool:
        return role in self._tasks and not self._tasks[role].done()

    async def _scale(self, role: RoleName) -> None:
        """Add and remove workers until the role has the wanted number, which may change meanwhile."""
        workers = self._roles[role]
        while (wanted := self._wanted[role]) != len(workers.names):
            names = sorted(workers.names, key=_index)
            if len(names) < wanted:
                free = (name for i in itertools.count() if (name := f"{role}-{i}") not in names)
                new = list(itertools.islice(free, wanted - len(names)))
                self._console.message(f"{role}: {len(names)} -> {wanted} workers: {', '.join(new)} starting")
                failed = await asyncio.gather(*(self._add(role, name) for name in new))
                if any(failed) and self._wanted[role] == wanted:
                    self._wanted[role] = len(workers.names)  # until the next request
            else:
                removed = names[wanted:]
                self._console.message(f"{role}: {len(names)} -> {wanted} workers: {', '.join(removed)} stopping")
                await asyncio.gather(*(workers.remove(name) for name in removed))
            self._console.message(f"{role}: {len(workers.names)} workers")

    async def _add(self, role: RoleName, name: str) -> bool:
        """Add a worker; returns whether it failed to start."""
        try:
            await self._roles[role].add(name)
        except _FAILURES as error:
            self._console.message(f"{name} could not be added: {error or 'it did not start in time'}")
            return True
        return False


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("scaling failed: %s", error)


def autoscale_step(waits: Sequence[float], rule: AutoscaleConfig) -> int:
    """Change of the number of engines: 1 if every recent step waited more than `max_wait`, -1 if every one waited less
    than `min_wait`, else 0.

    Args:
        waits: Fraction of each step (0 to 1) for which the trainer waited for samples, newest last.
        rule: Thresholds, and the number of steps that must agree.
    """
    recent = waits[-rule.steps :]
    if len(recent) < rule.steps:
        return 0
    return int(min(recent) > rule.max_wait) - int(max(recent) < rule.min_wait)


def _index(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
