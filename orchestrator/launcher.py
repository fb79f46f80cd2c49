"""From a spec to running workers: placement groups reserved, actors started, groups formed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from troupe.orchestrator.capacity.placement import Placement, Seat, place, place_one, role_sizes
from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.cluster.worker_group import (
    CriticGroup,
    ExampleGroup,
    PolicyGroup,
    ReferenceGroup,
    TrainerGroup,
)
from troupe.orchestrator.hub.client import Snapshot, download_all
from troupe.orchestrator.pools.engines import Engine
from troupe.orchestrator.reporting.console import Console
from troupe.orchestrator.spec.base import RunSpec, WorkerKind
from troupe.orchestrator.spec.sections import RoleName
from troupe.orchestrator.why.observer import RunObserver
from troupe.workers.contract import roles
from troupe.workers.contract.audit import ScoreRequest, TokenScores
from troupe.workers.contract.config import CPU_THREADS
from troupe.workers.contract.messages import WorkerHealth

_CPU_ENV = {"DS_ACCELERATOR": "cpu", **CPU_THREADS}

_SHOWN = 6
"""Names of workers that a message lists."""
_STAGES_S = 1.0
"""Time between two looks at what the workers do that are starting."""

GroupT = TypeVar("GroupT", bound=TrainerGroup[Any])


@dataclass(frozen=True)
class WorkerClasses:
    """The classes behind the roles; passed in, so that planning and tests import no model library."""

    rollout: type[roles.Engine]
    policy: type[roles.Policy]
    critic: type[roles.Critic]
    reference: type[roles.Reference]
    reward: type[roles.Reward]
    environment: type[roles.Environment]
    judge: type[roles.JudgeEngine]
    example_policy: type[roles.ExampleTrainer]
    reward_trainer: type[roles.ExampleTrainer]
    audit_judge: Callable[..., TokenScores]
    """Scores sampled tokens in plain transformers; no role, and called in a process of its own."""

    def by_kind(self) -> Mapping[WorkerKind, type[roles.Worker]]:
        """The class of each kind of worker."""
        return {
            "rollout": self.rollout,
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
            "environment": self.environment,
            "judge": self.judge,
            "example_policy": self.example_policy,
            "reward_trainer": self.reward_trainer,
        }


@dataclass(frozen=True)
class Workers:
    """Every worker of a run, started."""

    policy: PolicyGroup | None
    """In runs on rollouts."""
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    examples: ExampleGroup | None
    """The trained model, in runs on offline data."""
    engines: tuple[Engine, ...]
    reward: tuple[ActorWorker[roles.Reward], ...]
    environments: tuple[ActorWorker[roles.Environment], ...] = ()
    judges: tuple[ActorWorker[roles.JudgeEngine], ...] = ()


@dataclass(frozen=True)
class RunContext:
    """What a run has at its disposal."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    console: Console
    stop: asyncio.Event
    """Set when the run must save and exit."""
    observer: RunObserver | None = None
    """Answers `troupe why`."""


