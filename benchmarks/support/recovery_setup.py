"""What the recovery benchmark plays on: a policy, an engine, and the scheduler that has lost groups sampled again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pyarrow as pa

from benchmarks.harness import Turn
from benchmarks.processes import SurvivorMeter
from benchmarks.streaming import CLASSES, CLOSE_TIMEOUT_S, Unscored, picks_of, response_ids, schedule_plan
from benchmarks.weight_stage import gap
from benchmarks.weight_workers import MeasuredPolicy
from benchmarks.workload import Group
from orchestrator.actor_group import Cluster
from orchestrator.cast import Casting
from orchestrator.engine_pool import EnginePool
from orchestrator.handles import Gang
from orchestrator.ledger import Ledger
from orchestrator.placement import demand, place, role_sizes
from orchestrator.run import pool_bounds, weight_sync
from orchestrator.scheduler import RolloutScheduler
from orchestrator.scoring import TokenScorer
from orchestrator.spec import Spec
from orchestrator.weight_sync import WeightSync
from workers.messages import WorkerHealth

_ATTEMPTS = 2
"""Of a group: the one that dies with its engine, and the next."""
_SAMPLING_TIMEOUT_S = 60.0
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Recovered:
    """What came of a kill."""

    turn: Turn
    """Its clock runs from the kill until the last group that was lost is there again."""
    response_ids: list[list[int]]
    retried: int
    """Groups that were sampled again."""
    restarts: int
    """Engines that took the place of another."""
    books: dict[str, int]
    """The ledger's counts of all turns so far, this one's samples being trained."""
    gap: float
    """Nats a token between what the fresh engine sampled and the trainer as it stands."""
    stale: float
    """The same with the trainer as it was loaded, whose weights a fresh engine starts with."""


class RecoveryStage:
    """One engine that is killed, and all that brings back what it held."""

    def __init__(
        self,
        policy: Gang,
        pool: EnginePool,
        sync: WeightSync,
        scheduler: RolloutScheduler,
        ledger: Ledger,
        work: Sequence[Sequence[Group]],
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._sync = sync
        self._scheduler = scheduler
        self._ledger = ledger
        self._work = work
        self._scorer = TokenScorer(policy, "compute_logprobs", _TIMEOUT_S)

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: Spec, table: pa.Table, work: Sequence[Sequence[Group]]) -> AsyncIterator[RecoveryStage]:
        """A cluster with the policy and the engine of `spec`, and all of it ended afterwards.

        `work`: the groups of each turn.
        """
        cluster = Cluster.connect(demand(place(role_sizes(spec))))
        try:
            casting = Casting(spec, cluster, replace(CLASSES, policy=MeasuredPolicy))
            stage = await casting.open(frozenset({"rollout", "policy", "reward"}))
            if stage.policy is None:
                raise RuntimeError("the spec has no policy")
            pool = EnginePool(stage.engines, casting.engine, replace(pool_bounds(spec), restarts=len(work)))
            picks, ledger = picks_of(work), Ledger()
            plan = schedule_plan(spec, len(work), _ATTEMPTS)
            prompts = cluster.put(table)
            scheduler = RolloutScheduler(plan, pool, Unscored(), ledger, lambda: next(picks), prompts)
            sync = weight_sync(spec, stage.policy, pool, cluster)
            yield cls(stage.policy, pool, sync, scheduler, ledger, work)
            await scheduler.close()
            await pool.close()
            await cluster.close(CLOSE_TIMEOUT_S)
        finally:
            cluster.abandon()

    async def turn(self, turn: int, seed: int) -> Recovered:
        """New weights (by `seed`) into the engine, the turn's groups, and -9 for the engine when it samples them."""
        await self._policy.broadcast("disturb", seed, timeout_s=_TIMEOUT_S)
        await self._sync.push(turn + 1)
        before, restarts = self._ledger.counts(), self._pool.restarts_used
        if turn == 0:
            self._scheduler.start()
        else:
            self._scheduler.advance(turn)
        samples = sum(group.samples for group in self._work[turn])
        pid = await self._sampling(samples)

        meter, began = SurvivorMeter([os.getpid()]), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        groups = await self._scheduler.next_batch()
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()

        retried = self._ledger.counts()["retries"] - before["retries"]
        for group in groups:
            self._ledger.trained(group.summary.prompt_uid, *range(len(group.summary.samples)))
        self._ledger.check()
        sampled = [(group.summary, group.rollouts) for group in groups]
        fresh, _ = await gap(self._scorer, sampled)
        await self._policy.broadcast("restore", timeout_s=_TIMEOUT_S)
        stale, _ = await gap(self._scorer, sampled)
        rollouts = {group.summary.prompt_uid: group.rollouts for group in groups}
        return Recovered(
            Turn(wall_s, 1, cpu_s, foreign),
            [row for group in self._work[turn] for row in response_ids(rollouts[group.uid])],
            retried,
            self._pool.restarts_used - restarts,
            self._ledger.counts(),
            fresh,
            stale,
        )

    async def _sampling(self, samples: int) -> int:
        """Process id of the engine's worker, once all samples are on their way there."""
        async with asyncio.timeout(_SAMPLING_TIMEOUT_S):
            while True:
                (engine,) = self._pool.engines
                health: WorkerHealth = await engine.handle.call("health", timeout_s=_TIMEOUT_S)
                if health.in_flight == samples:
                    return health.pid
