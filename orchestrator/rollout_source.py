"""Batches of rollouts: finished, scored groups, none older than the staleness bound, made ready beside the data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.batch_source import Batch, unless_stopped
from orchestrator.batching import plan_ranks
from orchestrator.console import Console
from orchestrator.engine_pool import EnginePool
from orchestrator.errors import DataLost, TroupeError, WorkerError
from orchestrator.handles import Gang, TableRef
from orchestrator.ledger import Ledger
from orchestrator.metrics import PhaseTimers
from orchestrator.prompts import PromptSource
from orchestrator.rollout_metrics import batch_metrics
from orchestrator.scheduler import RolloutScheduler
from orchestrator.scoring import RewardPool, ScoredGroup
from orchestrator.texts import TextOrder
from workers.advantage_state import AdvantageState
from workers.messages import PrepareRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutPlan:
    """What batches of rollouts are held to."""

    old_logprobs_at_batch: bool
    """The policy's log-probs before the update are needed and were not scored while generating."""
    max_staleness: int
    train_timeout_s: float
    trajectories: Path | None


@dataclass(frozen=True)
class RolloutCast:
    """Who makes a batch of rollouts."""

    policy: Gang
    pool: EnginePool
    scheduler: RolloutScheduler
    rewards: RewardPool
    prompts: PromptSource
    ledger: Ledger
    texts: TextOrder | None = None
    """What the policy learns along with every batch (PPO-ptx)."""


class RolloutSource:
    """Groups from the scheduler, as a `BatchSource`."""

    def __init__(
        self,
        plan: RolloutPlan,
        cast: RolloutCast,
        console: Console,
        stop: asyncio.Event,
        memory: AdvantageState | None = None,
    ) -> None:
        """`memory`: what advantages remember of earlier batches (see `state`)."""
        self._plan = plan
        self._cast = cast
        self._console = console
        self._stop = stop
        self._memory = memory or AdvantageState()
        self._groups: Sequence[ScoredGroup] = ()
        self._writing: asyncio.Task[object] | None = None

    def start(self) -> None:
        """Let generation begin."""
        self._cast.scheduler.start()

    async def next_batch(self, version: int, timers: PhaseTimers) -> Batch:
        """Gather finished groups, then let rewards become advantages. What a node took with it is sampled anew."""
        while True:
            with timers.phase("generate"):
                self._groups = await unless_stopped(self._stop, self._cast.scheduler.next_batch(self._on_groups))
            try:
                with timers.phase("prepare"):
                    return await self._prepare(version, self._groups)
            except DataLost as error:
                log.warning("%s; the batch is sampled anew", error)
                self._cast.scheduler.again(self._groups)

    def trained(self, version: int) -> None:
        """Enter the batch in the books; the next groups may start."""
        for group in self._groups:
            self._cast.ledger.trained(group.summary.prompt_uid, *_trainable(group))
        if self._cast.texts is not None:
            self._cast.texts.trained()
        self._cast.scheduler.advance(version)

    def metrics(self, version: int, seconds: float) -> dict[str, float]:
        """Rewards, lengths, staleness, throughput."""
        return batch_metrics(self._groups, version - 1, seconds)

    async def written(self, version: int) -> None:
        """Hand the step's samples to a reward worker to write; the next step does not wait for it."""
        await self.flush()
        if self._plan.trajectories is None:
            return
        tables = [ref for group in self._groups for ref in (group.rollouts, group.reward_table)]
        path = str(self._plan.trajectories / f"step-{version:06d}.parquet")
        writing = self._cast.rewards.write(path, tables, self._plan.train_timeout_s)
        self._writing = asyncio.ensure_future(writing)

    async def flush(self) -> None:
        """Wait for the samples that are being written."""
        if self._writing is not None:
            try:
                await self._writing
            except WorkerError as error:
                log.error("a step's trajectories were not written: %s", error)
            self._writing = None

    def state(self) -> dict[str, Any]:
        """The order of prompts, and what advantages remember; groups in flight stand in the ledger."""
        state = {"prompts": self._cast.prompts.state(), "advantages": self._memory.model_dump(mode="json")}
        return state if self._cast.texts is None else state | {"texts": self._cast.texts.state()}

    async def probe(self) -> None:
        """Ask every engine for a sign of life."""
        await self._cast.pool.probe_all()

    async def close(self) -> None:
        """Start no more groups."""
        await self._cast.scheduler.close()

    async def _prepare(self, version: int, groups: Sequence[ScoredGroup]) -> Batch:
        self._check_staleness(version, groups)
        rollouts = [group.rollouts for group in groups]
        tables = [*rollouts, *(group.reward_table for group in groups), *_unique(groups)]
        policy, bound = self._cast.policy, self._plan.train_timeout_s
        if self._plan.old_logprobs_at_batch:
            self._console.phase("old log-probs", 0, 1)
            lengths = [s.prompt_tokens + s.response_tokens for group in groups for s in group.summary.samples]
            plans = plan_ranks(lengths, range(len(lengths)), policy.ranks, policy.micro_batch_tokens)
            scored = await policy.scatter_for_tables("compute_logprobs", plans, *rollouts, timeout_s=bound)
            tables += [table for _, table in scored]
        request = self._prepare_request(groups)
        summary, table = await policy.workers[0].call_for_table("prepare", request, *tables, timeout_s=bound)
        self._memory = self._memory.after(summary.state)
        return Batch(summary, table, texts=None if self._cast.texts is None else self._cast.texts.pick())

    def _prepare_request(self, groups: Sequence[ScoredGroup]) -> PrepareRequest:
        rows = {group.summary.prompt_uid: group.row for group in groups}
        greedy = {g.summary.prompt_uid: g.greedy_reward for g in groups if g.greedy_reward is not None}
        keep = tuple((group.summary.prompt_uid, i) for group in groups for i in _trainable(group))
        return PrepareRequest(keep, self._memory.of_rows(rows.values()), rows, greedy)

    def _check_staleness(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            for sample in group.summary.samples:
                if version - sample.oldest_version > self._plan.max_staleness:
                    raise TroupeError(
                        f"{group.summary.prompt_uid} sample {sample.sample_index} from {group.summary.engine} has "
                        f"tokens of version {sample.oldest_version}; the policy is at {version} and "
                        f"schedule.max_staleness is {self._plan.max_staleness}"
                    )

    def _on_groups(self, done: int, wanted: int) -> None:
        self._console.phase("generate", done, wanted)


def _trainable(group: ScoredGroup) -> list[int]:
    return [i for i, status in enumerate(group.rewards.statuses) if status == "ok"]


def _unique(groups: Sequence[ScoredGroup]) -> list[TableRef]:
    """Token-score tables of a batch; groups of one wave share theirs."""
    tables: dict[int, TableRef] = {id(ref): ref for group in groups for ref in group.token_scores}
    return list(tables.values())
