"""Ray actors, placement groups and object references. No other module uses them directly."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.event_loop import within
from troupe.orchestrator.cluster.inspection import NodeReport
from troupe.orchestrator.cluster.links import ActorEngines, ActorEnvironments, ActorJudges, ActorReferences, submit
from troupe.orchestrator.cluster.proc import exit_code
from troupe.orchestrator.cluster.process_watch import Process, ProcessWatch
from troupe.orchestrator.cluster.ray_environment import TABLE_SETTINGS, cluster_to_join
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.cluster.worker_server import WorkerServer
from troupe.orchestrator.errors import (
    DataLost,
    DoesNotFit,
    JudgeLost,
    NeverFits,
    UpdateDamaged,
    WorkerDied,
    WorkerError,
    WorkerRaised,
    WorkerTimeout,
)
from troupe.orchestrator.plan.placement import Node, Placement, WorkerPlacement, fit, impossible, misfit
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.metrics import PeakMemory
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.workers.contract.config import EngineProcess
from troupe.workers.contract.judges import JudgeGone
from troupe.workers.contract.messages import (
    GroupRequest,
    GroupSummary,
    ScoredGroups,
    WeightsDamaged,
    WeightUpdate,
    WorkerGone,
)
from troupe.workers.contract.roles import (
    EnvironmentServer,
    JudgeEngine,
    ReferenceSampler,
    Reply,
    RolloutEngine,
    TableRef,
    Worker,
)
from troupe.workers.preload import forked_worker
from troupe.workers.preload.forked_worker import ENGINE_VARIABLE, SERVER_VARIABLE

logger = logging.getLogger(__name__)

_ROOM_TIMEOUT_S = 60.0
"""Longest wait for resources in a cluster that does not grow."""
_LOOK_S = 1.0
"""Time between two looks at the nodes."""
_ASYNC_CALLS = 100_000
"""Concurrent calls of an asynchronous actor; the engine pool enforces the effective limit."""


P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", bound=Worker, covariant=True)


class ActorWorker(Generic[W_co]):
    """A worker that is a Ray actor: the `WorkerHandle` of a run."""

    def __init__(
        self,
        name: str,
        actor: Any,
        peaks: PeakMemory,
        calls: CallLog,
        watch: ProcessWatch | None = None,
        on_loss: Callable[[str, str], None] = lambda worker, detail: None,
    ) -> None:
        """A worker that runs. `on_loss`: called once with its name and the reason when its process is gone."""
        self._name = name
        self.actor = actor
        self._peaks = peaks
        self._calls = calls
        self._watch = watch
        self._on_loss = on_loss
        self._process: Process | None = None
        self._terminated = ""
        self._ended = False
        """Whether the process was ended on purpose, or its loss was reported."""

    @property
    def name(self) -> str:
        return self._name

    async def call(
        self, method: Callable[Concatenate[W_co, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._wait(submit(self.actor, method, *args, **kwargs), method.__name__, timeout_s, args)

    async def call_for_table(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, TableRef]]],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, TableRef]:
        name = method.__name__
        summary, table = getattr(self.actor, name).options(num_returns=2).remote(*args, **kwargs)
        return await self._wait(summary, name, timeout_s, args), table

    async def call_for_tables(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, *tuple[TableRef, ...]]]],
        tables: int,
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, list[TableRef]]:
        name = method.__name__
        summary, *found = getattr(self.actor, name).options(num_returns=1 + tables).remote(*args, **kwargs)
        return await self._wait(summary, name, timeout_s, args), found

    def kill(self) -> None:
        self._ended = True
        if ray.is_initialized():  # after a disconnection, Ray would start a cluster for the call
            ray.kill(self.actor, no_restart=True)

    def locate(self, process: Process) -> None:
        self._process = process

    def terminate(self, reason: str) -> None:
        self._terminated = reason
        self.kill()
        self._on_loss(self._name, reason)

    async def _wait(self, ref: Any, method: str, timeout_s: float, args: Sequence[object]) -> Any:
        """Awaits a result; records the call, and the peak memory in the result. Raises WorkerError."""
        call = self._calls.begin(self._name, method, timeout_s, _subject(args[0]) if args else "")
        try:
            answer = await within(timeout_s, ref)
        except BaseException as error:
            failure = self._failure(error, method, timeout_s)
            self._calls.end(call, type(failure).__name__)
            if failure is error:
                raise
            raise failure from (None if isinstance(error, TimeoutError) else error)
        self._calls.end(call, detail=_subject(answer))
        self._peaks.note(self._name, answer)
        return answer

    def _failure(self, error: BaseException, method: str, timeout_s: float) -> BaseException:
        """The WorkerError for an error of Ray; any other error as it is."""
        if isinstance(error, TimeoutError):
            return WorkerTimeout(self._name, method, f"no answer in {timeout_s:g} s")
        if isinstance(error, RayTaskError):
            cause, reason = error.cause, ray_nodes.one_line(error.cause)
            if isinstance(cause, WorkerGone):
                return WorkerDied(self._name, method, reason, cause.fault)
            return _kind(cause)(self._name, method, reason)
        if isinstance(error, RayActorError):
            detail = self._terminated or self._death(error)
            if not self._ended:
                self._ended = True
                self._on_loss(self._name, detail)
            return WorkerDied(self._name, method, detail)
        if isinstance(error, RayError):
            return _kind(error)(self._name, method, ray_nodes.one_line(error))
        return error

    def _death(self, error: RayActorError) -> str:
        """Ray's reason for the actor's death, with the node's findings."""
        watch = self._watch
        words = "" if watch is None else watch.exit_reason(self._process or watch.named_in(str(error)))
        return f"{_reason(error)}{words and f' ({words})'}"


