"""Scoring fan-out: a finished group goes to the reward workers and to every model that scores tokens, at once.

Reward workers are independent: the least busy one takes the group. Models that score tokens (reference, critic,
the policy's own old log-probs) are gangs whose ranks work together: while one wave of groups is being scored the
next one gathers, so batches grow by themselves when scoring is the slower part. Reward and reference workers may come
and go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.batching import plan_ranks
from orchestrator.errors import WorkerDied, WorkerError
from orchestrator.handles import Gang, TableRef, WorkerHandle, together
from workers.messages import GroupSummary, RewardSummary

log = logging.getLogger(__name__)


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
        self._one_is_done = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """Workers that are given groups."""
        return [worker.name for worker in self.workers]

    def join(self, worker: WorkerHandle) -> None:
        """Give groups to this worker too."""
        self._busy[worker] = 0
        self.workers = (*self.workers, worker)

    async def retire(self, name: str) -> None:
        """Give the worker nothing more, and wait until it has done what it has."""
        leaving = [worker for worker in self.workers if worker.name == name]
        self.workers = tuple(worker for worker in self.workers if worker.name != name)
        while any(self._busy[worker] for worker in leaving):
            self._one_is_done.clear()
            await self._one_is_done.wait()

    async def score(self, rollouts: TableRef) -> tuple[RewardSummary, TableRef]:
        """Score one group on the least busy worker; where a worker died, on another one if there is any, and else once
        more on the same."""
        tried: set[WorkerHandle] = set()
        while True:
            worker = min(self.workers, key=lambda w: (w in tried, self._busy[w]))
            try:
                with self._at_work(worker):
                    return await worker.call_for_table("score", rollouts, timeout_s=self._timeout_s)
            except WorkerDied as error:
                if worker in tried:
                    raise
                tried.add(worker)
                if len(self.workers) > 1 and worker in self.workers:
                    log.warning("%s is given nothing more: %s", worker.name, error)
                    self.workers = tuple(other for other in self.workers if other is not worker)

    async def write(self, path: str, tables: Sequence[TableRef], timeout_s: float) -> None:
        """Have the least busy worker write a step's samples. Raises WorkerError."""
        worker = min(self.workers, key=lambda w: self._busy[w])
        with self._at_work(worker):
            await worker.call("write_trajectories", path, *tables, timeout_s=timeout_s)

    @contextmanager
    def _at_work(self, worker: WorkerHandle) -> Iterator[None]:
        self._busy[worker] += 1
        try:
            yield
        finally:
            self._busy[worker] -= 1
            self._one_is_done.set()


_Waiting = tuple[list[int], TableRef, asyncio.Future[tuple[TableRef, ...]]]
"""Lengths of a group's samples, their table, and where the scores go."""


class TokenScorer:
    """Waves of groups through one gang."""

    def __init__(self, gang: Gang, method: str, timeout_s: float) -> None:
        self.gang = gang
        self._method = method
        self._timeout_s = timeout_s
        self._waiting: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._at_work = asyncio.Lock()
        """Held by a wave."""

    async def resize(self, change: Callable[[Sequence[WorkerHandle]], Sequence[WorkerHandle]]) -> None:
        """Have other workers score from the next wave on; nobody else is at work when this returns."""
        async with self._at_work:
            self.gang.workers = tuple(change(self.gang.workers))

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
            async with self._at_work:
                wave, self._waiting = self._waiting, []
                await self._score(wave)

    async def _score(self, wave: Sequence[_Waiting]) -> None:
        lengths = [length for group, _, _ in wave for length in group]
        plans = plan_ranks(lengths, range(len(lengths)), self.gang.ranks, self.gang.micro_batch_tokens)
        try:
            results = await self.gang.scatter_for_tables(
                self._method, plans, *(ref for _, ref, _ in wave), timeout_s=self._timeout_s
            )
        except WorkerError as error:
            for _, _, future in wave:
                if not future.done():
                    future.set_exception(error)
            return
        tables = tuple(table for _, table in results)
        for _, _, future in wave:
            if not future.done():
                future.set_result(tables)


class Scorer:
    """Everything that scores a finished group."""

    def __init__(self, rewards: RewardPool, token_scorers: Sequence[TokenScorer]) -> None:
        self.rewards = rewards
        self.token_scorers = tuple(token_scorers)

    async def score(self, summary: GroupSummary, rollouts: TableRef, row: int) -> ScoredGroup:
        """Score one group, on a prompt of this row, with all of them, side by side. Raises the first WorkerError."""
        lengths = [sample.prompt_tokens + sample.response_tokens for sample in summary.samples]
        (rewards, reward_table), *tokens = await together(
            [self.rewards.score(rollouts), *(scorer.score(lengths, rollouts) for scorer in self.token_scorers)]
        )
        return ScoredGroup(summary, rewards, rollouts, reward_table, tuple(ref for refs in tokens for ref in refs), row)
