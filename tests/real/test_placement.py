"""Ray places reservations as planned, on a cluster of two nodes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.real.cluster_demo import free_port, node
from troupe.orchestrator.cluster import ray_nodes
from troupe.orchestrator.cluster.own_process import session_logs
from troupe.orchestrator.cluster.process_watch import Process, ProcessWatch
from troupe.orchestrator.cluster.ray_cluster import ActorSpec, ActorWorker, Cluster
from troupe.orchestrator.plan.placement import RoleSize, WorkerPlacement, fit, place, place_one

pytestmark = pytest.mark.long

RESERVE_TIMEOUT_S = 60.0
TEST_TIMEOUT_S = 300.0
ENGINES = RoleSize("rollout", 3, 1.0, 0.0, strategy="SPREAD", labels=(("part", "engine"),), separate=True)


def node_of_group(names: dict[str, str]) -> dict[str, str]:
    """Node name of every placement group of one bundle, by group name.

    Args:
        names: Node names by node id.
    """
    groups = placement_group_table().values()
    return {group["name"]: names[group["bundles_to_node_id"][0]] for group in groups if group["state"] == "CREATED"}


async def check_reservations(port: int) -> None:
    """Three engines are spread as planned; further ones go to the node with the fewest engines that has room."""
    cluster = Cluster.connect({}, f"127.0.0.1:{port}")
    nodes = ray_nodes.nodes()
    assert len({one.name for one in nodes}) == len(nodes) == 2  # distinct names although both nodes have one address
    names = {one.id: one.name for one in nodes}
    small, large = (next(one.name for one in nodes if one.cpus == cores) for cores in (3, 4))

    placements = place([ENGINES])
    await cluster.reserve(placements, RESERVE_TIMEOUT_S)
    planned = Counter(fit(placements, nodes).node_of.values())
    assert Counter(node_of_group(names).values()) == planned
    assert sorted(planned.values()) == [1, 2]

    fewest = min(planned, key=lambda name: planned[name])
    await cluster.reserve([place_one(ENGINES, 3)], RESERVE_TIMEOUT_S)
    assert node_of_group(names)["rollout-3"] == fewest

    # Spreading is best effort: if only one node has room, all engines go there.
    await cluster.reserve([place_one(ENGINES, index) for index in (4, 5, 6)], RESERVE_TIMEOUT_S)
    assert Counter(node_of_group(names).values()) == {small: 3, large: 4}

    cluster.release("rollout-4")
    await cluster.reserve([place_one(ENGINES, 7)], RESERVE_TIMEOUT_S)
    assert Counter(node_of_group(names).values()) == {small: 3, large: 4}


class Sees:
    """A worker that says which GPUs it sees."""

    def visible(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


async def check_lent_gpus(port: int) -> None:
    """Two engines over two GPUs each, on those of the two ranks in their bundle; also when a rank is replaced."""
    cluster = Cluster.connect({}, f"127.0.0.1:{port}")
    sizes = [RoleSize("policy", 4, 0.1, 1.0), RoleSize("rollout", 2, 0.1, 2.0, colocate_with="policy", ranks=2)]
    (placement,) = place(sizes)
    await cluster.reserve([placement], RESERVE_TIMEOUT_S)
    gpus: dict[str, str] = {}

    async def seen(placed: WorkerPlacement, env: dict[str, str]) -> str:
        name = f"{placed.role}-{placed.index}"
        worker = cluster.spawn(placement, placed, name, ActorSpec(Sees, (), env))
        spawned[name] = worker
        return await asyncio.wait_for(worker.actor.visible.remote(), RESERVE_TIMEOUT_S)

    spawned: dict[str, ActorWorker[Any]] = {}
    ranks, engines = placement.workers[:4], placement.workers[4:]
    for rank in ranks:
        gpus[f"policy-{rank.index}"] = await seen(rank, {})
    assert sorted(gpus.values()) == ["0", "1", "2", "3"]
    for engine in engines:
        own = ",".join(gpus[f"policy-{2 * engine.index + offset}"] for offset in range(2))
        assert await seen(engine, {"CUDA_VISIBLE_DEVICES": own}) == own
    cluster.kill(spawned["policy-1"])
    assert await seen(ranks[1], {}) == gpus["policy-1"]
    for worker in spawned.values():
        cluster.kill(worker)
    cluster.release(placement.name)


class StopsItself:
    """An actor whose process stops before it can answer a call."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Watched:
    """A worker of the watch."""

    actor: Any
    name: str = "policy-0"
    process: Process | None = None
    ended: asyncio.Future[str] = field(default_factory=asyncio.Future)

    def locate(self, process: Process) -> None:
        self.process = process

    def terminate(self, reason: str) -> None:
        self.ended.set_result(reason)


async def check_silent_worker() -> None:
    """A process that is stopped before its first answer is found, and ended."""
    watch = ProcessWatch(session_logs(), 2.0)
    here = NodeAffinitySchedulingStrategy(watch.node, soft=False)
    worker = Watched(ray.remote(StopsItself).options(num_cpus=0, scheduling_strategy=here).remote())
    watch.add(worker)
    try:
        reason = await asyncio.wait_for(worker.ended, RESERVE_TIMEOUT_S)
        with pytest.raises(RayActorError):
            await asyncio.wait_for(worker.actor.__ray_ready__.remote(), RESERVE_TIMEOUT_S)
    finally:
        watch.close()
    assert worker.process is not None
    assert reason == f"its process {worker.process.pid} was stopped for 2 s (failures.stopped_s)"
    assert watch.locations() == {}


async def check_all(port: int) -> None:
    await check_lent_gpus(port)
    await check_reservations(port)
    await check_silent_worker()


def run_check(port: int) -> None:
    """Entry of a child process: a process chooses its Ray token when it imports Ray or starts its first cluster."""
    asyncio.run(check_all(port))


def reserve_beside(port: int) -> None:
    """Entry of another run on the cluster, whose engine has the name of one of the first run's."""
    engines = RoleSize("rollout", 1, 0.0, 1.0, separate=True)
    asyncio.run(Cluster.connect({}, f"127.0.0.1:{port}").reserve(place([engines]), RESERVE_TIMEOUT_S))


def test_spread_workers_are_placed_as_planned_and_further_ones_where_fewest_run() -> None:
    port = free_port()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAY_ADDRESS", raising=False)
        patched.setenv("RAY_AUTH_MODE", "token")
        stack.enter_context(node("engine", "--head", f"--port={port}", "--num-cpus=3", "--include-dashboard=false"))
        stack.enter_context(node("engine", f"--address=127.0.0.1:{port}", "--num-cpus=4", "--num-gpus=4"))
        first, other = (stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn"))) for _ in range(2))
        first.submit(run_check, port).result(TEST_TIMEOUT_S)
        other.submit(reserve_beside, port).result(TEST_TIMEOUT_S)
