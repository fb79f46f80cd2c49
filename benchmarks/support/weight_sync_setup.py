"""What the weight_sync benchmark plays on: a cluster with a policy and rollout engines, and no loop around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from benchmarks.streaming import CLOSE_TIMEOUT_S
from benchmarks.weight_workers import MeasuredPolicy, MeasuredRollout
from orchestrator.actor_group import Cluster
from orchestrator.cast import Casting, WorkerClasses
from orchestrator.engine_pool import EnginePool
from orchestrator.handles import Gang, TableRef
from orchestrator.placement import demand, place, role_sizes
from orchestrator.prompts import load_pools
from orchestrator.run import pool_bounds, weight_sync
from orchestrator.scoring import TokenScorer
from orchestrator.spec import Spec
from orchestrator.weight_sync import FileSync, SyncReport, WeightSync
from workers.critic import CriticWorker
from workers.messages import GroupRequest, GroupSummary, WeightUpdate
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker

_CLASSES = WorkerClasses(MeasuredRollout, MeasuredPolicy, CriticWorker, ReferenceWorker, RewardWorker)
_TIMEOUT_S = 300.0


class WeightStage:
    """Policy and engines, and the product's weight sync between them."""

    def __init__(self, policy: Gang, pool: EnginePool, sync: WeightSync, prompts: TableRef, samples: int) -> None:
        """`samples`: that each engine draws in :meth:`sample`."""
        self._policy = policy
        self._pool = pool
        self._sync = sync
        self._prompts = prompts
        self._samples = samples
        self._serial = 0
        self._scorer = TokenScorer(policy, "compute_logprobs", _TIMEOUT_S)
        self._sampled: list[tuple[GroupSummary, TableRef]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, spec: Spec) -> AsyncIterator[WeightStage]:
        """A cluster with the policy and the engines of `spec`, and all of it ended afterwards."""
        cluster = Cluster.connect(demand(place(role_sizes(spec))))
        try:
            casting = Casting(spec, cluster, _CLASSES)
            stage = await casting.open(frozenset({"rollout", "policy"}))
            if stage.policy is None:
                raise RuntimeError("the spec has no policy")
            pool = EnginePool(stage.engines, casting.engine, pool_bounds(spec))
            prompts, _ = load_pools(spec.data)
            sync = weight_sync(spec, stage.policy, pool, cluster)
            yield cls(stage.policy, pool, sync, cluster.put(prompts.table), spec.group_size)
            await cluster.close(CLOSE_TIMEOUT_S)
        finally:
            cluster.abandon()

    @property
    def digest(self) -> str:
        """Of the last update that the product sent; empty for back-ends without one."""
        if not isinstance(self._sync, FileSync) or self._sync._current is None:
            return ""
        return self._sync._current.digest

    async def disturb(self, seed: int) -> None:
        """Change the policy's weights."""
        await self._policy.broadcast("disturb", seed, timeout_s=_TIMEOUT_S)

    async def sample(self) -> None:
        """Have every engine sample one group."""
        self._serial += 1
        request = GroupRequest(f"check-{self._serial}", 0, 0, self._samples, self._serial)
        generated = (self._pool.generate(request, self._prompts, engine) for engine in self._pool.engines)
        self._sampled = list(await asyncio.gather(*generated))

    async def gap(self) -> tuple[float, int]:
        """(mean nats a token between what was sampled last and the policy as it stands, number of those tokens)."""
        return await gap(self._scorer, self._sampled)

    async def push(self, version: int) -> SyncReport:
        """The product's own sync."""
        return await self._sync.push(version)

    async def hold(self, version: int) -> int:
        """Put the policy's weights into the memory of every engine process, but not into its model; bytes."""
        (update, *_) = await self._policy.broadcast("publish_weights", version, timeout_s=_TIMEOUT_S)
        await self._every_engine("hold", update)
        published: WeightUpdate = update
        return published.nbytes

    async def copy_weights(self) -> float:
        """Seconds of one copy of the policy's weights."""
        return max(await self._policy.broadcast("copy_weights", timeout_s=_TIMEOUT_S))

    async def apply_held(self) -> float:
        """Seconds until the slowest engine has loaded what it holds."""
        return max(await self._every_engine("apply_held"))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._policy.broadcast("export", str(folder), timeout_s=_TIMEOUT_S)

    async def reload_from(self, folder: Path) -> None:
        """Have every engine load a Hugging Face folder."""
        await self._every_engine("reload_from", str(folder))

    async def parts(self) -> dict[str, float]:
        """Seconds by part since the last call: of the first rank and of the engine that was closed for longest."""
        own, *_ = await self._policy.broadcast("parts", timeout_s=_TIMEOUT_S)
        return own | max(await self._every_engine("parts"), key=lambda parts: parts.get("closed", 0.0))

    async def _every_engine(self, method: str, *args: Any) -> list[Any]:
        calls = (engine.handle.call(method, *args, timeout_s=_TIMEOUT_S) for engine in self._pool.engines)
        return await asyncio.gather(*calls)


async def gap(scorer: TokenScorer, sampled: Iterable[tuple[GroupSummary, TableRef]]) -> tuple[float, int]:
    """(mean nats a token between groups as they were sampled and the trainer as it stands, number of those tokens)."""
    differences: list[float] = []
    for summary, rollouts in sampled:
        lengths = [sample.prompt_tokens + sample.response_tokens for sample in summary.samples]
        scores = await scorer.score(lengths, rollouts)
        own, other = _by_sample([rollouts], "rollout_logprobs"), _by_sample(scores, "old_logprobs")
        for index, row in own.items():
            differences += [abs(one - same) for one, same in zip(row, other[index], strict=True)]
    return sum(differences) / len(differences), len(differences)


def _by_sample(tables: Any, column: str) -> dict[int, list[float]]:
    """Rows of a column of tables in the object store, by sample index."""
    found: list[Any] = [ray.get(ref) for ref in tables]
    table = pa.concat_tables([one.select(["sample_index", column]) for one in found])
    return {row["sample_index"]: row[column] for row in table.to_pylist()}
