"""The product's sampling path in isolation: cluster, workers, engine pool and scheduler, without a trainer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pyarrow as pa
import ray

from benchmarks.support.harness import Turn
from benchmarks.support.processes import Meter
from benchmarks.support.workload import Group
from troupe.orchestrator.cluster.event_loop import rare_collections
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_server import server_of
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.insight.bench.batches import SamplingBatches
from troupe.orchestrator.insight.bench.points import measured_spec
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.plan.placement import demand, place, role_sizes
from troupe.orchestrator.pools.engines import EnginePool, sample_group
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.contract.roles import TableRef, Worker
from troupe.workers.rollout import RolloutWorker

CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Started:
    """A cluster with workers."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers


@asynccontextmanager
async def started(spec: RolloutSpec, *roles: str, **classes: type[Worker]) -> AsyncIterator[Started]:
    """A cluster with the workers of these roles, as a run starts them; it ends with the block.

    Args:
        spec: The spec of the workers.
        roles: Roles to start.
        classes: Worker classes to start instead of the product's, by role.
    """
    cluster = Cluster.connect(demand(place(role_sizes(spec))), server=server_of(spec))
    try:
        launcher = WorkerLauncher(spec, cluster, classes=classes)
        yield Started(cluster, launcher, await launcher.open(frozenset(roles)))
        await cluster.close(CLOSE_TIMEOUT_S)
    finally:
        cluster.abandon()


class RolloutSetup:
    """Runs turns through the scheduler; a turn is the generation that a controller step would wait for."""

    def __init__(
        self,
        pool: EnginePool,
        turns: SamplingBatches,
        prompts: TableRef,
        work: Sequence[Sequence[Group]],
        others: Sequence[int],
    ) -> None:
        """`others`: ids of processes whose CPU time does not count as the product's."""
        self._pool = pool
        self._turns = turns
        self._prompts = prompts
        self._work = work
        self._others = others

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        spec: RolloutSpec,
        table: pa.Table,
        work: Sequence[Sequence[Group]],
        others: Sequence[int],
        max_load: int,
        rollout: type[RolloutWorker] = RolloutWorker,
    ) -> AsyncIterator[RolloutSetup]:
        """Start a cluster with the engines of `spec`, and end it on exit.

        Args:
            spec: The spec of the engines.
            table: The PROMPTS table that the groups refer to.
            work: The groups of each turn.
            others: Ids of processes whose CPU time does not count as the product's.
            max_load: Maximum number of unfinished samples per engine; 0 for the product's own.
            rollout: Class of the engines' workers.
        """
        async with started(spec, "rollout", "reward", rollout=rollout) as own:
            spec = measured_spec(spec, len(work), {"max_attempts": 1, "max_failed_fraction": 0.0})
            pool = EnginePool(own.workers.engines, own.launcher.engine, spec, PoolWeights())
            pool.dispatch.max_load = max_load or pool.dispatch.max_load
            prompts = own.cluster.put(table)
            picks = prompt_picks(work)
            turns = SamplingBatches(spec, pool, lambda: next(picks), prompts)
            async with rare_collections():  # as in a run
                yield cls(pool, turns, prompts, work, others)
            await turns.close()

    @property
    def max_load(self) -> int:
        """Maximum number of unfinished samples per engine."""
        return self._pool.dispatch.max_load

    async def turn(self, turn: int) -> tuple[Turn, list[list[int]]]:
        """Run one turn; returns it and the response token ids, in the order of the groups' samples."""
        meter = Meter(without=self._others)
        sampled = await self._turns.run()
        turned = meter.turn(sampled.response_tokens, sampled.seconds)
        rollouts = {group.summary.prompt_uid: group.rollouts for group in sampled.groups}
        ids = [row for group in self._work[turn] for row in response_ids(rollouts[group.uid])]
        return turned, ids

    async def alone(self, group: Group, greedy: bool) -> list[list[int]]:
        """Sample one group on an idle engine; returns its response token ids."""
        request = GroupRequest(group.uid, group.row, 0, group.samples, group.seed, greedy=greedy)
        _, rollouts = await sample_group(self._pool, request, self._prompts)
        return response_ids(rollouts)


def response_ids(rollouts: TableRef) -> list[list[int]]:
    """Response token ids of a ROLLOUTS table in the object store, by row."""
    table: pa.Table = ray.get(rollouts)
    return [row["response_ids"] for row in table.select(["response_ids"]).to_pylist()]


def prompt_picks(work: Sequence[Sequence[Group]]) -> Iterator[PromptPick]:
    """The prompts of all turns, in order."""
    return (PromptPick(group.uid, group.row) for groups in work for group in groups)
