"""Ray: the only file that knows actors, placement groups and object references."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.errors import (
    ClusterUnreachable,
    DataLost,
    DoesNotFit,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from orchestrator.handles import TableRef, WorkerHandle
from orchestrator.peak_memory import PeakMemory
from orchestrator.placement import GPU_GIB, Node, Placement, Seat
from workers.messages import WorkerGone

log = logging.getLogger(__name__)

_INIT: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "namespace": "troupe"}
_CONNECT_TIMEOUT_S = 10.0
_OWN_ROOM_TIMEOUT_S = 60.0
"""Wait for room in a cluster of our own: it does not grow."""
_SLOW_START = "timed out during startup"
"""Ray gives its processes 30 s, and cannot be told to give them more."""
_LONGEST_REASON = 1000
_ASYNC_CALLS = 100_000
"""Calls an asynchronous actor may hold; the engine pool keeps the bound that matters."""
_GPU_TYPE = "accelerator_type:"
"""What Ray calls the resource that names a node's GPUs."""


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
            answer = await asyncio.wait_for(ref, timeout_s)
        except TimeoutError:
            raise WorkerTimeout(self._name, method, f"no answer in {timeout_s:g} s") from None
        except RayTaskError as error:
            raise _kind(error.cause)(self._name, method, _one_line(error.cause)) from error
        except RayActorError as error:
            raise WorkerDied(self._name, method, _reason(error)) from error
        except RayError as error:
            raise _kind(error)(self._name, method, _one_line(error)) from error
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


class Cluster:
    """Our hold on a Ray cluster: what we reserved and started in it, and the end of all that."""

    def __init__(self, *, owned: bool, session_dir: str) -> None:
        self._owned = owned
        self.logs = Path(session_dir) / "logs"
        """Folder of the workers' own logs, on this node."""
        self.peaks = PeakMemory()
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: list[ActorWorker] = []

    @classmethod
    def connect(cls, needed: dict[str, float], address: str | None = None) -> Cluster:
        """Join the cluster at `address` (or RAY_ADDRESS), else start one on this machine.

        A local cluster offers at least the CPUs that are asked for: on a laptop, roles take turns on the same cores.
        Ray's token authentication (its default for local clusters) guards the ports it listens on.
        Raises ClusterUnreachable.
        """
        # A failed call is raised where its summary is awaited; the table's own copy of the error is no news.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        # Ray lowers the priority of its workers; here they are the ones who do the work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Nor are workers started ahead: each of ours has an environment, and gets a process of its own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        joined = address or os.environ.get("RAY_ADDRESS")
        if joined:
            context: Any = _join(joined)
        else:
            cpus = max(os.cpu_count() or 1, int(-(-needed["CPU"] // 1)))
            context = _start(cpus)
            _protect_token()
        return cls(owned=not joined, session_dir=context.address_info["session_dir"])

    @staticmethod
    def nodes() -> list[Node]:
        """Live nodes with their total resources."""
        return [_node(n, n["Resources"]) for n in ray.nodes() if n["Alive"]]

    @staticmethod
    def free() -> list[Node]:
        """Live nodes with what nobody has reserved."""
        free = available_resources_per_node()
        return [_node(n, free.get(n["NodeID"], {})) for n in ray.nodes() if n["Alive"]]

    @classmethod
    def look(cls, address: str) -> list[Node]:
        """Nodes of a running cluster; nothing is reserved or started. Raises ClusterUnreachable."""
        _join(address)
        try:
            return cls.nodes()
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
            bundles = [{k: v for k, v in bundle.items() if v > 0} for bundle in placement.bundles]
            labels = [dict(placement.labels)] * len(bundles)
            group = placement_group(
                bundles, strategy=placement.strategy, name=placement.name, bundle_label_selector=labels
            )
            self._groups[placement.name] = group
            ready = group.ready()
            try:
                await asyncio.wait_for(ready, max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                self.give_back(placement.name)
                raise DoesNotFit(_misfit(placement, placements, self.free(), bound)) from None

    def spawn(self, placement: Placement, seat: Seat, name: str, spec: ActorSpec) -> ActorWorker:
        """Start one worker in its seat (its constructor runs; nothing heavy does)."""
        options: dict[str, Any] = {
            "num_cpus": seat.cpus,
            "num_gpus": seat.gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": spec.env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[placement.name], placement_group_bundle_index=seat.bundle
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
        group = self._groups.pop(placement, None)
        if group is not None:
            remove_placement_group(group)

    async def close(self, timeout_s: float) -> None:
        """End every worker in good order; give back the placements; stop Ray if we started it."""
        await asyncio.gather(*(self.end(worker, timeout_s) for worker in list(self._actors)))
        self.abandon()

    def abandon(self) -> None:
        """End every process at once, without asking."""
        for worker in self._actors:
            worker.kill()
        for group in self._groups.values():
            remove_placement_group(group)
        self._actors, self._groups = [], {}
        if self._owned:
            ray.shutdown()


def _start(cpus: int, tries: int = 3) -> Any:
    """Start a cluster of our own on this machine."""
    try:
        return ray.init(num_cpus=cpus, include_dashboard=False, **_INIT)
    except Exception as error:  # Ray raises a bare Exception where one of its processes does not come up
        if _SLOW_START in str(error) and tries > 1:
            log.warning("Ray did not come up within its own bound, the machine is busy: once more")
            ray.shutdown()
            return _start(cpus, tries - 1)
        raise ClusterUnreachable(f"Ray could not be started on this machine: {_one_line(error)}") from error


def _node(node: dict[str, Any], resources: dict[str, float]) -> Node:
    """A live node as Ray tells it, with all of its resources or those that are free; of a GPU it tells the type."""
    kinds = (key.removeprefix(_GPU_TYPE) for key in resources if key.startswith(_GPU_TYPE))
    gpu = max((GPU_GIB.get(kind, 0.0) for kind in kinds), default=0.0)
    host = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return Node(node["NodeManagerAddress"], cpus, gpus, int(host), int(gpu * 2**30), node["Labels"])


def _join(address: str) -> Any:
    """Connect to a running cluster."""
    host, colon, port = address.rpartition(":")
    if "//" in address or (colon and not port.isdecimal()):
        raise ClusterUnreachable(f"--address {address}: expected HOST:PORT of a Ray head, or auto")
    try:
        if colon:  # Ray itself would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        return ray.init(address=address, **_INIT)
    except (OSError, ValueError, RuntimeError, RayError) as error:
        raise ClusterUnreachable(f"--address {address}: no Ray cluster to join: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)


def _reason(error: RayActorError) -> str:
    """The line that says why: the last one where a constructor raised, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def _misfit(placement: Placement, placements: Sequence[Placement], free: Sequence[Node], timeout_s: float) -> str:
    roles = Counter((seat.role, seat.cpus, seat.gpus) for placement in placements for seat in placement.seats)
    wanted = ", ".join(f"{n} {role} of {cpus:g} CPU {gpus:g} GPU" for (role, cpus, gpus), n in roles.items())
    there = ", ".join(f"{node.name}: {node.cpus:g} CPU {node.gpus:g} GPU" for node in free)
    return (
        f"no room for {placement.name} within {timeout_s:g} s: it asks for {placement.request}; "
        f"asked for together: {wanted}; "
        f"free now: {there or 'no node'}; see `troupe plan`"
    )


def _protect_token() -> None:
    """Ray writes its token file readable by all; only the owner needs it."""
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if token.is_file():
        token.chmod(0o600)