async def _run_on_node(
    node_id: str, env: dict[str, str], function: Callable[..., R], timeout_s: float, args: Sequence[object], name: str
) -> R:
    """The result of a function that a process on this node computes; `name` stands in its errors."""
    options: dict[str, Any] = {"runtime_env": {"env_vars": env}} if env else {}
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where, **options)
    done = task.remote(*args)
    try:
        return await within(timeout_s, done)
    except TimeoutError:
        ray.cancel(done, force=True)
        raise WorkerTimeout(name, function.__name__, f"not done in {timeout_s:g} s") from None
    except RayTaskError as error:
        raise WorkerRaised(name, function.__name__, ray_nodes.one_line(error.cause)) from error
    except RayError as error:
        raise WorkerDied(name, function.__name__, ray_nodes.one_line(error)) from error


_ABOUT_GROUPS = frozenset({GroupRequest, GroupSummary, ScoredGroups})


def _actors(workers: Sequence[WorkerHandle[Any]]) -> dict[str, Any]:
    """Ray's handles of workers by name."""
    return {worker.name: worker.actor for worker in workers if isinstance(worker, ActorWorker)}


def _subject(value: object) -> str:
    """Subject of a call with this first argument or result, or empty if it has none."""
    kind = type(value)  # by type, as this runs twice for each of thousands of calls a second
    if kind in _ABOUT_GROUPS:
        return cast("GroupRequest | GroupSummary | ScoredGroups", value).prompt_uid
    return f"version {cast('WeightUpdate', value).version}" if kind is WeightUpdate else ""


def _kind(cause: BaseException) -> type[WorkerError]:
    """The class of error with which a call fails for this cause."""
    if isinstance(cause, JudgeGone):
        return JudgeLost
    if isinstance(cause, WeightsDamaged):
        return UpdateDamaged
    return DataLost if isinstance(cause, ObjectLostError) else WorkerRaised


@dataclass(frozen=True)
class ActorSpec:
    """Class, constructor arguments and environment of one worker's process."""

    worker_class: type
    args: tuple[Any, ...]
    env: dict[str, str]
    concurrent: bool = False
    """Whether the class is asynchronous and serves calls concurrently."""
    engine: EngineProcess | None = None
    """The engine in its process, or None without one on the CPU."""


@dataclass(frozen=True)
class _Reservation:
    placement: Placement
    group: PlacementGroup
    preferred_node: str
    """Id of the node requested for it; empty if Ray chose."""


