"""Ray's actors, placement groups and object references: the only file that knows them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator import ray_nodes
from orchestrator.deadlines import within
from orchestrator.errors import DataLost, DoesNotFit, WorkerDied, WorkerError, WorkerRaised, WorkerTimeout
from orchestrator.handles import TableRef, WorkerHandle
from orchestrator.peak_memory import PeakMemory
from orchestrator.placement import Node, Placement, Seat, fit, misfit
from workers.messages import WorkerGone

log = logging.getLogger(__name__)

_OWN_ROOM_TIMEOUT_S = 60.0
"""Wait for room in a cluster of our own: it does not grow."""
_ASYNC_CALLS = 100_000
"""Calls an asynchronous actor may hold; the engine pool keeps the bound that matters."""


class ActorWorker:
    """A worker that is a Ray actor."""

    def __init__(self, name: str, actor: Any, peaks: PeakMemory) -> None:
        """`peaks`: where it is noted what the worker's answers say of its memory."""
        self._name = name
        self.actor = actor
        self._peaks = peaks

    @property
    def name(self) -> str:
        """Role and index, as in `rollout-0`."""
        return self._name

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run a method and wait for its result, at most `timeout_s` seconds."""
        return await self._wait(getattr(self.actor, method).remote(*args), method, timeout_s)

    async def call_for_table(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, TableRef]:
        """Run a method that returns (summary, table); only the summary is fetched."""
        summary, table = getattr(self.actor, method).options(num_returns=2).remote(*args)
        return await self._wait(summary, method, timeout_s), table

    def kill(self) -> None:
        """End the actor's process at once; harmless when it is gone already."""
        ray.kill(self.actor, no_restart=True)

    async def _wait(self, ref: Any, method: str, timeout_s: float) -> Any:
        try:
            answer = await within(timeout_s, ref)
        except TimeoutError:
            raise WorkerTimeout(self._name, method, f"no answer in {timeout_s:g} s") from None
        except RayTaskError as error:
            raise _kind(error.cause)(self._name, method, ray_nodes.one_line(error.cause)) from error
        except RayActorError as error:
            raise WorkerDied(self._name, method, _reason(error)) from error
        except RayError as error:
            raise _kind(error)(self._name, method, ray_nodes.one_line(error)) from error
        self._peaks.note(self._name, answer)
        return answer


def _kind(cause: BaseException) -> type[WorkerError]:
    if isinstance(cause, WorkerGone):
        return WorkerDied
    return DataLost if isinstance(cause, ObjectLostError) else WorkerRaised


class ActorLink:
    """vLLM's weight-sync client over rollout actors; travels into the trainer, which drives it from its sender.

    Engines follow one another in the transfer group, each with as many ranks as it has processes.
    """

    def __init__(self, engines: Sequence[ActorWorker], ranks_per_engine: int, timeout_s: float) -> None:
        self._actors = [engine.actor for engine in engines]
        self._ranks = ranks_per_engine
        self._timeout_s = timeout_s
        self.version = 0
        """Served from the next `finish_weight_update` on."""

    @property
    def processes(self) -> int:
        """Engine processes that take part."""
        return len(self._actors) * self._ranks

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every engine join, each at its own place in the group."""
        first = init_info.get("rank_offset")
        self._all(
            actor.transfer_init.remote(
                init_info if first is None else {**init_info, "rank_offset": first + number * self._ranks}
            )
            for number, actor in enumerate(self._actors)
        )

    def start_weight_update(self) -> None:
        """Freeze every engine."""
        self._all(actor.transfer_start.remote() for actor in self._actors)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights on every engine."""
        self._all(actor.transfer_receive.remote(update_info) for actor in self._actors)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new version."""
        self._all(actor.transfer_finish.remote(self.version) for actor in self._actors)

    def _all(self, calls: Iterable[Any]) -> None:
        ray.get(list(calls), timeout=self._timeout_s)


@dataclass(frozen=True)
class ActorSpec:
    """How one worker's process is made."""

    worker_class: type
    args: tuple[Any, ...]
    env: dict[str, str]
    concurrent: bool = False
    """The class is asynchronous and takes calls side by side."""


@dataclass(frozen=True)
class _Reservation:
    """A placement group of ours."""

    placement: Placement
    group: PlacementGroup
    wish: str
    """Id of the node it was to lie on; empty: Ray chose."""


