"""Scoring fan-out: a finished group goes to the reward workers and to every model that scores tokens, at once.

Reward workers are independent: the least busy one takes the group. Models that score tokens (reference, critic,
the policy's own old log-probs) are gangs whose ranks work together: while one wave of groups is being scored the
next one gathers, so batches grow by themselves when scoring is the slower part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.batching import plan_ranks
from orchestrator.errors import WorkerDied, WorkerError
from orchestrator.handles import Gang, TableRef, WorkerHandle
from workers.messages import GroupSummary, RewardSummary


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group with everything that was said of it."""

    summary: GroupSummary
    rewards: RewardSummary
    rollouts: TableRef
    reward_table: TableRef
    token_scores: tuple[TableRef, ...]
    """Tables that hold this group's token scores; a wave's tables are shared by its groups."""
    row: int = 0
    """Row of the prompt pool."""
    greedy_reward: float | None = None
    """Reward of the greedy response to the prompt, where the algorithm asks for one."""

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ, or those of its steps."""
        return self.rewards.steps_differ or len({reward for reward in self.rewards.rewards if reward is not None}) > 1


class RewardPool:
    """Replicas of the reward role."""

    def __init__(self, workers: Sequence[WorkerHandle], timeout_s: float) -> None:
        self.workers = tuple(workers)
        self._timeout_s = timeout_s
        self._busy = dict.fromkeys(self.workers, 0)

    async def score(self, rollouts: TableRef) -> tuple[RewardSummary, TableRef]:
        """Score one group on the least busy worker; a worker that fails is tried once more elsewhere."""
        tried: set[WorkerHandle] = set()
        while True:
            worker = min(self.workers, key=lambda w: (w in tried, self._busy[w]))
            self._busy[worker] += 1
            try:
                return await worker.call_for_table("score", rollouts, timeout_s=self._timeout_s)
            except WorkerDied:
                if len(tried) + 1 >= max(2, len(self.workers)):
                    raise
                tried.add(worker)
            finally:
                self._busy[worker] -= 1


class TokenScorer:
    """Waves of groups through one gang."""

    def __init__(self, gang: Gang, method: str, timeout_s: float) -> None:
        self.gang = gang
        self._method = method
        self._timeout_s = timeout_s
        self._waiting: list[tuple[list[int], TableRef, asyncio.Future[tuple[TableRef, ...]]]] = []
        self._runner: asyncio.Task[None] | None = None
        self.busy_s = 0.0

    async def score(self, lengths: list[int], rollouts: TableRef) -> tuple[TableRef, ...]:
        """Score one group whose samples have `lengths` tokens; returns the tables of the wave it was in."""
        future: asyncio.Future[tuple[TableRef, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append((lengths, rollouts, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        # One turn of the loop lets groups that finished together join the first wave.
        await asyncio.sleep(0)
        while self._waiting:
            wave, self._waiting = self._waiting, []
            lengths = [length for group, _, _ in wave for length in group]
            plans = plan_ranks(lengths, range(len(lengths)), self.gang.ranks, self.gang.micro_batch_tokens)
            started = asyncio.get_running_loop().time()
            try:
                results = await self.gang.scatter_for_tables(
                    self._method, plans, *(ref for _, ref, _ in wave), timeout_s=self._timeout_s
                )
            except WorkerError as error:
                for _, _, future in wave:
                    if not future.done():
                        future.set_exception(error)
                continue
            self.busy_s += asyncio.get_running_loop().time() - started
            tables = tuple(table for _, table in results)
            for _, _, future in wave:
                if not future.done():
                    future.set_result(tables)


class Scorer:
    """Everything that scores a finished group."""

    def __init__(self, rewards: RewardPool, token_scorers: Sequence[TokenScorer]) -> None:
        self.rewards = rewards
        self.token_scorers = tuple(token_scorers)

    async def score(self, summary: GroupSummary, rollouts: TableRef) -> ScoredGroup:
        """Score one group with all of them, side by side."""
        lengths = [sample.prompt_tokens + sample.response_tokens for sample in summary.samples]
        async with asyncio.TaskGroup() as tasks:
            reward = tasks.create_task(self.rewards.score(rollouts))
            tokens = [tasks.create_task(scorer.score(lengths, rollouts)) for scorer in self.token_scorers]
        rewards, reward_table = reward.result()
        token_scores = tuple(ref for task in tokens for ref in task.result())
        return ScoredGroup(summary, rewards, rollouts, reward_table, token_scores)