class WorkerLauncher:
    """Starts the workers of a spec on a cluster."""

    def __init__(
        self, spec: RunSpec, cluster: Cluster, classes: WorkerClasses, snapshots: Sequence[Snapshot] = ()
    ) -> None:
        """Starts nothing.

        Args:
            spec: The spec, with models that are folders.
            cluster: Where the workers run.
            classes: The class of each role.
            snapshots: Those of the folders that are snapshots of the hub: nodes without them download them.
        """
        self._spec = spec
        self._snapshots = tuple(snapshots)
        self._cluster = cluster
        self._classes = classes.by_kind()
        self._audit_judge = classes.audit_judge
        self._sizes = {size.role: size for size in role_sizes(spec)}
        self._seats: dict[str, tuple[Placement, Seat]] = {}
        """By worker name."""
        self._workers: dict[str, ActorWorker[Any]] = {}
        self._served: set[str] = set()
        """Names of workers that have started before."""
        self._stages: dict[str, str] = {}
        """What workers that are starting do, by name."""
        self._progress: Callable[[int, int, str], None] = lambda *_: None

    async def open(
        self, only: frozenset[str] | None = None, progress: Callable[[int, int, str], None] = lambda *_: None
    ) -> Workers:
        """Reserves resources and starts the workers of all roles (or of the roles in `only`) concurrently.

        Args:
            only: Roles to start; None: all.
            progress: Is told how many workers have started, how many there are, and the names of the others.

        Raises:
            DoesNotFit: The cluster has no room.
            WorkerError: A worker does not start.
        """
        spec, bound = self._spec, self._spec.schedule.start_timeout_s
        placements = [p for p in place(role_sizes(spec)) if only is None or any(s.role in only for s in p.seats)]
        await self._cluster.reserve(placements, bound)
        for placement in placements:
            self._take(placement, only)
        await self._download()
        self._progress = progress
        self._report()
        following = asyncio.create_task(self._follow_stages(), name="follow stages")
        try:
            return await self._start()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            following.cancel()
            self._progress = lambda *_: None

    async def _start(self) -> Workers:
        names = self._names("policy")
        policy_names, example_names = self._spec.dispatch(lambda _: (names, []), lambda _: ([], names))
        async with asyncio.TaskGroup() as tasks:
            engines = [tasks.create_task(self.engine(name)) for name in self._names("rollout")]
            rewards = tasks.create_task(self._replicas("reward"))
            environments = tasks.create_task(self._replicas("environment"))
            judges = tasks.create_task(self._replicas("judge"))
            policy = tasks.create_task(self._trainers(PolicyGroup, "policy", policy_names))
            examples = tasks.create_task(self._trainers(ExampleGroup, self._spec.trains, example_names))
            critic = tasks.create_task(self._trainers(CriticGroup, "critic", self._names("critic")))
            reference = tasks.create_task(self._reference())
        return Workers(
            policy.result(),
            critic.result(),
            reference.result(),
            examples.result(),
            tuple(task.result() for task in engines),
            rewards.result(),
            environments.result(),
            judges.result(),
        )

    async def engine(self, name: str) -> Engine:
        """Starts the rollout engine of this name, also to replace one that is gone."""
        await self._download()
        worker: ActorWorker[roles.Engine] = self._spawn(name)
        with self._ended_on_failure(worker):
            health = await worker.call(roles.Engine.start, self._spec.schedule.start_timeout_s)
        self._started(name, health)
        return Engine(worker, health.host)

    async def replica(self, name: str) -> ActorWorker[Any]:
        """Starts the reward, reference, environment or judge worker of this name."""
        worker: ActorWorker[roles.Replica] = self._spawn(name)
        with self._ended_on_failure(worker):
            self._started(name, await worker.call(roles.Replica.start, self._spec.schedule.start_timeout_s))
        return worker

    @contextmanager
    def _ended_on_failure(self, worker: ActorWorker[Any]) -> Iterator[None]:
        """Ends a worker that does not start, so that its seat is free for another one."""
        try:
            yield
        except BaseException:
            self._cluster.kill(worker)
            raise

    async def restart(self, groups: Sequence[TrainerGroup[Any]]) -> None:
        """Ends the processes of these groups, and starts the same ranks with their initial model.

        Raises:
            WorkerError: One does not start.
        """
        for worker in (worker for group in groups for worker in group.workers):
            self._cluster.kill(self._workers[worker.name])
        for group in groups:
            group.workers = tuple(self._spawn(worker.name) for worker in group.workers)
        await gather_all(group.start(self._spec.schedule.start_timeout_s) for group in groups)
        names = [worker.name for group in groups for worker in group.workers]
        self._cluster.events.record("trainer_restarted", workers=names)

    async def judge_tokens(self, request: ScoreRequest, *tables: roles.TableRef) -> TokenScores:
        """Runs the scorer of an audit in a separate process on the node of the policy's first worker.

        Raises:
            WorkerError: It failed, or did not answer in time.
        """
        place, env = self._seats["policy-0"], _env(request.threads or 1, "cpu")
        timeout_s = self._spec.schedule.score_timeout_s
        return await self._cluster.run_beside(*place, env, self._audit_judge, timeout_s, request, *tables)

    async def make_room(self, name: str) -> None:
        """Reserves resources for one more worker of a role whose workers are placed one by one.

        The seat of a worker that is gone is reused.

        Raises:
            DoesNotFit: The cluster has no room.
        """
        if name in self._seats:
            return
        role, index = name.rsplit("-", 1)
        placement = place_one(self._sizes[role], int(index))
        await self._cluster.reserve([placement], self._spec.schedule.start_timeout_s)
        self._take(placement)
        await self._download()

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """Ends the worker of this name, if there is one, and releases its resources."""
        worker = self._workers.pop(name, None)
        self._served.discard(name)
        if worker is not None:
            await self._cluster.end(worker, timeout_s)
        if name in self._seats:
            placement, _ = self._seats.pop(name)
            self._cluster.release(placement.name)

    async def _download(self) -> None:
        """Downloads the models to nodes that do not have them; workers use no network."""
        if self._snapshots:
            await self._cluster.prepare_nodes(download_all, self._spec.schedule.start_timeout_s, self._snapshots)

    def _take(self, placement: Placement, only: frozenset[str] | None = None) -> None:
        """Takes the seats of a placement, or those of the roles in `only`."""
        seats = [seat for seat in placement.seats if only is None or seat.role in only]
        self._seats |= {f"{seat.role}-{seat.index}": (placement, seat) for seat in seats}

    def _names(self, role: RoleName) -> list[str]:
        """Names of the role's workers that have a seat, in order."""
        indices = sorted(seat.index for _, seat in self._seats.values() if seat.role == role)
        return [f"{role}-{index}" for index in indices]

    async def _trainers(self, group: type[GroupT], role: str, names: Sequence[str]) -> GroupT | None:
        """Starts the ranks that train one model together; None where there are none.

        `role` names the group in metrics and checkpoints.
        """
        if not names:
            return None
        section = self._spec.roles.trainers()[self._seats[names[0]][1].role]
        workers = [self._spawn(name) for name in names]
        ranks = group(role, workers, section.micro_batch_tokens, self._spec.failures.hung_s)
        await ranks.start(self._spec.schedule.start_timeout_s)
        for name in names:
            self._started(name)
        return ranks

    async def _reference(self) -> ReferenceGroup | None:
        role = self._spec.roles.reference
        workers = await self._replicas("reference")
        if role is None or not workers:
            return None
        return ReferenceGroup("reference", workers, role.micro_batch_tokens, self._spec.failures.hung_s)

    async def _replicas(self, role: RoleName) -> tuple[ActorWorker[Any], ...]:
        return tuple(await asyncio.gather(*(self.replica(name) for name in self._names(role))))

    def _started(self, name: str, health: WorkerHealth | None = None) -> None:
        """Records that a worker serves, and where."""
        event = "worker_replaced" if name in self._served else "worker_started"
        self._served.add(name)
        self._report()
        detail = "" if health is None else f"host {health.host}, pid {health.pid}"
        self._cluster.events.record(event, worker=name, detail=detail)

    async def _follow_stages(self) -> None:
        """Says what the workers do that are still starting, until it is cancelled."""
        while True:
            self._stages = await self._cluster.stages(self._waiting())
            self._report()
            await asyncio.sleep(_STAGES_S)

    def _waiting(self) -> list[str]:
        """Names of the workers that have not started."""
        return sorted(name for name in self._seats if name not in self._served)

    def _report(self) -> None:
        """Says which workers are still starting, and what they do."""
        waiting = self._waiting()
        each = [f"{name} ({self._stages[name]})" if name in self._stages else name for name in waiting[:_SHOWN]]
        shown = ", ".join(each) + (f" and {len(waiting) - _SHOWN} more" * (len(waiting) > _SHOWN))
        self._progress(len(self._seats) - len(waiting), len(self._seats), shown)

    def _spawn(self, name: str) -> ActorWorker[Any]:
        placement, seat = self._seats[name]
        settings = self._spec.worker_settings(seat.role)
        arguments = (*settings.args, name, *settings.extra)
        env = _env(settings.threads, settings.device)
        actor = ActorSpec(self._classes[settings.kind], arguments, env, settings.concurrent)
        worker = self._cluster.spawn(placement, seat, name, actor)
        self._workers[name] = worker
        return worker


def _env(threads: int, device: str) -> dict[str, str]:
    """Environment variables of a worker's process, set before any library is loaded."""
    env: Mapping[str, str] = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return {**env, **(_CPU_ENV if device == "cpu" else {})}
