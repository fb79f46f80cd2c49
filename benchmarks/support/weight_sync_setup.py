"""The product's side of `benchmarks.weight_sync`: a cluster with a policy and rollout engines, without a controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pyarrow as pa
import ray

from benchmarks.support.rollout_setup import started
from benchmarks.support.weight_sync_workers import MeasuredPolicy, MeasuredSyncRollout
from troupe.orchestrator.cluster.worker_group import PolicyGroup, WorkerHandle
from troupe.orchestrator.data.prompts import load_pools
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.orchestrator.rollouts.weight_sync import FileSync, SyncReport, WeightSync, weight_sync
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.messages import GroupRequest, GroupSummary
from troupe.workers.contract.roles import Reply, TableRef

P = ParamSpec("P")
R = TypeVar("R")

_TIMEOUT_S = 300.0


class WeightSyncSetup:
    """Policy, engines, and the product's weight sync between them."""

    def __init__(
        self, policy: PolicyGroup, pool: EnginePool, sync: WeightSync, prompts: TableRef, samples: int
    ) -> None:
        """`samples`: number of samples that each engine draws in `sample`."""
        self._policy = policy
        self._pool = pool
        self._sync = sync
        self._prompts = prompts
        self._samples = samples
        self._serial = 0
        self._scorer = TokenScorer(policy, policy.compute_logprobs, _TIMEOUT_S)
        self._sampled: list[tuple[GroupSummary, TableRef]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: RolloutSpec) -> AsyncIterator[WeightSyncSetup]:
        """Start a cluster with the policy and the engines of `spec`, and end it on exit."""
        async with started(spec, "rollout", "policy", rollout=MeasuredSyncRollout, policy=MeasuredPolicy) as own:
            policy = own.workers.require_policy()
            pool = EnginePool(own.workers.engines, own.launcher.engine, spec, PoolWeights())
            prompts, _ = load_pools(spec.data)
            sync = weight_sync(spec, policy, pool, own.cluster)
            yield cls(policy, pool, sync, own.cluster.put(prompts.table), spec.group_size)

    @property
    def digest(self) -> str:
        """Digest of the last update that the product sent; empty for back ends without a digest."""
        if not isinstance(self._sync, FileSync) or self._sync._current is None:
            return ""
        return self._sync._current.digest

    async def disturb(self, seed: int) -> None:
        """Change the policy's weights to values drawn with `seed`."""
        await call_policy(self._policy, MeasuredPolicy.disturb, seed)

    async def sample(self) -> None:
        """Have every engine sample one group."""
        self._serial += 1
        request = GroupRequest(f"check-{self._serial}", 0, 0, self._samples, self._serial)
        generated = (self._pool.generate(request, self._prompts, engine) for engine in self._pool.workers)
        self._sampled = list(await asyncio.gather(*generated))

    async def gap(self) -> tuple[float, int]:
        """`logprob_gap` of the last samples to the policy's current weights."""
        return await logprob_gap(self._scorer, self._sampled)

    async def push(self, version: int) -> SyncReport:
        """Send the policy's weights to the engines with the product's own sync."""
        return await self._sync.push(version)

    async def hold(self, version: int) -> int:
        """Copy the policy's weights into the memory of every engine process, but not into its model; returns bytes."""
        update = await self._policy.publish_weights(version, timeout_s=_TIMEOUT_S)
        await self._every_engine(MeasuredSyncRollout.hold, update)
        return update.nbytes

    async def copy_weights(self) -> float:
        """Copy the policy's weights once; returns the seconds of the slowest rank."""
        return max(await call_policy(self._policy, MeasuredPolicy.copy_weights))

    async def apply_held(self) -> float:
        """Have every engine load the weights from `hold`; returns the seconds of the slowest engine."""
        return max(await self._every_engine(MeasuredSyncRollout.apply_held))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._policy.export(str(folder), timeout_s=_TIMEOUT_S)

    async def reload_from(self, folder: Path) -> None:
        """Have every engine load a Hugging Face folder."""
        await self._every_engine(MeasuredSyncRollout.reload_from, str(folder))

    async def parts(self) -> dict[str, float]:
        """Seconds by part since the last call, of the first rank and of the engine that was paused for longest."""
        own, *_ = await call_policy(self._policy, MeasuredPolicy.parts)
        return own | max(
            await self._every_engine(MeasuredSyncRollout.parts), key=lambda parts: parts.get("closed", 0.0)
        )

    async def _every_engine(
        self, method: Callable[Concatenate[MeasuredSyncRollout, P], Reply[R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        handles = cast("list[WorkerHandle[MeasuredSyncRollout]]", [engine.handle for engine in self._pool.workers])
        return await asyncio.gather(*(handle.call(method, _TIMEOUT_S, *args, **kwargs) for handle in handles))


async def call_policy(
    policy: PolicyGroup,
    method: Callable[Concatenate[MeasuredPolicy, P], Reply[R]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[R]:
    """Calls a method that only the measured policy has, on every rank."""
    ranks = cast("tuple[WorkerHandle[MeasuredPolicy], ...]", policy.workers)
    return await asyncio.gather(*(rank.call(method, _TIMEOUT_S, *args, **kwargs) for rank in ranks))


async def logprob_gap(scorer: TokenScorer, sampled: Iterable[tuple[GroupSummary, TableRef]]) -> tuple[float, int]:
    """Mean absolute difference between the sampler's log-probs and the trainer's current ones.

    Returns:
        (nats per token, number of tokens).
    """
    differences: list[float] = []
    for summary, rollouts in sampled:
        lengths = [sample.prompt_tokens + sample.response_tokens for sample in summary.samples]
        scores = await scorer.score(lengths, rollouts)
        own, other = _by_sample([rollouts], "rollout_logprobs"), _by_sample(scores.tables, "old_logprobs")
        for index, row in own.items():
            differences += [abs(one - same) for one, same in zip(row, other[index], strict=True)]
    return sum(differences) / len(differences), len(differences)


def _by_sample(tables: Any, column: str) -> dict[int, list[float]]:
    """The rows of a column of tables in the object store, by sample index."""
    found: list[Any] = [ray.get(ref) for ref in tables]
    table = pa.concat_tables([one.select(["sample_index", column]) for one in found])
    return {row["sample_index"]: row[column] for row in table.to_pylist()}
