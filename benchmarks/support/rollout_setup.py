"""The product's sampling path on its own: cluster, cast, engine pool and scheduler, with no trainer behind them."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pyarrow as pa
import ray

from benchmarks.harness import Turn
from benchmarks.processes import Meter
from benchmarks.workload import Group
from orchestrator.actor_group import Cluster
from orchestrator.cast import Casting, WorkerClasses
from orchestrator.engine_pool import EnginePool
from orchestrator.handles import TableRef
from orchestrator.ledger import Ledger
from orchestrator.placement import demand, place, role_sizes
from orchestrator.prompts import PromptPick
from orchestrator.run import pool_bounds
from orchestrator.scheduler import RolloutScheduler, SchedulePlan
from orchestrator.scoring import RewardPool, ScoredGroup, Scorer
from orchestrator.spec import Spec
from workers.critic import CriticWorker
from workers.messages import GroupRequest, GroupSummary, RewardSummary
from workers.policy import PolicyWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.rollout import RolloutWorker

CLASSES = WorkerClasses(RolloutWorker, PolicyWorker, CriticWorker, ReferenceWorker, RewardWorker)
CLOSE_TIMEOUT_S = 10.0


class Unscored(Scorer):
    """Lets every finished group through as it is."""

    def __init__(self) -> None:
        super().__init__(RewardPool((), 1.0), ())

    async def score(self, summary: GroupSummary, rollouts: TableRef, row: int) -> ScoredGroup:
        """The group, with a reward of 0 for every sample."""
        count = len(summary.samples)
        rewards = RewardSummary(summary.prompt_uid, summary.attempt, ("ok",) * count, (0.0,) * count, {})
        return ScoredGroup(summary, rewards, rollouts, None, (), row)


class Streaming:
    """Turns through the scheduler: a turn is what the controller's step would wait for."""

    def __init__(
        self,
        pool: EnginePool,
        scheduler: RolloutScheduler,
        prompts: TableRef,
        work: Sequence[Sequence[Group]],
        others: Sequence[int],
    ) -> None:
        """`others`: process ids whose CPU time is not the product's."""
        self._pool = pool
        self._scheduler = scheduler
        self._prompts = prompts
        self._work = work
        self._others = others

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        spec: Spec,
        table: pa.Table,
        work: Sequence[Sequence[Group]],
        others: Sequence[int],
        max_load: int,
        rollout: type[RolloutWorker] = RolloutWorker,
    ) -> AsyncIterator[Streaming]:
        """A cluster with the engines of `spec`, of class `rollout`, and all of it ended afterwards.

        `work`: the groups of each turn; `max_load`: bound on the samples an engine has yet to finish, 0 for the
        product's own.
        """
        cluster = Cluster.connect(demand(place(role_sizes(spec))))
        try:
            casting = Casting(spec, cluster, replace(CLASSES, rollout=rollout))
            stage = await casting.open(frozenset({"rollout", "reward"}))
            bounds = pool_bounds(spec)
            bounds = replace(bounds, max_load=max_load or bounds.max_load)
            pool = EnginePool(stage.engines, casting.engine, bounds)
            prompts = cluster.put(table)
            picks = picks_of(work)
            plan = schedule_plan(spec, len(work), attempts=1)
            scheduler = RolloutScheduler(plan, pool, Unscored(), Ledger(), lambda: next(picks), prompts)
            yield cls(pool, scheduler, prompts, work, others)
            await scheduler.close()
            await cluster.close(CLOSE_TIMEOUT_S)
        finally:
            cluster.abandon()

    @property
    def max_load(self) -> int:
        """Bound on the samples an engine has yet to finish."""
        return self._pool.bounds.max_load

    async def turn(self, turn: int) -> tuple[Turn, list[list[int]]]:
        """One turn, and the response token ids in the order of the groups' samples."""
        meter = Meter([os.getpid()], self._others)
        began = time.monotonic()
        if turn == 0:
            self._scheduler.start()
        else:
            self._scheduler.advance(turn)
        groups = await self._scheduler.next_batch()
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()
        tokens = sum(sample.response_tokens for group in groups for sample in group.summary.samples)
        rollouts = {group.summary.prompt_uid: group.rollouts for group in groups}
        ids = [row for group in self._work[turn] for row in response_ids(rollouts[group.uid])]
        return Turn(wall_s, tokens, cpu_s, foreign), ids

    async def alone(self, group: Group, greedy: bool) -> list[list[int]]:
        """The group's samples on an engine that does nothing else."""
        engine = await self._pool.acquire(group.samples)
        try:
            request = GroupRequest(group.uid, group.row, 0, group.samples, group.seed, greedy=greedy)
            _, rollouts = await self._pool.generate(request, self._prompts, engine)
        finally:
            await self._pool.release(engine, group.samples)
        return response_ids(rollouts)


def response_ids(rollouts: TableRef) -> list[list[int]]:
    """Response token ids of a ROLLOUTS table in the object store, by row."""
    table: pa.Table = ray.get(rollouts)
    return [row["response_ids"] for row in table.select(["response_ids"]).to_pylist()]


def schedule_plan(spec: Spec, turns: int, attempts: int) -> SchedulePlan:
    """A turn is a step, sampled from the newest weights, of which no sample may be missing."""
    return SchedulePlan(
        groups_per_step=spec.schedule.prompts_per_step,
        group_size=spec.group_size,
        max_staleness=0,
        steps=turns,
        max_attempts=attempts,
        max_failed_fraction=0.0,
        min_group=1,
        seed=spec.seed,
    )


def picks_of(work: Sequence[Sequence[Group]]) -> Iterator[PromptPick]:
    """The prompts of all turns, in order."""
    return (PromptPick(group.uid, group.row) for groups in work for group in groups)
