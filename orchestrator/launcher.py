"""Starts the workers of a spec: reserves placement groups, starts actors, forms groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from troupe.orchestrator.cluster.actors import RunActors, WorkerPlacements
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.ray_cluster import ActorWorker, Cluster
from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.cluster.worker_group import ReferenceGroup, TrainerGroup, WorkerGroup
from troupe.orchestrator.errors import WorkerDied, WorkerError
from troupe.orchestrator.hub.client import Snapshot, download_all
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.workers import Started, Workers
from troupe.orchestrator.roles.table import row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.workers.contract import roles
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.messages import WorkerHealth

logger = logging.getLogger(__name__)

_SHOWN = 6
"""Names of workers that a message lists."""
_LOOK_S = 1.0
"""Time between two looks at what the workers do that are starting."""

Progress = Callable[[int, int, str], None]
"""Called with the numbers of started workers and of all, and the names of the others."""
Activities = Callable[[Sequence[str]], Awaitable[dict[str, str]]]
"""Start-up steps of workers, by name."""


class WorkerLauncher:
    """Starts the workers of a spec on a cluster."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        snapshots: Sequence[Snapshot] = (),
        classes: Mapping[str, type[roles.Worker]] | None = None,
    ) -> None:
        """Starts nothing. `snapshots`: the folders that are snapshots of the hub, which nodes without them download."""
        self.calls = RecoverableCalls()
        """Repeats calls of the trainers' groups once the run has restarted them."""
        self._spec = spec
        self._snapshots = tuple(snapshots)
        self._cluster = cluster
        self._placements = WorkerPlacements(spec, cluster)
        self._actors = RunActors(spec, cluster, self._placements, classes)
        self._progress: _StartProgress | None = None

    async def open(self, only: frozenset[str] | None = None, progress: Progress = lambda *_: None) -> Workers:
        """Reserves resources and starts all workers (or the roles in `only`). Raises DoesNotFit, WorkerError."""
        await self._placements.reserve(only)
        await self._download()
        self._progress = _StartProgress(self._cluster.activities, progress, self._placements, self._actors.served)
        try:
            with self._progress.following():
                return await self._start()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._progress = None

    async def _start(self) -> Workers:
        """Starts all roles; those on the GPUs of another after that one and in turn, as an engine takes what is free at
        its start."""
        sections, started, turn = self._spec.roles.present(), dict[str, asyncio.Task[Started]](), asyncio.Lock()

        async def start(role: str) -> Started:
            section = sections[role]
            host = started.get(section.colocate_with or "")
            if host is None or section.device == "cpu":
                return await self._role(role)
            await asyncio.wait({host})
            async with turn:
                return await self._role(role)

        async with asyncio.TaskGroup() as tasks:
            for role in self._placements.roles():
                started[role] = tasks.create_task(start(role))
        return Workers({role: task.result() for role, task in started.items()})

    async def _role(self, role: str) -> Started:
        row, names = row_of(self._spec, role), self._placements.names(role)
        if row.trains:
            workers = [self._actors.spawn(name) for name in names]
        else:
            start = self.engine if row.samples else self.replica
            workers = await asyncio.gather(*(start(name) for name in names))
        if row.group is None:
            return workers
        label = self._spec.trains if role == "policy" else role  # its name in metrics and checkpoints
        settings = settings_of(self._spec, role)
        group: WorkerGroup[Any] = resolve(row.group)(
            label,
            workers,
            settings.micro_batch_tokens,
            hung_s=self._spec.failures.hung_s,
            sequence_parallel_size=settings.sequence_parallel_size,
            calls=self.calls,
        )
        if isinstance(group, TrainerGroup):
            await self._start_trainers(group)
            if role == "policy" and (rollouts := self._spec.rollouts) is not None:
                self._actors.policy_started(group.gpu_memory, group.gpu_ids)
                if rollouts.roles.sleepers():  # engines sample and score on its GPU
                    await group.offload_states(timeout_s=self._spec.schedule.start_timeout_s)
        elif isinstance(group, ReferenceGroup):
            await group.start(self._spec.schedule.start_timeout_s)
        if row.trains:
            for name in names:
                self._started(name)
        return group

    async def _start_trainers(self, group: TrainerGroup[Any]) -> None:
        """Starts the ranks of a group, again if one dies during it; one that dies again has a cause that stays."""
        try:
            await group.start(self._spec.schedule.start_timeout_s)
        except WorkerError as error:
            died = error if isinstance(error, WorkerDied) else await group.find_dead()
            if died is None or not self._spec.failures.trainer_restarts:
                raise
            logger.warning("%s is lost while it starts: %s; starting %s again", died.worker, died, group.role)
            await self.restart([group])
        if group.network:
            logger.info("%s: %s", group.role, group.network)
            self._cluster.events.networks[group.role] = group.network
            self._cluster.events.record("network", role=group.role, detail=group.network)

    def follow(self, spec: RunSpec, renewed: Iterable[str]) -> None:
        """Starts workers with the settings of this spec from now on; those of these names are ended by the caller."""
        self._actors.follow(spec, renewed)

    async def engine(self, name: str) -> Engine:
        """Starts the rollout engine of this name, also to replace one that is gone."""
        await self._download()
        worker: ActorWorker[roles.RolloutEngine] = self._actors.spawn(name)
        with self._actors.killed_on_failure(name):
            health = await worker.call(roles.RolloutEngine.start, self._spec.schedule.start_timeout_s)
        self._started(name, health)
        return Engine(worker, health.host)

    async def replica(self, name: str) -> ActorWorker[Any]:
        """Starts the reward, reference, environment or judge worker of this name."""
        worker: ActorWorker[roles.Replica] = self._actors.spawn(name)
        with self._actors.killed_on_failure(name):
            self._started(name, await worker.call(roles.Replica.start, self._spec.schedule.start_timeout_s))
        return worker

    async def restart(self, groups: Sequence[TrainerGroup[Any]]) -> None:
        """Ends these groups' processes, and starts the same ranks with their initial model. Raises WorkerError."""
        for worker in (worker for group in groups for worker in group.workers):
            self._actors.kill(worker.name)
        timeout_s = self._spec.schedule.start_timeout_s
        spawned = [[self._actors.spawn(worker.name) for worker in group.workers] for group in groups]
        await gather_all(group.restart(workers, timeout_s) for group, workers in zip(groups, spawned, strict=True))
        names = [worker.name for group in groups for worker in group.workers]
        self._cluster.events.record("trainer_restarted", workers=names)

    def placement(self, name: str) -> tuple[Placement, WorkerPlacement]:
        """Placement group of the worker of this name, and its placement there."""
        return self._placements[name]

    async def make_room(self, name: str) -> None:
        """Reserves resources for one more worker of a role whose workers are placed one by one. The placement of a
        worker that is gone is reused. Raises DoesNotFit if the cluster has no room."""
        if name not in self._placements:
            await self._placements.add(name)
            await self._download()

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """Ends the worker of this name, if there is one, and releases its resources."""
        await self._actors.end(name, timeout_s)
        self._placements.release(name)

    async def _download(self) -> None:
        """Downloads the models to nodes that do not have them; workers use no network."""
        if self._snapshots:
            await self._cluster.prepare_nodes(download_all, self._spec.schedule.start_timeout_s, self._snapshots)

    def _started(self, name: str, health: WorkerHealth | None = None) -> None:
        self._actors.record_start(name, health)
        if self._progress is not None:
            self._progress.report()


class _StartProgress:
    """Reports the workers that have not started, until all of them have."""

    def __init__(
        self, activities: Activities, progress: Progress, all_names: Collection[str], served: Collection[str]
    ) -> None:
        """`all_names` and `served`: the workers of the run, and the started ones; both change."""
        self._activities = activities
        self._progress = progress
        self._all = all_names
        self._served = served
        self._doing: dict[str, str] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Looks at the workers while the block runs."""
        self.report()
        task = asyncio.create_task(self._follow(), name="follow activities")
        try:
            yield
        finally:
            task.cancel()

    def report(self) -> None:
        """Says which workers are still starting, and what they do."""
        waiting = self._waiting()
        each = [f"{name} ({self._doing[name]})" if name in self._doing else name for name in waiting[:_SHOWN]]
        more = [f"and {len(waiting) - _SHOWN} more"] if len(waiting) > _SHOWN else []
        self._progress(len(self._all) - len(waiting), len(self._all), " ".join([", ".join(each), *more]))

    def _waiting(self) -> list[str]:
        return sorted(name for name in self._all if name not in self._served)

    async def _follow(self) -> None:
        while True:
            self._doing = await self._activities(self._waiting())
            self.report()
            await asyncio.sleep(_LOOK_S)
