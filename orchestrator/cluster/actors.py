"""The workers of a run as actors, each with a placement, a class and a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.plan.memory import Sizes, shared_engines
from troupe.orchestrator.plan.placement import Placement, WorkerPlacement, place, place_one, role_sizes
from troupe.orchestrator.roles.names import section_of
from troupe.orchestrator.roles.table import row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.workers.contract import roles
from troupe.workers.contract.imports import without_collections
from troupe.workers.contract.messages import WorkerHealth
from troupe.workers.isolation.compiled_code import keep_compiled_code
from troupe.workers.isolation.lifetime import exit_with_node
from troupe.workers.preload.forked_worker import serves


class WorkerPlacements(Mapping[str, tuple[Placement, WorkerPlacement]]):
    """The places of the workers of a spec, by worker name. A place is kept while its worker is replaced."""

    def __init__(self, spec: RunSpec, cluster: Cluster) -> None:
        self._cluster = cluster
        self._timeout_s = spec.schedule.start_timeout_s
        self._sizes = {size.role: size for size in role_sizes(spec)}
        self._placements: dict[str, tuple[Placement, WorkerPlacement]] = {}

    def __getitem__(self, name: str) -> tuple[Placement, WorkerPlacement]:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def roles(self) -> set[str]:
        return {placed.role for _, placed in self.values()}

    def names(self, role: str) -> list[str]:
        """Names of the workers of a role that have a place, in the order of their index."""
        return [f"{role}-{index}" for index in sorted(s.index for _, s in self.values() if s.role == role)]

    async def reserve(self, only: frozenset[str] | None = None) -> None:
        """Reserves the resources of all workers, or of these sections of `roles`. Raises DoesNotFit without room."""
        placements = [
            placement
            for placement in place(list(self._sizes.values()))
            if only is None or any(section_of(placed.role) in only for placed in placement.workers)
        ]
        await self._cluster.reserve(placements, self._timeout_s)
        for placement in placements:
            self._take(placement, only)

    async def add(self, name: str) -> None:
        """Reserves the resources of one more worker, of a role placed one by one. Raises DoesNotFit without room."""
        role, index = name.rsplit("-", 1)
        placement = place_one(self._sizes[role], int(index))
        await self._cluster.reserve([placement], self._timeout_s)
        self._take(placement)

    def release(self, name: str) -> None:
        """Releases the resources of a worker that has ended, if it has a place."""
        if name in self._placements:
            placement, _ = self._placements.pop(name)
            self._cluster.release(placement.name)

    def _take(self, placement: Placement, only: frozenset[str] | None = None) -> None:
        """Takes the places of a placement, or of the sections in `only` alone."""
        placed_here = [placed for placed in placement.workers if only is None or section_of(placed.role) in only]
        self._placements |= {f"{placed.role}-{placed.index}": (placement, placed) for placed in placed_here}


class RunActors:
    """Creates the actor of a worker in its place, and ends it. A replacement has the name of the replaced worker."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        placements: WorkerPlacements,
        classes: Mapping[str, type[roles.Worker]] | None,
    ) -> None:
        """Creates nothing. `classes`: worker classes to use instead of those of the table of roles, by its rows."""
        self.served: set[str] = set()
        """Names of workers that have started before."""
        self._spec = spec
        self._cluster = cluster
        self._placements = placements
        self._classes = classes or {}
        self._workers: dict[str, ActorWorker[Any]] = {}
        self._policy_gpu = 0
        self._gpu_ids: Mapping[str, str] = {}

    def follow(self, spec: RunSpec, renewed: Iterable[str]) -> None:
        """Creates workers with the settings of this spec from now on; the next ones of these names replace none."""
        self._spec = spec
        self.served.difference_update(renewed)

    def policy_started(self, gpu_memory: int, gpu_ids: Mapping[str, str]) -> None:
        """Notes what the policy's ranks report of their GPUs: the memory of the smallest in bytes (0: they have none),
        and its number on its node by the name of the rank."""
        self._policy_gpu, self._gpu_ids = gpu_memory, gpu_ids

    def spawn(self, name: str) -> ActorWorker[Any]:
        """Creates the worker of this name in its place."""
        placement, placed = self._placements[name]
        row, settings = row_of(self._spec, placed.role), settings_of(self._spec, placed.role)
        own = self._classes.get(row.kind)
        worker_class = own or actor_class(row.worker, row.protocol, concurrent=row.concurrent)
        config = settings.config
        if placed.role in self._shared_engines:
            cache, share = self._shared_engines[placed.role]
            engine = config.engine.model_copy(update={"gpu_memory_utilization": share})
            config = config.model_copy(update={"kv_cache_bytes": cache or None, "engine": engine})
        arguments = (config, name, *settings.extra)
        env = settings.env | ({"CUDA_VISIBLE_DEVICES": self._lent_gpus(placement, placed)} if placed.borrows else {})
        actor = ActorSpec(worker_class, arguments, env, row.concurrent, settings.engine)
        worker = self._cluster.spawn(placement, placed, name, actor)
        self._workers[name] = worker
        return worker

    def _lent_gpus(self, placement: Placement, placed: WorkerPlacement) -> str:
        """The GPUs of the ranks in an engine's bundle. A rank that is replaced has one of the same bundle."""
        here = [other for other in placement.workers if other.bundle == placed.bundle and not other.borrows]
        return ",".join(self._gpu_ids[f"{other.role}-{other.index}"] for other in here)

    def record_start(self, name: str, health: WorkerHealth | None = None) -> None:
        """Records that a worker serves, and its location."""
        event = "worker_replaced" if name in self.served else "worker_started"
        self.served.add(name)
        detail = "" if health is None else f"host {health.host}, pid {health.pid}"
        self._cluster.events.record(event, worker=name, detail=detail)

    @contextmanager
    def killed_on_failure(self, name: str) -> Iterator[None]:
        """Ends a worker that does not start inside the block, so that its place is free for another one."""
        try:
            yield
        except BaseException:
            self.kill(name)
            raise

    def kill(self, name: str) -> None:
        self._cluster.kill(self._workers[name])

    async def end(self, name: str, timeout_s: float) -> None:
        """Ends the worker of this name, if there is one, and forgets it."""
        self.served.discard(name)
        worker = self._workers.pop(name, None)
        if worker is not None:
            await self._cluster.end(worker, timeout_s)

    @cached_property
    def _shared_engines(self) -> Mapping[str, tuple[int, float]]:
        """(KV cache in bytes, share of its GPU) of an engine of each role on the policy's GPU, as `troupe plan` counts
        them; empty if the memory of a GPU is unknown."""
        spec = self._spec.rollouts
        if spec is None or spec.device == "cpu" or not spec.roles.guests():
            return {}
        # Ray's name of a GPU's type does not tell an A100 with 40 GB from one with 80.
        gpu = self._policy_gpu or self._cluster.gpu_memory()
        return shared_engines(spec, gpu, Sizes()) if gpu else {}


def actor_class(path: str, protocol: type[Any], *, concurrent: bool) -> type[Any]:
    """A class of the same name that imports `path` (`module:Class`) in the actor's process and forwards calls to it."""
    module, _, name = path.partition(":")

    def create(self: Any, *args: Any) -> None:
        serves()
        exit_with_node()
        keep_compiled_code()
        with without_collections():
            worker_class = getattr(importlib.import_module(module), name)
        self.worker = worker_class(*args)

    forward = _forward_coroutine if concurrent else _forward
    methods = {method: forward(method) for method in dir(protocol) if not method.startswith("_")}
    return type(name, (), {"__init__": create, "__module__": module, **methods})


def _forward(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)

    call.__name__ = method
    return call


def _forward_coroutine(method: str) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker, method)(*args, **kwargs)

    call.__name__ = method
    return call
