"""Watches the processes of workers without a call to the worker: a stopped or blocked one would not answer.

The driver inspects the processes of its node. On every other node an actor does, which answers when it has found
something. A worker that is found stopped loses its process, so that its calls fail at once and it is replaced
like any worker that has died. On request, as for `troupe why`, the same watch reports what the
processes of a node do (`orchestrator/cluster/inspection.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ray
from ray._private import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.event_loop import within
from troupe.orchestrator.cluster.inspection import InspectRequest, NodeFacts, NodeReport, inspect_node
from troupe.orchestrator.cluster.own_process import register, session_logs
from troupe.orchestrator.cluster.proc import StoppedProcesses, exit_code, kill_tree, out_of_memory_kills
from troupe.orchestrator.roles.names import role_of, section_of
from troupe.orchestrator.roles.table import named
from troupe.workers.telemetry.process_end import end_of_log, ended_by
from troupe.workers.telemetry.stacks import FOLDER as STACKS
from troupe.workers.telemetry.start_activity import read_activities

logger = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_ROUND_S = 10.0
"""Longest time until a node's actor answers. The next round includes workers started since."""
_ANSWER_S = 60.0
"""Time beyond a round in which the actor must answer. Ray finds lost nodes itself."""
_WITH_DESCENDANTS = named(lambda row: row.engine)
"""Roles whose worker cannot serve when a process that it started is stopped."""
_FETCH_S = 1.0
"""Longest wait for what a node has answered."""
_NAMED = re.compile(r"^\s*pid: (\d+)$.*^\s*ip: (\S+)$", re.MULTILINE | re.DOTALL)
"""Process and address in Ray's error about the death of an actor."""
_RUNNING = frozenset({"PENDING_CREATION", "ALIVE"})
"""States of Ray's actors whose process runs."""
_LOCATE_S = 5.0
"""Time after which the process of a worker that has not answered is looked up in Ray's table of actors."""


@dataclass(frozen=True)
class Process:
    """Node and process id of a worker."""

    node: str
    """Ray's id of the node."""
    pid: int


class WatchedProcess(Protocol):
    """A worker whose process is watched."""

    @property
    def name(self) -> str: ...

    @property
    def actor(self) -> Any: ...

    def locate(self, process: Process) -> None:
        """Records the location of its process."""
        ...

    def terminate(self, reason: str) -> None:
        """Ends the worker; its calls fail with this reason."""
        ...


class NodeWatch:
    """Inspects the processes of one node; an actor on nodes other than the driver's."""

    def __init__(self, samples: int) -> None:
        self._stopped = StoppedProcesses(samples)

    async def find_stopped(self, watched: Mapping[int, bool], seconds: float) -> list[int]:
        """Processes that are stopped, as soon as some are, else after `seconds`; they are killed."""
        for _ in range(max(1, round(seconds / _SAMPLE_S))):
            await asyncio.sleep(_SAMPLE_S)
            if found := await asyncio.to_thread(self._stopped.sample, watched):
                for pid in found:
                    kill_tree(pid)
                return found
        return []

    async def inspect(self, roots: Mapping[int, str], paths: tuple[Path, ...]) -> NodeReport:
        """Reports the activity of these workers' processes and the state of the node."""
        logs = session_logs()
        request = InspectRequest(roots, logs / STACKS, str(logs.parent), paths)
        return await asyncio.to_thread(inspect_node, request)

    async def activities(self, pids: tuple[int, ...]) -> dict[int, str]:
        """The steps of their start that these processes have announced."""
        return read_activities(session_logs() / STACKS, pids)