class Cluster:
    """Connection to a Ray cluster: reserves resources, starts workers, and releases both at the end."""

    def __init__(self, *, owned: bool, session: Path, server: WorkerServer | None = None) -> None:
        self._owned = owned
        self._server = server
        self.logs = session / "logs"
        """Folder of the workers' own logs, on this node."""
        self.peaks = PeakMemory()
        self.calls = CallLog()
        """Every call to a worker."""
        self.events = EventLog()
        """Events of workers and of the run."""
        self._reserved: dict[str, _Reservation] = {}
        self._actors: list[ActorWorker[Any]] = []
        self._watch: ProcessWatch | None = None
        self._prepared: set[str] = set()
        """Ids of the nodes that `prepare_nodes` has prepared."""

    @classmethod
    def connect(
        cls, needed: dict[str, float], address: str | None = None, server: WorkerServer | None = None
    ) -> Cluster:
        """Joins the cluster at `address` (or RAY_ADDRESS), or the one that this program is connected to, which
        stays; else starts one on this machine with at least the CPUs that are needed, so that roles share cores.
        Raises ClusterUnreachable. `server`: forks the workers of a cluster that is started here, and is closed
        with it. In another cluster Ray starts them: with their node's environment, and not below this process,
        whose tree a job of Ray ends."""
        started = False
        try:
            if (connected := ray_nodes.connected()) is not None:
                session = connected
            elif (joined := cluster_to_join(address)) is not None:
                session = ray_nodes.join(joined)
            else:
                session = ray_nodes.start(max(os.cpu_count() or 1, int(-(-needed["CPU"] // 1))))
                started = True
        finally:
            if server is not None and not started:
                server.close()
        return cls(owned=started, session=session, server=server if started else None)

    def capacity(self) -> dict[str, float]:
        """CPUs and GPUs of all nodes; for a cluster started for this run, the machine's cores."""
        nodes = ray_nodes.nodes()
        cpus = float(os.cpu_count() or 1) if self._owned else sum(node.cpus for node in nodes)
        return {"CPU": cpus, "GPU": sum(node.gpus for node in nodes)}

    def watch(self, stopped_s: float) -> None:
        """From now on, ends workers whose process is stopped for so many seconds (SIGSTOP, a frozen container)."""
        code = exit_code if self._server is None else self._server.exit_code
        self._watch = ProcessWatch(self.logs, stopped_s, code)

    @property
    def node(self) -> str:
        return "" if self._watch is None else self._watch.node

    def gpu_memory(self) -> int:
        """Memory of the smallest GPU of the cluster, in bytes, or 0 if no type of GPU is known."""
        return min((node.gpu_memory for node in ray_nodes.nodes() if node.gpu_memory), default=0)

    def gpu_type(self) -> str:
        """Type of the cluster's GPUs, or empty if unknown or if there are several."""
        types = {node.gpu_type for node in ray_nodes.nodes() if node.gpus}
        return types.pop() if len(types) == 1 else ""

    def locations(self) -> dict[str, Process]:
        return {} if self._watch is None else self._watch.locations()

    def exit_reason(self, process: Process | None) -> str:
        return "" if self._watch is None else self._watch.exit_reason(process)

    async def activities(self, names: Collection[str]) -> dict[str, str]:
        return {} if self._watch is None else await self._watch.activities(names)

    def inspect(self, own: Mapping[int, str], paths: tuple[Path, ...], timeout_s: float) -> list[NodeReport]:
        return [] if self._watch is None else self._watch.inspect(own, paths, timeout_s)

    @staticmethod
    def put(table: Any) -> TableRef:
        """Places a table in the object store and returns its reference."""
        return ray.put(table)

    @staticmethod
    async def get(table: TableRef, timeout_s: float) -> Any:
        """The table behind a reference. Raises TimeoutError."""
        return await within(timeout_s, table)

    @staticmethod
    def link(engines: Sequence[WorkerHandle[RolloutEngine]], ranks_per_engine: int, timeout_s: float) -> ActorEngines:
        """The trainer's link to rollout engines, for transfers from GPU to GPU."""
        return ActorEngines([e.actor for e in engines if isinstance(e, ActorWorker)], ranks_per_engine, timeout_s)

    @staticmethod
    def environment_link(workers: Sequence[WorkerHandle[EnvironmentServer]], lost: str) -> ActorEnvironments:
        """The engines' link to environment workers; `lost`: why none will serve again, or empty."""
        return ActorEnvironments(_actors(workers), lost)

    @staticmethod
    def judge_link(name: str, workers: Sequence[WorkerHandle[JudgeEngine]], lost: str) -> ActorJudges:
        """The reward workers' link to judge workers; `name`: the model and its settings."""
        return ActorJudges(name, _actors(workers), lost)

    @staticmethod
    def reference_link(
        workers: Sequence[WorkerHandle[ReferenceSampler]], timeout_s: float, lost: str
    ) -> ActorReferences:
        """The rollout engines' link to the engines of the reference."""
        return ActorReferences(_actors(workers), timeout_s, lost)

    async def prepare_nodes(
        self, function: Callable[P, object], timeout_s: float, *args: P.args, **_: P.kwargs
    ) -> None:
        """Calls a function in a process on every live node but this one, once per node. Raises WorkerError."""
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray_nodes.nodes() if node.id not in self._prepared | {here}]

        async def prepare(node: Node) -> None:
            name = f"node {node.name}"
            with self.calls.during(name, function.__name__, timeout_s):
                await _run_on_node(node.id, {}, function, timeout_s, args, name)
            self._prepared.add(node.id)

        await asyncio.gather(*map(prepare, nodes))

    async def run_beside(
        self,
        placement: Placement,
        placed: WorkerPlacement,
        env: dict[str, str],
        function: Callable[..., R],
        timeout_s: float,
        *args: object,
    ) -> R:
        """Calls a function in a separate process on the node of a worker; it reserves nothing itself. Raises
        WorkerError if it failed, or did not end in time. `args`: arguments; references to tables become tables."""
        nodes = placement_group_table(self._reserved[placement.name].group)["bundles_to_node_id"]
        name = function.__name__
        env = TABLE_SETTINGS | env
        with self.calls.during(name, name, timeout_s):
            return await _run_on_node(nodes[placed.bundle], env, function, timeout_s, args, name)

    async def refuse_impossible(self, placements: Sequence[Placement], say: Callable[[str], object]) -> None:
        """Raises NeverFits if the nodes cannot hold these placement groups, not even without anything else on them,
        and no autoscaler adds nodes. Nodes that join within `_ROOM_TIMEOUT_S` count; `say` gets why it waits."""
        deadline = time.monotonic() + (0.0 if self._owned else _ROOM_TIMEOUT_S)
        told = ""
        while problem := impossible(placements, ray_nodes.nodes()):
            if time.monotonic() >= deadline:
                if self._owned or ray_nodes.fixed():
                    raise NeverFits(f"{problem}; see `troupe plan`")
                return
            if problem != told:
                say(f"waiting for nodes: {problem}")
            told = problem
            await asyncio.sleep(_LOOK_S)

    async def reserve(self, placements: Sequence[Placement], timeout_s: float) -> None:
        """Reserves every placement group, waiting for resources for at most `timeout_s` seconds in total. In a cluster
        started by the run, the wait is at most `_ROOM_TIMEOUT_S`. Raises DoesNotFit if a group could not be
        reserved in time; the message lists requested and free resources."""
        limit_s = min(timeout_s, _ROOM_TIMEOUT_S) if self._owned else timeout_s
        deadline = time.monotonic() + limit_s
        for placement in placements:
            group = self._reserve(placement)
            left_s = max(0.1, deadline - time.monotonic())
            try:
                with self.calls.during("cluster", self.reserve.__name__, left_s, placement.name):
                    await asyncio.wait_for(group.ready(), left_s)
            except TimeoutError:
                self.release(placement.name)
                raise DoesNotFit(misfit(placement, placements, ray_nodes.free(), limit_s)) from None

    def _reserve(self, placement: Placement) -> PlacementGroup:
        """Requests a placement group. Ray spreads the bundles of a group; we spread groups of a single bundle."""
        single = placement.strategy == "SPREAD" and len(placement.bundles) == 1
        preferred_node = self._emptiest(placement) if single else ""
        group = placement_group(
            [{kind: size for kind, size in bundle.items() if size > 0} for bundle in placement.bundles],
            # Ray accepts a target node only with STRICT_PACK; for a single bundle all strategies are equivalent.
            strategy="STRICT_PACK" if preferred_node else placement.strategy,
            name=placement.name,
            bundle_label_selector=[dict(placement.labels)] * len(placement.bundles),
            _soft_target_node_id=preferred_node or None,
        )
        self._reserved[placement.name] = _Reservation(placement, group, preferred_node)
        return group

    def _emptiest(self, placement: Placement) -> str:
        """Id of the node that `troupe plan` would choose among nodes with room now, or empty if there is none."""
        free = ray_nodes.free()
        names = {node.id: node.name for node in free}
        occupied: Counter[tuple[str, str]] = Counter()
        for other in self._reserved.values():
            if other.placement.role == placement.role:
                node_id = placement_group_table(other.group).get("bundles_to_node_id", {}).get(0, "")
                if name := names.get(node_id) or names.get(other.preferred_node):
                    occupied[placement.role, name] += 1
        chosen = fit([placement], free, occupied).node_of.get((placement.name, 0))
        return next((node.id for node in free if node.name == chosen), "")

    def spawn(self, placement: Placement, placed: WorkerPlacement, name: str, spec: ActorSpec) -> ActorWorker[Any]:
        """Creates one worker in its placement; only its constructor runs, `start` loads the model."""
        options: dict[str, Any] = {
            "num_cpus": placed.cpus,
            "num_gpus": 0 if placed.borrows else placed.gpus,
            "max_restarts": 0,
            "runtime_env": self._process(placement, placed, spec),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reserved[placement.name].group, placement_group_bundle_index=placed.bundle
            ),
        }
        if spec.concurrent:
            options["max_concurrency"] = _ASYNC_CALLS
        actor = ray.remote(spec.worker_class).options(**options).remote(*spec.args)

        def lost(worker: str, detail: str) -> None:
            self.events.record("worker_lost", worker=worker, detail=detail)

        worker: ActorWorker[Any] = ActorWorker(name, actor, self.peaks, self.calls, self._watch, lost)
        self._actors.append(worker)
        if self._watch is not None:
            self._watch.add(worker)
        return worker

    def _process(self, placement: Placement, placed: WorkerPlacement, spec: ActorSpec) -> dict[str, Any]:
        """Ray's settings of a worker's process, which is a fork of the server if one has its engine."""
        settings, engine, server = TABLE_SETTINGS | spec.env, spec.engine, self._server
        if (
            server is not None
            and not placed.gpus
            and engine in (None, server.engine)
            and self._is_here(placement, placed)
        ):
            settings |= {SERVER_VARIABLE: server.path, ENGINE_VARIABLE: engine.model_dump_json() if engine else ""}
            return {"env_vars": settings, "py_executable": shlex.join([sys.executable, forked_worker.__file__])}
        return {"env_vars": settings}

    def _is_here(self, placement: Placement, placed: WorkerPlacement) -> bool:
        """Whether a worker is placed on this node."""
        nodes = placement_group_table(self._reserved[placement.name].group)["bundles_to_node_id"]
        return nodes[placed.bundle] == ray.get_runtime_context().get_node_id()

    async def end(self, worker: ActorWorker[Any], timeout_s: float) -> None:
        """Asks a worker to close, then ends its process."""
        try:
            await worker.call(Worker.close, timeout_s)
        except WorkerError as error:
            logger.debug("closing a worker failed: %s", error)
        self.kill(worker)

    def kill(self, worker: ActorWorker[Any]) -> None:
        worker.kill()
        if self._watch is not None:
            self._watch.remove(worker)
        if worker in self._actors:
            self._actors.remove(worker)

    def release(self, placement: str) -> None:
        """Releases the placement group of this name; workers that still run in it are killed."""
        reservation = self._reserved.pop(placement, None)
        if reservation is not None:
            remove_placement_group(reservation.group)

    async def close(self, timeout_s: float) -> None:
        """Closes and ends every worker, releases the placement groups, and stops Ray if the run started it."""
        await asyncio.gather(*(self.end(worker, timeout_s) for worker in list(self._actors)))
        self.abandon()

    def abandon(self) -> None:
        """Kills every worker without closing it, releases the placement groups, and stops Ray if the run started it."""
        if self._watch is not None:
            self._watch.close()
        for worker in self._actors:
            worker.kill()
        for reservation in self._reserved.values():
            remove_placement_group(reservation.group)
        self._actors, self._reserved = [], {}
        if self._owned:
            ray.shutdown()
        if self._server is not None:
            self._server.close()
            self._server = None


def _reason(error: RayActorError) -> str:
    """The line with the cause: the last one if a constructor raised, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]
