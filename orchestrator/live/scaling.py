"""Scaling of an active run: workers are added and removed on request.

The spec holds the number of workers of each role and may change while the run is active (`orchestrator/live/diff.py`).
:class:`WorkerScaler` brings every role that scales to that number: a new engine serves once it has the current weights,
and a worker that is removed first finishes its outstanding work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.live.diff import changed, differences
from troupe.orchestrator.pools.replicas import ReplicaPool
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.parts import Metrics, RunPart, UpdatedStep


@dataclass(frozen=True)
class RoleState:
    """Number of workers of a role that scales."""

    role: str
    wanted: int
    """Workers the role is scaled to: the spec's number, or the rest of it after a failed start."""
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


logger = logging.getLogger(__name__)

_FAILURES = (TroupeError, TimeoutError)
"""Errors with which a worker may fail to start."""
CLOSE_TIMEOUT_S = 10.0


class WorkerResources(Protocol):
    """Resources of single workers (implemented by `troupe.orchestrator.launcher.WorkerLauncher`)."""

    async def make_room(self, name: str) -> None:
        """Reserve the resources of a worker. Raises DoesNotFit."""
        ...

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """Stop a worker, if it exists, and release its resources."""
        ...


class WorkerScaler(RunPart):
    """Brings every role that scales to the number of workers in the current spec, by a task per role. A task waits
    for workers to start (the launcher's timeouts) or to finish their work (`schedule.generate_timeout_s`);
    :meth:`close` cancels it."""

    def __init__(
        self,
        spec: RolloutSpec,
        pools: Mapping[str, ReplicaPool[Any]],
        resources: WorkerResources,
        console: Console,
        save: Callable[[RolloutSpec], None],
        file: str,
    ) -> None:
        """Scale the given roles. `save`: takes over each changed spec, and writes it to `file`."""
        self.spec = spec
        self._pools = pools
        self._resources = resources
        self._console = console
        self._save = save
        self._file = file
        self._wanted = {role: config.workers for role, config in spec.roles.scaled().items()}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the spec by dotted path; workers follow in the background. A spec that cannot be saved is
        logged. Raises SpecError, or UsageError if a field cannot change in an active run."""
        wanted = changed(self.spec, changes, self._file)
        refused = [str(difference) for difference in differences(self.spec, wanted) if difference.refused]
        if refused:
            raise UsageError("; ".join(refused))
        self.spec = wanted
        try:
            self._save(wanted)
        except OSError as error:
            logger.warning("the spec cannot be saved, a resumed run will not have this change: %s", error)
        for role, config in wanted.roles.scaled().items():
            self._wanted[role] = config.workers
            if not self._is_scaling(role):
                self._tasks[role] = asyncio.create_task(self._scale(role))
                self._tasks[role].add_done_callback(_log_failure)

    def states(self) -> tuple[RoleState, ...]:
        return tuple(
            RoleState(
                role,
                wanted=self._wanted[role],
                running=len(self._pools[role].serving),
                scaling=self._is_scaling(role),
                min_workers=config.min_workers,
                max_workers=config.max_workers,
            )
            for role, config in self.spec.roles.scaled().items()
        )

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """The number of workers of each role that scales, as `workers/ROLE`."""
        return {f"workers/{state.role}": float(state.running) for state in self.states()}

    async def close(self) -> None:
        """Stop scaling; workers keep running."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _is_scaling(self, role: str) -> bool:
        return role in self._tasks and not self._tasks[role].done()

    async def _scale(self, role: str) -> None:
        """Add and remove workers until the role has the wanted number, which may change at any time."""
        workers = self._pools[role]
        while (wanted := self._wanted[role]) != len(workers.names):
            names = sorted(workers.names, key=lambda name: int(name.rpartition("-")[2]))
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
                await asyncio.gather(*(self._remove(role, name) for name in removed))
            self._console.message(f"{role}: {len(workers.names)} workers")

    async def _add(self, role: str, name: str) -> bool:
        """Add a worker; returns whether it failed to start, in which case its resources are released."""
        try:
            await self._resources.make_room(name)
            try:
                await self._pools[role].join(name)
            except _FAILURES:
                await self._resources.dismiss(name, CLOSE_TIMEOUT_S)
                raise
        except _FAILURES as error:
            self._console.message(f"{name} could not be added: {error or 'it did not start in time'}")
            return True
        return False

    async def _remove(self, role: str, name: str) -> None:
        """Let a worker finish its outstanding work within the timeout, then stop it."""
        await self._pools[role].retire(name, self.spec.schedule.generate_timeout_s)
        await self._resources.dismiss(name, CLOSE_TIMEOUT_S)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("scaling failed: %s", error)