class Cluster:
    """Our hold on a Ray cluster: what we reserved and started in it, and the end of all that."""

    def __init__(self, *, owned: bool, session: Path) -> None:
        self._owned = owned
        self.logs = session / "logs"
        """Folder of the workers' own logs, on this node."""
        self.peaks = PeakMemory()
        self._reserved: dict[str, _Reservation] = {}
        self._actors: list[ActorWorker] = []

    @classmethod
    def connect(cls, needed: dict[str, float], address: str | None = None) -> Cluster:
        """Join the cluster at `address` (or RAY_ADDRESS), else start one on this machine.

        A local cluster offers at least the CPUs that are asked for: on a laptop, roles take turns on the same cores.
        Raises ClusterUnreachable.
        """
        joined = address or os.environ.get("RAY_ADDRESS")
        if joined:
            session = ray_nodes.join(joined)
        else:
            session = ray_nodes.start(max(os.cpu_count() or 1, int(-(-needed["CPU"] // 1))))
        return cls(owned=not joined, session=session)

    @classmethod
    def look(cls, address: str) -> list[Node]:
        """Nodes of a running cluster; nothing is reserved or started. Raises ClusterUnreachable."""
        ray_nodes.join(address)
        try:
            return ray_nodes.nodes()
        finally:
            ray.shutdown()

    @staticmethod
    def put(table: Any) -> TableRef:
        """Place a table in the object store."""
        return ray.put(table)

    @staticmethod
    def link(engines: Sequence[WorkerHandle], ranks_per_engine: int, timeout_s: float) -> ActorLink:
        """The trainer's link to rollout engines, for transfers from GPU to GPU."""
        return ActorLink([e for e in engines if isinstance(e, ActorWorker)], ranks_per_engine, timeout_s)

    async def reserve(self, placements: Sequence[Placement], timeout_s: float) -> None:
        """Reserve every placement group, within the bound.

        Raises DoesNotFit with what was asked and what there is.
        """
        bound = min(timeout_s, _OWN_ROOM_TIMEOUT_S) if self._owned else timeout_s
        deadline = time.monotonic() + bound
        for placement in placements:
            group = self._reserve(placement)
            try:
                await asyncio.wait_for(group.ready(), max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                self.give_back(placement.name)
                raise DoesNotFit(misfit(placement, placements, ray_nodes.free(), bound)) from None

    def _reserve(self, placement: Placement) -> PlacementGroup:
        """Ask for a placement group. One of several bundles is spread by Ray, one of a single bundle by us."""
        alone = placement.strategy == "SPREAD" and len(placement.bundles) == 1
        wish = self._emptiest(placement) if alone else ""
        group = placement_group(
            [{kind: size for kind, size in bundle.items() if size > 0} for bundle in placement.bundles],
            # Ray takes a wish with this strategy only; for a single bundle all of them are one.
            strategy="STRICT_PACK" if wish else placement.strategy,
            name=placement.name,
            bundle_label_selector=[dict(placement.labels)] * len(placement.bundles),
            _soft_target_node_id=wish or None,
        )
        self._reserved[placement.name] = _Reservation(placement, group, wish)
        return group

    def _emptiest(self, placement: Placement) -> str:
        """Id of the node that `troupe plan` would choose among those that have room now; empty where none has."""
        free = ray_nodes.free()
        names = {node.id: node.name for node in free}
        sitting: Counter[tuple[str, str]] = Counter()
        for other in self._reserved.values():
            if other.placement.role == placement.role:
                lies = placement_group_table(other.group).get("bundles_to_node_id", {}).get(0, "")
                if name := names.get(lies) or names.get(other.wish):
                    sitting[placement.role, name] += 1
        chosen = fit([placement], free, sitting).node_of.get((placement.name, 0))
        return next((node.id for node in free if node.name == chosen), "")

    def spawn(self, placement: Placement, seat: Seat, name: str, spec: ActorSpec) -> ActorWorker:
        """Start one worker in its seat (its constructor runs; nothing heavy does)."""
        options: dict[str, Any] = {
            "num_cpus": seat.cpus,
            "num_gpus": seat.gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": ray_nodes.OWN_TABLES | spec.env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reserved[placement.name].group, placement_group_bundle_index=seat.bundle
            ),
        }
        if spec.concurrent:
            options["max_concurrency"] = _ASYNC_CALLS
        actor = ray.remote(spec.worker_class).options(**options).remote(*spec.args)
        worker = ActorWorker(name, actor, self.peaks)
        self._actors.append(worker)
        return worker

    async def end(self, worker: ActorWorker, timeout_s: float) -> None:
        """Ask a worker to close, then end its process."""
        try:
            await worker.call("close", timeout_s=timeout_s)
        except WorkerError as error:
            log.debug("closing: %s", error)
        worker.kill()
        if worker in self._actors:
            self._actors.remove(worker)

    def give_back(self, placement: str) -> None:
        """Let others have the place reserved under this name; whoever still sits there is ended."""
        reservation = self._reserved.pop(placement, None)
        if reservation is not None:
            remove_placement_group(reservation.group)

    async def close(self, timeout_s: float) -> None:
        """End every worker in good order; give back the placements; stop Ray if we started it."""
        await asyncio.gather(*(self.end(worker, timeout_s) for worker in list(self._actors)))
        self.abandon()

    def abandon(self) -> None:
        """End every process at once, without asking."""
        for worker in self._actors:
            worker.kill()
        for reservation in self._reserved.values():
            remove_placement_group(reservation.group)
        self._actors, self._reserved = [], {}
        if self._owned:
            ray.shutdown()


def _reason(error: RayActorError) -> str:
    """The line that says why: the last one where a constructor raised, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]
