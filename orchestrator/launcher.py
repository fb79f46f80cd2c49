"""Puts the cast on stage: from a spec to running workers, in their places, started and known by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.actor_group import ActorSpec, ActorWorker, Cluster
from orchestrator.console import Console
from orchestrator.engine_pool import Engine
from orchestrator.errors import TroupeError
from orchestrator.handles import Gang
from orchestrator.placement import Placement, Seat, place, place_one, role_sizes
from orchestrator.spec import Spec
from orchestrator.spec_any import AnySpec
from orchestrator.spec_offline import OfflineSpec
from workers.config import CPU_THREADS, Rendezvous
from workers.messages import WorkerHealth

_CPU_ENV = {"DS_ACCELERATOR": "cpu", **CPU_THREADS}


@dataclass(frozen=True)
class WorkerClasses:
    """The classes behind the roles; handed in, so that nothing heavy is imported to plan or to test."""

    rollout: type
    policy: type
    critic: type
    reference: type
    reward: type
    example_policy: type | None = None
    """Needed for runs on given examples only, as is the next one."""
    reward_trainer: type | None = None


@dataclass(frozen=True)
class Stage:
    """Every worker of a run, started."""

    policy: Gang | None
    critic: Gang | None
    reference: Gang | None
    engines: tuple[Engine, ...]
    reward: tuple[ActorWorker, ...]


@dataclass(frozen=True)
class Scene:
    """What a run plays on."""

    cluster: Cluster
    casting: Casting
    stage: Stage
    console: Console
    stop: asyncio.Event
    """Set when the run is to save and leave."""


class Casting:
    """Starts workers on a cluster as a spec says."""

    def __init__(self, spec: AnySpec, cluster: Cluster, classes: WorkerClasses) -> None:
        self._spec = spec
        self._cluster = cluster
        self._classes = classes
        self._sizes = {size.role: size for size in role_sizes(spec)}
        self._seats: dict[str, tuple[Placement, Seat]] = {}
        """By the name of the worker."""
        self._workers: dict[str, ActorWorker] = {}

    async def open(self, roles: frozenset[str] | None = None) -> Stage:
        """Reserve places and start the workers of all roles (or of `roles` only), side by side.

        Raises DoesNotFit when the cluster has no room, WorkerError when a worker does not start.
        """
        spec, bound = self._spec, self._spec.schedule.start_timeout_s
        placements = [p for p in place(role_sizes(spec)) if roles is None or any(s.role in roles for s in p.seats)]
        await self._cluster.reserve(placements, bound)
        for placement in placements:
            self._take(placement)
        try:
            return await self._start()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _start(self) -> Stage:
        async with asyncio.TaskGroup() as tasks:
            engines = [tasks.create_task(self.engine(name)) for name in self._names("rollout")]
            rewards = tasks.create_task(self._replicas("reward"))
            policy = tasks.create_task(self._gang("policy"))
            critic = tasks.create_task(self._gang("critic"))
            reference = tasks.create_task(self._reference())
        return Stage(
            policy.result(),
            critic.result(),
            reference.result(),
            tuple(task.result() for task in engines),
            rewards.result(),
        )

    async def engine(self, name: str) -> Engine:
        """Start the rollout engine of this name in its seat (also to replace one that is gone)."""
        worker = self._spawn(name)
        health: WorkerHealth = await worker.call("start", timeout_s=self._spec.schedule.start_timeout_s)
        return Engine(worker, health.host)

    async def replica(self, name: str) -> ActorWorker:
        """Start the reward or reference worker of this name in its seat."""
        worker = self._spawn(name)
        await worker.call("start", timeout_s=self._spec.schedule.start_timeout_s)
        return worker

    async def make_room(self, name: str) -> None:
        """Reserve a seat for one more worker of a role whose workers are placed on their own; that of a worker which is
        gone is taken again. Raises DoesNotFit."""
        if name in self._seats:
            return
        role, index = name.rsplit("-", 1)
        placement = place_one(self._sizes[role], int(index))
        await self._cluster.reserve([placement], self._spec.schedule.start_timeout_s)
        self._take(placement)

    async def dismiss(self, name: str, timeout_s: float) -> None:
        """End the worker of this name, if there is one, and give back its seat, which was its own."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            await self._cluster.end(worker, timeout_s)
        if name in self._seats:
            placement, _ = self._seats.pop(name)
            self._cluster.give_back(placement.name)

    def _take(self, placement: Placement) -> None:
        self._seats |= {f"{seat.role}-{seat.index}": (placement, seat) for seat in placement.seats}

    def _names(self, role: str) -> list[str]:
        """Workers of a role that have a seat, in order."""
        indices = sorted(seat.index for _, seat in self._seats.values() if seat.role == role)
        return [f"{role}-{index}" for index in indices]

    async def _gang(self, role: Literal["policy", "critic"]) -> Gang | None:
        """Ranks that train together: rank 0 names the meeting point, all join."""
        names = self._names(role)
        if not names:
            return None
        bound = self._spec.schedule.start_timeout_s
        workers = [self._spawn(name) for name in names]
        address, port = await workers[0].call("rendezvous", timeout_s=bound)
        trainer = self._spec.roles.trainers()[role]
        gang = Gang(role, workers, trainer.micro_batch_tokens)
        places = [Rendezvous(address=address, port=port, rank=r, world_size=gang.ranks) for r in range(gang.ranks)]
        await gang.scatter("start", places, timeout_s=bound)
        if role == "policy" and isinstance(self._spec, Spec):
            gang.shares_prompts = all(await gang.broadcast("shares_prompts", timeout_s=bound))
        return gang

    async def _reference(self) -> Gang | None:
        role = self._spec.roles.reference
        workers = await self._replicas("reference")
        return Gang("reference", workers, role.micro_batch_tokens) if role is not None and workers else None

    async def _replicas(self, role: str) -> tuple[ActorWorker, ...]:
        return tuple(await asyncio.gather(*(self.replica(name) for name in self._names(role))))

    def _spawn(self, name: str) -> ActorWorker:
        placement, seat = self._seats[name]
        worker = self._cluster.spawn(placement, seat, name, self._actor(seat.role, name))
        self._workers[name] = worker
        return worker

    def _actor(self, role: str, name: str) -> ActorSpec:
        if isinstance(self._spec, OfflineSpec):
            return self._example_actor(self._spec, role, name)
        return self._rollout_actor(self._spec, role, name)

    def _example_actor(self, spec: OfflineSpec, role: str, name: str) -> ActorSpec:
        """Actors of a run on given examples."""
        classes = self._classes
        if role == "reference" and (reference := spec.reference_config()) is not None:
            return ActorSpec(classes.reference, (reference, name), _env(reference.threads, reference.device))
        config = spec.trainer_config()
        trainer = classes.reward_trainer if spec.row.trains == "reward_model" else classes.example_policy
        if trainer is None:
            raise TroupeError(f"no worker class was given to train a {spec.row.trains} on examples")
        return ActorSpec(trainer, (config, name), _env(config.trainer.threads, config.device))

    def _rollout_actor(self, spec: Spec, role: str, name: str) -> ActorSpec:
        """Actors of a run on rollouts."""
        classes = self._classes
        if role == "rollout":
            config = spec.rollout_config()
            return ActorSpec(classes.rollout, (config, name), _env(config.engine.threads, config.device), True)
        if role == "policy":
            config = spec.policy_config()
            return ActorSpec(classes.policy, (config, name), _env(config.trainer.threads, config.device))
        if role == "critic" and (critic := spec.critic_config()) is not None:
            return ActorSpec(classes.critic, (critic, name), _env(critic.trainer.threads, critic.device))
        if role == "reference" and (reference := spec.reference_config()) is not None:
            return ActorSpec(classes.reference, (reference, name), _env(reference.threads, reference.device))
        reward, device = spec.reward_config(), "cuda" if spec.roles.reward.gpus > 0 else "cpu"
        return ActorSpec(classes.reward, (reward, name, device, spec.model), _env(reward.threads, device))


def _env(threads: int, device: str) -> dict[str, str]:
    """Environment of a worker's process, set before any library is loaded."""
    env: Mapping[str, str] = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return {**env, **(_CPU_ENV if device == "cpu" else {})}
