"""The product's side of `benchmarks.recovery`: a policy, an engine, and the scheduler that resamples lost groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.support.harness import Turn
from benchmarks.support.processes import SurvivorMeter
from benchmarks.support.rollout_setup import prompt_picks, response_ids, started
from benchmarks.support.weight_sync_setup import call_policy, logprob_gap
from benchmarks.support.weight_sync_workers import MeasuredPolicy
from benchmarks.support.workload import Group
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.insight.bench.batches import Unscored
from troupe.orchestrator.insight.bench.points import measured_spec
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.orchestrator.rollouts.weight_sync import WeightSync, weight_sync
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.ledger import Ledger
from troupe.workers.contract.roles import RolloutEngine

_ATTEMPTS = 2
"""Attempts per group: the one that is lost with the engine, and the next."""
_SAMPLING_TIMEOUT_S = 60.0
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Recovered:
    """The outcome of one kill."""

    turn: Turn
    """Measured from the kill until the last lost group is sampled again."""
    response_ids: list[list[int]]
    retried: int
    """Groups that were sampled again."""
    restarts: int
    """Engines that replaced another one."""
    ledger: dict[str, int]
    """The ledger's counts over all turns so far, with the samples of this turn marked as trained."""
    gap: float
    """Mean difference, in nats per token, between the fresh engine's log-probs and the trainer's current ones."""
    stale: float
    """The same with the weights that the trainer was loaded with, which a fresh engine starts from."""


class RecoverySetup:
    """One engine, which is killed once per turn, and the product's pool, scheduler and weight sync around it."""

    def __init__(
        self,
        policy: PolicyGroup,
        pool: EnginePool,
        sync: WeightSync,
        scheduler: RolloutScheduler,
        ledger: Ledger,
        work: Sequence[Sequence[Group]],
        roots: Sequence[int],
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._sync = sync
        self._scheduler = scheduler
        self._ledger = ledger
        self._work = work
        self._roots = roots
        self._scorer = TokenScorer(policy, policy.compute_logprobs, _TIMEOUT_S)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, spec: RolloutSpec, table: pa.Table, work: Sequence[Sequence[Group]], roots: Sequence[int]
    ) -> AsyncIterator[RecoverySetup]:
        """Start a cluster with the policy and the engine of `spec`, and end it on exit, or join that of RAY_ADDRESS.

        Args:
            spec: A spec with one engine.
            table: The PROMPTS table that the groups refer to.
            work: The groups of each turn.
            roots: Ids of the processes whose CPU time, with that of their descendants, is the product's.
        """
        async with started(spec, "rollout", "policy", "reward", policy=MeasuredPolicy) as own:
            policy = own.workers.require_policy()
            failures = {"max_failed_fraction": 0.0, "max_attempts": _ATTEMPTS, "engine_restarts": len(work)}
            spec = measured_spec(spec, len(work), failures)
            weights = PoolWeights(lambda engine: sync.bring_up(engine))
            pool = EnginePool(own.workers.engines, own.launcher.engine, spec, weights)
            picks, ledger = prompt_picks(work), Ledger()
            prompts = own.cluster.put(table)
            scheduler = RolloutScheduler(spec, pool, Unscored(), ledger, lambda: next(picks), prompts)
            sync = weight_sync(spec, policy, pool, own.cluster)
            yield cls(policy, pool, sync, scheduler, ledger, work, roots)
            await scheduler.close()
            await pool.close()

    async def turn(self, turn: int, seed: int) -> Recovered:
        """Sync new weights (drawn with `seed`), start the turn's groups, and kill the engine while it samples them."""
        await call_policy(self._policy, MeasuredPolicy.disturb, seed)
        await self._sync.push(turn + 1)
        before, restarts = self._ledger.counts(), self._pool.budget.total
        if turn == 0:
            self._scheduler.start()
        else:
            self._scheduler.advance(turn)
            self._scheduler.serve(turn)
        samples = sum(group.samples for group in self._work[turn])
        pid = await self._sampling(samples)

        meter, began = SurvivorMeter(self._roots), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        groups = await self._scheduler.next_batch()
        wall_s = time.monotonic() - began
        cpu_s, foreign = meter.read()

        retried = self._ledger.counts()["retries"] - before["retries"]
        for group in groups:
            self._ledger.mark_trained(group.summary.prompt_uid, *range(len(group.summary.samples)))
        self._ledger.check()
        sampled = [(group.summary, group.rollouts) for group in groups]
        fresh, _ = await logprob_gap(self._scorer, sampled)
        await call_policy(self._policy, MeasuredPolicy.restore)
        stale, _ = await logprob_gap(self._scorer, sampled)
        rollouts = {group.summary.prompt_uid: group.rollouts for group in groups}
        return Recovered(
            turn=Turn(wall_s, 1, cpu_s, foreign),
            response_ids=[row for group in self._work[turn] for row in response_ids(rollouts[group.uid])],
            retried=retried,
            restarts=self._pool.budget.total - restarts,
            ledger=self._ledger.counts(),
            gap=fresh,
            stale=stale,
        )

    async def _sampling(self, samples: int) -> int:
        """Wait until the engine works on all samples of the turn; returns the process id of its worker."""
        async with asyncio.timeout(_SAMPLING_TIMEOUT_S):
            while True:
                (engine,) = self._pool.workers
                health = await engine.handle.call(RolloutEngine.health, _TIMEOUT_S)
                if health.in_flight == samples:
                    return health.pid
