"""The actors of a run: which class and configuration the worker in each seat has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from troupe.orchestrator.cluster.actor_class import actor_class
from troupe.orchestrator.cluster.placement import WorkerPlacements
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.plan.memory import Sizes, shared_engine
from troupe.orchestrator.roles.table import row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.workers.contract import roles
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import WorkerHealth


class RunActors:
    """Creates the actor in a seat, and ends it. A replacement has the name of the worker that it replaces."""

    def __init__(
        self,
        spec: RunSpec,
        cluster: Cluster,
        placements: WorkerPlacements,
        classes: Mapping[str, type[roles.Worker]] | None,
    ) -> None:
        """Creates nothing.

        Args:
            spec: The spec, with models that are folders.
            cluster: The cluster of the actors.
            placements: The places of the workers.
            classes: Worker classes to use instead of the classes of the table of roles, by its rows.
        """
        self.policy_gpu = 0
        """Memory of the policy's smallest GPU in bytes, as its ranks report it when they have started, or 0 if
        they have none or have not started."""
        self.served: set[str] = set()
        """Names of workers that have started before."""
        self._spec = spec
        self._cluster = cluster
        self._placements = placements
        self._classes = classes or {}
        self._workers: dict[str, ActorWorker[Any]] = {}

    def spawn(self, name: str) -> ActorWorker[Any]:
        """Creates the worker of this name in its seat."""
        placement, seat = self._placements[name]
        row, settings = row_of(self._spec, seat.role), settings_of(self._spec, seat.role)
        own = self._classes.get(row.kind)
        worker_class = own or actor_class(row.worker, row.protocol, concurrent=row.concurrent)
        config = settings.config
        if isinstance(config, RolloutConfig) and self._shared_engine is not None:
            cache, share = self._shared_engine
            engine = config.engine.model_copy(update={"gpu_memory_utilization": share})
            config = config.model_copy(update={"kv_cache_bytes": cache or None, "engine": engine})
        arguments = (config, name, *settings.extra)
        actor = ActorSpec(worker_class, arguments, settings.env, row.concurrent, settings.engine)
        worker = self._cluster.spawn(placement, seat, name, actor)
        self._workers[name] = worker
        return worker

    def record_start(self, name: str, health: WorkerHealth | None = None) -> None:
        """Records that a worker serves, and its location."""
        event = "worker_replaced" if name in self.served else "worker_started"
        self.served.add(name)
        detail = "" if health is None else f"host {health.host}, pid {health.pid}"
        self._cluster.events.record(event, worker=name, detail=detail)

    @contextmanager
    def killed_on_failure(self, name: str) -> Iterator[None]:
        """Ends a worker that does not start inside the block, so that its seat is free for another one."""
        try:
            yield
        except BaseException:
            self.kill(name)
            raise

    def kill(self, name: str) -> None:
        """Ends the process of the worker of this name immediately."""
        self._cluster.kill(self._workers[name])

    async def end(self, name: str, timeout_s: float) -> None:
        """Ends the worker of this name, if there is one, and forgets it."""
        self.served.discard(name)
        worker = self._workers.pop(name, None)
        if worker is not None:
            await self._cluster.end(worker, timeout_s)

    @cached_property
    def _shared_engine(self) -> tuple[int, float] | None:
        """KV cache in bytes of an engine on the policy's GPU and its share of it, as `troupe plan` counts them, for
        every engine alike.

        None if each engine takes the free memory, alone on its GPU, or if the memory of a GPU is unknown.
        """
        spec = self._spec.rollouts
        if spec is None or spec.device == "cpu" or spec.roles.rollout.colocate_with is None:
            return None
        # Ray's name of a GPU's type does not tell an A100 with 40 GB from one with 80.
        gpu = self.policy_gpu or self._cluster.gpu_memory()
        return shared_engine(spec, gpu, Sizes()) if gpu else None
