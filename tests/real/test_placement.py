"""Where Ray puts what is reserved, on a cluster of two nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context

import pytest
from ray.util.placement_group import placement_group_table

from deploy.cluster_demo import free_port, node
from orchestrator import ray_nodes
from orchestrator.actor_group import Cluster
from orchestrator.placement import RoleSize, fit, place, place_one

pytestmark = pytest.mark.real

BOUND_S = 60.0
WHOLE_S = 300.0
ENGINES = RoleSize("rollout", 3, 1.0, 0.0, strategy="SPREAD", labels=(("part", "engine"),), separate=True)


def lies(names: dict[str, str]) -> dict[str, str]:
    """Name of the node that each group of one bundle lies on.

    :param names: of the nodes, by id
    """
    groups = placement_group_table().values()
    return {group["name"]: names[group["bundles_to_node_id"][0]] for group in groups if group["state"] == "CREATED"}


async def reserve_and_look(port: int) -> None:
    """Three engines are spread as planned, the next ones go where the fewest are, and where there is room."""
    cluster = Cluster.connect({}, f"127.0.0.1:{port}")
    nodes = ray_nodes.nodes()
    assert len({one.name for one in nodes}) == len(nodes) == 2  # of one address, but told apart
    names = {one.id: one.name for one in nodes}
    small, large = (next(one.name for one in nodes if one.cpus == cores) for cores in (3, 4))

    placements = place([ENGINES])
    await cluster.reserve(placements, BOUND_S)
    planned = Counter(fit(placements, nodes).node_of.values())
    assert Counter(lies(names).values()) == planned
    assert sorted(planned.values()) == [1, 2]

    fewer = min(planned, key=lambda name: planned[name])
    await cluster.reserve([place_one(ENGINES, 3)], BOUND_S)
    assert lies(names)["rollout-3"] == fewer

    # Best effort: where only one node has room, all go there.
    await cluster.reserve([place_one(ENGINES, index) for index in (4, 5, 6)], BOUND_S)
    assert Counter(lies(names).values()) == {small: 3, large: 4}

    cluster.give_back("rollout-4")
    await cluster.reserve([place_one(ENGINES, 7)], BOUND_S)
    assert Counter(lies(names).values()) == {small: 3, large: 4}


def in_a_process_of_its_own(port: int) -> None:
    """Whether a process has a token for Ray is settled when it imports Ray, or by the first cluster that it starts."""
    asyncio.run(reserve_and_look(port))


def test_workers_that_are_spread_lie_as_planned_and_the_next_ones_where_fewest_are() -> None:
    port = free_port()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAY_ADDRESS", raising=False)
        patched.setenv("RAY_AUTH_MODE", "token")
        stack.enter_context(node("engine", "--head", f"--port={port}", "--num-cpus=3", "--include-dashboard=false"))
        stack.enter_context(node("engine", f"--address=127.0.0.1:{port}", "--num-cpus=4"))
        process = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        process.submit(in_a_process_of_its_own, port).result(WHOLE_S)
