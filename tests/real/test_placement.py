"""Where Ray puts what is reserved, on a cluster of two nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
import pytest_asyncio
import ray
from ray.util.placement_group import placement_group_table

from deploy.cluster_demo import free_port, node
from orchestrator import ray_nodes
from orchestrator.actor_group import Cluster
from orchestrator.placement import RoleSize, fit, place, place_one

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

BOUND_S = 60.0
ENGINES = RoleSize("rollout", 3, 1.0, 0.0, strategy="SPREAD", labels=(("part", "engine"),), separate=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    """Two nodes labelled `engine`, of three cores and of four."""
    port = free_port()
    with ExitStack() as nodes, pytest.MonkeyPatch.context() as patched:
        patched.delenv("RAY_ADDRESS", raising=False)
        # Whether this process has a token was settled when Ray was imported, or by the first cluster it started.
        patched.setenv("RAY_AUTH_MODE", "disabled")
        nodes.enter_context(node("engine", "--head", f"--port={port}", "--num-cpus=3", "--include-dashboard=false"))
        nodes.enter_context(node("engine", f"--address=127.0.0.1:{port}", "--num-cpus=4"))
        cluster = Cluster.connect({}, f"127.0.0.1:{port}")
        try:
            yield cluster
        finally:
            await cluster.close(BOUND_S)
            ray.shutdown()  # a process that is still connected ends with its node


def lies(names: dict[str, str]) -> dict[str, str]:
    """Name of the node that each group of one bundle lies on.

    :param names: of the nodes, by id
    """
    groups = placement_group_table().values()
    return {group["name"]: names[group["bundles_to_node_id"][0]] for group in groups if group["state"] == "CREATED"}


async def test_workers_that_are_spread_lie_as_planned_and_the_next_ones_where_fewest_are(cluster: Cluster) -> None:
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