class ProcessWatch:
    """Watches the processes of all workers of a run."""

    def __init__(self, logs: Path, stopped_s: float, exit_code: Callable[[int], int | None] = exit_code) -> None:
        self.node: str = ray.get_runtime_context().get_node_id()
        """Ray's id of the driver's node."""
        self._logs = logs
        self._exit_code = exit_code
        self._stopped_s = stopped_s
        self._samples = max(1, round(stopped_s / _SAMPLE_S))
        self._workers: dict[Process, WatchedProcess] = {}
        self._nodes: dict[str, asyncio.Task[None]] = {}
        self._actors: dict[str, Any] = {}
        """The watch of each node but this one."""
        self._locating: set[asyncio.Task[None]] = set()
        self._kills_before = out_of_memory_kills()
        self._nodes_before = _NodeTable()

    def add(self, worker: WatchedProcess) -> None:
        """Watches a worker from when its process has started; called before any other call of the worker."""
        answer = worker.actor.__ray_call__.remote(register)  # first in the worker's queue: the next call may take long
        task = asyncio.create_task(self._locate(worker, answer), name=f"locate {worker.name}")
        self._locating.add(task)
        task.add_done_callback(self._locating.discard)

    def remove(self, worker: WatchedProcess) -> None:
        self._workers = {process: other for process, other in self._workers.items() if other is not worker}

    def close(self) -> None:
        for task in (*self._nodes.values(), *self._locating):
            task.cancel()

    def named_in(self, error: str) -> Process | None:
        """The process that an error of Ray names, if it was on this node: an actor that dies early is not located."""
        found = _NAMED.search(error)
        return Process(self.node, int(found[1])) if found and found[2] == ray.util.get_node_ip_address() else None

    def exit_reason(self, process: Process | None) -> str:
        """What is known of the end of a worker's process: the out-of-memory killer, its signal, its log, full disks."""
        words = []
        if (kills := out_of_memory_kills() - self._kills_before) > 0:
            words.append(f"the kernel's out-of-memory killer has ended {kills} process(es) on this node during the run")
        if process is not None and process.node == self.node:
            if (code := self._exit_code(process.pid)) is not None:
                words.append(ended_by(code))
            logs = self._logs.glob(f"worker-*-{process.pid}.err")
            words += [f"its log: {line}" for log in logs if (line := end_of_log(log))]
            words += ray_nodes.full_disks(self._logs)
        return "; ".join(words)

    def locations(self) -> dict[str, Process]:
        """Locations of the workers' processes, by name. May be called from any thread."""
        return {worker.name: process for process, worker in list(self._workers.items())}

    async def activities(self, names: Collection[str]) -> dict[str, str]:
        """Start-up steps of these workers, by name, without workers of a node that does not answer at once."""
        on_node: dict[str, dict[int, str]] = {}
        for name, process in self.locations().items():
            if name in names:
                on_node.setdefault(process.node, {})[process.pid] = name
        here = on_node.pop(self.node, {})
        found = {here[pid]: activity for pid, activity in read_activities(self._logs / STACKS, here).items()}

        async def ask(node: str, workers: Mapping[int, str]) -> None:
            with contextlib.suppress(RayError, TimeoutError, KeyError):
                there = await within(_FETCH_S, self._actors[node].activities.remote(tuple(workers)))
                found.update({workers[pid]: activity for pid, activity in there.items()})

        await asyncio.gather(*(ask(node, workers) for node, workers in on_node.items()))
        return found

    def inspect(self, own: Mapping[int, str], paths: tuple[Path, ...], timeout_s: float) -> list[NodeReport]:
        """Reports on the processes of all nodes and `own` processes of this one; for a thread other than the event
        loop's. A node whose watch does not answer in time is not reachable. Nodes that died before are left out."""
        roots: dict[str, dict[int, str]] = {self.node: dict(own)}
        for name, process in self.locations().items():
            roots.setdefault(process.node, {})[process.pid] = name
        actors = {node: actor for node, actor in list(self._actors.items()) if node in roots}
        asked = {node: actor.inspect.remote(roots[node], paths) for node, actor in actors.items()}
        nodes = _NodeTable()
        deadline = time.monotonic() + timeout_s
        here = inspect_node(InspectRequest(roots[self.node], self._logs / STACKS, str(self._logs.parent), paths))
        names, dead = nodes.read(deadline)
        dead -= self._nodes_before.read(deadline)[1]
        left = max(0.1, deadline - time.monotonic())
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=left) if asked else ([], [])
        reports = [here]
        for node, ref in asked.items():
            workers = tuple(roots[node].values())
            report = NodeReport(NodeFacts(names.get(node, node[:8]), reachable=False))
            with contextlib.suppress(RayError):
                report: NodeReport = ray.get(ref, timeout=_FETCH_S) if ref in done else report
            reports.append(replace(report, node=replace(report.node, workers=workers, alive=node not in dead)))
        return reports + [NodeReport(NodeFacts(names[node], False, False)) for node in dead - set(asked)]

    async def _locate(self, worker: WatchedProcess, answer: Any) -> None:
        """Watches a worker from its first answer, or from when Ray's table has its process: a stopped one is silent."""
        asked = asyncio.ensure_future(answer)
        found: list[Process] = []
        look_up = threading.Thread()
        try:
            while not found and not (await asyncio.wait({asked}, timeout=_LOCATE_S))[0]:
                if not look_up.is_alive():  # without its GCS, Ray waits for minutes
                    look_up = threading.Thread(target=_look_up, args=(worker.actor, found), daemon=True)
                    look_up.start()
            if found:
                self._begin(found[0], worker)
                await asked
            else:
                self._begin(Process(*await asked), worker)
        except RayError:
            pass  # it died; its calls report it
        finally:
            asked.cancel()

    def _begin(self, process: Process, worker: WatchedProcess) -> None:
        self._workers[process] = worker
        worker.locate(process)
        node = process.node
        if node not in self._nodes:
            self._nodes[node] = asyncio.create_task(self._watch(node), name=f"watch node {node[:8]}")

    async def _watch(self, node: str) -> None:
        """Watches one node for the length of the run."""
        here = NodeWatch(self._samples) if node == self.node else None
        there = None if here is not None else self._node_actor(node)
        while True:
            watched = {
                process.pid: section_of(role_of(worker.name)) in _WITH_DESCENDANTS
                for process, worker in self._workers.items()
                if process.node == node
            }
            if here is not None:
                found = await here.find_stopped(watched, _SAMPLE_S)
            else:
                found = await self._ask(node, there, watched)
                if found is None:  # the node's actor is gone, or does not answer
                    there = self._node_actor(node)
                    continue
            for pid in found:
                worker = self._workers.pop(Process(node, pid), None)
                if worker is not None:
                    worker.terminate(f"its process {pid} was stopped for {self._stopped_s:g} s (failures.stopped_s)")

    def _node_actor(self, node: str) -> Any:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(NodeWatch).options(num_cpus=0, scheduling_strategy=where).remote(self._samples)
        self._actors[node] = actor
        return actor

    async def _ask(self, node: str, actor: Any, watched: Mapping[int, bool]) -> list[int] | None:
        """Findings of a node's actor in a round, or None if it does not answer. Waits before the next request."""
        try:
            return await within(_ROUND_S + _ANSWER_S, actor.find_stopped.remote(watched, _ROUND_S))
        except (RayError, TimeoutError) as error:
            logger.debug("the watch of node %s failed: %s", node, error)
            await asyncio.sleep(_ROUND_S)
            return None


def _look_up(actor: Any, found: list[Process]) -> None:
    """Adds the process of an actor to `found` if Ray has started one and it has not ended."""
    try:
        entry = ray_state.actors(actor._actor_id.hex())
    except Exception as error:  # of Ray's, also while it disconnects
        logger.debug("the process of an actor was not found: %s", error)
        return
    if entry.get("State") in _RUNNING and entry["Pid"]:
        found.append(Process(entry["Address"]["NodeID"], entry["Pid"]))


class _NodeTable:
    """Ray's list of nodes, read in a thread: without its GCS, Ray waits for minutes."""

    def __init__(self) -> None:
        self._found: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            self._found.extend(ray.nodes())
        except Exception as error:  # of Ray's, also while it disconnects
            logger.debug("the nodes were not found: %s", error)

    def read(self, deadline: float) -> tuple[dict[str, str], set[str]]:
        """Names of all nodes by id, and the ids of dead ones; empty if Ray does not answer in time."""
        self._reading.join(max(0.0, deadline - time.monotonic()))
        found = list(self._found)
        names = {node["NodeID"]: f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}" for node in found}
        return names, {node["NodeID"] for node in found if not node["Alive"]}
