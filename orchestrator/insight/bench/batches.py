"""Batches that are sampled without training, through the parts of a run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptOrder, PromptPick
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scheduler import NextPrompt, RolloutScheduler
from troupe.orchestrator.rollouts.scoring import ScoredGroup, Scorer
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.training.ledger import Ledger
from troupe.workers.contract.messages import GroupSummary, RewardSummary, sampled_tokens
from troupe.workers.contract.roles import TableRef


class Unscored(Scorer):
    """A scorer that passes every finished group through with rewards of 0."""

    def __init__(self) -> None:
        super().__init__(RewardPool((), 1.0), ())

    async def score(self, summary: GroupSummary, rollouts: TableRef, row: int, settings: GroupSettings) -> ScoredGroup:
        """The group, with a reward of 0 for every sample."""
        count = len(summary.samples)
        rewards = RewardSummary(summary.prompt_uid, summary.attempt, ("ok",) * count, (0.0,) * count, {})
        return ScoredGroup(summary, rewards, rollouts, None, (), row)


@dataclass(frozen=True)
class SampledBatch:
    """The groups of one batch."""

    seconds: float
    groups: Sequence[ScoredGroup]

    @property
    def response_tokens(self) -> int:
        return sum(count for group in self.groups for count in sampled_tokens(group.summary.samples))


class SamplingBatches:
    """Runs batches; a batch is the generation that a step of synchronous training would wait for."""

    def __init__(
        self,
        spec: RolloutSpec,
        pool: EnginePool,
        next_prompt: NextPrompt,
        prompts: TableRef,
        settings: RowTable[GroupSettings] | None = None,
    ) -> None:
        """Samples nothing yet. `settings`: how groups are sampled, by the row of their prompt, or None if all alike."""
        self._scheduler = RolloutScheduler(spec, pool, Unscored(), Ledger(), next_prompt, prompts, settings=settings)
        self._batch = 0

    async def run(self) -> SampledBatch:
        """Samples the groups of the next batch. Raises TroupeError if they cannot be sampled."""
        began = time.monotonic()
        if self._batch == 0:
            self._scheduler.start()
        else:
            self._scheduler.advance(self._batch)
            self._scheduler.serve(self._batch)
        self._batch += 1
        groups = await self._scheduler.next_batch()
        return SampledBatch(time.monotonic() - began, groups)

    async def close(self) -> None:
        await self._scheduler.close()


class BatchPrompts:
    """The prompts of every batch, in the order of a run."""

    def __init__(self, source: PromptOrder, batches: int, prompts: int) -> None:
        self.by_batch = [[source.next() for _ in range(prompts)] for _ in range(batches)]
        """A prompt that an engine refuses is replaced by the next one, so that later batches may begin further on."""
        planned = itertools.chain.from_iterable(self.by_batch)
        self._next = itertools.chain(planned, iter(source.next, None))

    def next(self) -> PromptPick:
        return next(self._next)
