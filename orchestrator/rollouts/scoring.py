"""Scoring: sends a finished group to a reward worker and to every model that scores tokens, concurrently.

Reward workers are independent: the least-loaded one scores the group. Models that score tokens (reference, critic, the
policy's own old log-probs) are worker groups whose ranks share each call. Groups that finish while such a call is
running form the next wave, so waves grow when scoring is slower than generation. Reward and reference workers can be
added and removed during a run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import Scores, ScoreTokens, WorkerGroup, WorkerHandle
from troupe.orchestrator.errors import JudgeLost, WorkerDied, WorkerError, WorkerTimeout
from troupe.orchestrator.pools.replacement import Replacer
from troupe.orchestrator.rollouts.fault_log import FaultLog
from troupe.orchestrator.training.micro_batches import plan_ranks
from troupe.workers.contract.messages import GroupSummary, RankPlan, RewardSummary
from troupe.workers.contract.roles import Reward, TableRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JUDGE_PAUSE_S = 1.0


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group with its rewards and token scores."""

    summary: GroupSummary
    rewards: RewardSummary
    """Rewards of its samples."""
    rollouts: TableRef
    reward_table: TableRef
    token_scores: tuple[TableRef, ...]
    """Tables that hold this group's token scores; a wave's tables are shared by its groups."""
    row: int = 0
    """Row of the prompt in the prompt pool."""
    greedy_reward: float | None = None
    """Reward of the greedy response to the prompt, if the algorithm uses one."""
    candidates: RewardSummary | None = None
    """Rewards of the answers from other sources, if the prompt has some."""

    @property
    def truncated(self) -> frozenset[int]:
        """Indices of the samples that were cut at the longest response."""
        return frozenset(s.sample_index for s in self.summary.samples if s.finish_reason == "length")

    @property
    def has_signal(self) -> bool:
        """Whether the rewards of its samples and candidates, or of their steps, differ."""
        others = () if self.candidates is None else self.candidates.rewards
        rewards = {reward for reward in (*self.rewards.rewards, *others) if reward is not None}
        return self.rewards.steps_differ or len(rewards) > 1

    @property
    def rewarded(self) -> list[int]:
        """Indices of the samples that have a reward."""
        return [i for i, status in enumerate(self.rewards.statuses) if status == "ok"]

    @property
    def rewarded_candidates(self) -> list[int]:
        """Indices of the answers from other sources that have a reward."""
        statuses = () if self.candidates is None else self.candidates.statuses
        return [i for i, status in enumerate(statuses, start=len(self.rewards.statuses)) if status == "ok"]


@dataclass(frozen=True)
class SignalTest:
    """Which groups are worth training on (dynamic sampling: DAPO, arXiv 2503.14476, sec. 3.2)."""

    component: str | None = None
    """Reward component that must differ between the samples; None: the reward."""
    mask_truncated: bool = False
    """Whether truncated samples carry no loss, so that a group of them has no signal."""
    keep: Callable[[RewardSummary], bool] | None = None
    """A filter of the user's own, in place of the comparison of rewards."""

    def problem(self, group: ScoredGroup) -> str:
        """Why the group is worth replacing; empty: it is not."""
        if self.keep is not None:
            if not self.keep(group.rewards):
                return "the algorithm's keep_group refused the group"
        elif self.component is None:
            if not group.has_signal:
                return "all rewards of the group are equal"
        elif len({group.rewards.components[self.component][i] for i in group.rewarded}) < 2:
            return f"all values of {self.component} in the group are equal"
        if self.mask_truncated and group.truncated.issuperset(group.rewarded):
            return "all samples of the group are truncated"
        return ""


class RewardPool:
    """The reward workers; dispatches each group to the least-loaded one, and replaces those that are lost."""

    def __init__(
        self,
        workers: Sequence[WorkerHandle[Reward]],
        timeout_s: float,
        replacer: Replacer[Reward] | None = None,
        judge_start_s: float = 0.0,
    ) -> None:
        """Asks nothing yet.

        Args:
            workers: Those that have started.
            timeout_s: Bound on a call.
            replacer: Starts lost workers again; None: the others score their groups.
            judge_start_s: Longest time in which a judge that has died is replaced.
        """
        self.workers = tuple(workers)
        self._timeout_s = timeout_s
        self._replacer = replacer
        self._judge_start_s = judge_start_s
        self._replacing: dict[str, asyncio.Task[None]] = {}
        self._lost: WorkerError | None = None
        """Why the last worker was not replaced."""
        self._busy = dict.fromkeys(self.workers, 0)
        self._call_ended = asyncio.Event()
        self._faults = FaultLog()

    @property
    def names(self) -> list[str]:
        """Workers that receive groups, or are being replaced."""
        return [*(worker.name for worker in self.workers), *self._replacing]

    def join(self, worker: WorkerHandle[Reward]) -> None:
        """Adds a started worker."""
        self._busy[worker] = 0
        self.workers = (*self.workers, worker)

    async def retire(self, name: str) -> None:
        """Sends the worker no more groups, and waits until its running calls have ended."""
        leaving = [worker for worker in self.workers if worker.name == name]
        self.workers = tuple(worker for worker in self.workers if worker.name != name)
        while any(self._busy[worker] for worker in leaving):
            self._call_ended.clear()
            await self._call_ended.wait()

    async def close(self) -> None:
        """Starts no more workers."""
        for task in self._replacing.values():
            task.cancel()
        await asyncio.gather(*self._replacing.values(), return_exceptions=True)

    async def score(self, rollouts: TableRef) -> tuple[RewardSummary, TableRef]:
        """Scores one group on the least-loaded worker. Without a judge the group waits until there is one again.

        A worker that is lost receives no more groups, and another one, or its replacement, scores the group.

        Returns:
            Rewards by sample, and a reference to the REWARDS table.

        Raises:
            WorkerError: The call failed, every worker was lost and none can be replaced, or there is no judge for too
                long.
        """
        deadline = asyncio.get_running_loop().time() + self._judge_start_s + self._timeout_s
        while True:
            try:
                summary, table = await self._on_a_worker(
                    lambda worker: worker.call_for_table(Reward.score, self._timeout_s, rollouts)
                )
            except JudgeLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_JUDGE_PAUSE_S)
            else:
                self._faults.note(summary.faults)
                return summary, table

    async def write(self, path: str, step: int, tables: Sequence[TableRef], timeout_s: float) -> None:
        """Writes the samples of a step as Parquet, on the least-loaded worker; raises WorkerError if that fails."""
        await self._on_a_worker(lambda worker: worker.call(Reward.write_trajectories, timeout_s, path, step, *tables))

    async def write_evaluation(self, path: str, step: int, tables: Sequence[TableRef]) -> None:
        """Writes the samples of an evaluation as Parquet, on the least-loaded worker; raises WorkerError."""
        await self._on_a_worker(
            lambda worker: worker.call(Reward.write_evaluation, self._timeout_s, path, step, *tables)
        )

    async def _on_a_worker(self, call: Callable[[WorkerHandle[Reward]], Awaitable[T]]) -> T:
        """The result of a call on the least-loaded worker; a lost worker's call is repeated on another one."""
        while True:
            worker = await self._least_loaded()
            try:
                with self._busy_during(worker):
                    return await call(worker)
            except (WorkerDied, WorkerTimeout) as error:
                self._lose(worker, error)

    async def _least_loaded(self) -> WorkerHandle[Reward]:
        """The worker with the fewest calls; waits for a replacement where there is none. Raises WorkerError."""
        while not self.workers:
            if not self._replacing:
                raise self._lost or WorkerError("reward", "score", "there is no worker")
            await asyncio.wait(self._replacing.values(), return_when=asyncio.FIRST_COMPLETED)
        return min(self.workers, key=lambda worker: self._busy[worker])

    def _lose(self, worker: WorkerHandle[Reward], lost: WorkerError) -> None:
        """Sends a worker no more groups, and begins to replace it, unless that was done before."""
        if worker not in self.workers:
            return
        self.workers = tuple(other for other in self.workers if other is not worker)
        replacer = self._replacer
        if replacer is None:
            logger.warning("%s receives no more groups: %s", worker.name, lost)
            self._lost = lost
            return

        async def start() -> None:
            try:
                self.join(await replacer.replace(worker, lost))
            except WorkerError as error:
                logger.error("%s", error)
                self._lost = error
            finally:
                del self._replacing[worker.name]

        self._replacing[worker.name] = asyncio.create_task(start(), name=f"replace {worker.name}")

    @contextmanager
    def _busy_during(self, worker: WorkerHandle[Reward]) -> Iterator[None]:
        """Counts a call of the worker while the block runs."""
        self._busy[worker] += 1
        try:
            yield
        finally:
            self._busy[worker] -= 1
            self._call_ended.set()


_Waiting = tuple[list[int], TableRef, asyncio.Future[tuple[TableRef, ...]]]
"""Lengths of a group's samples (tokens), their table, and the future that receives the scores."""


class TokenScorer:
    """Scores the tokens of groups in waves on one worker group.

    A task runs while groups are waiting. It takes all of them as one wave, waits for the ranks to score it, and ends
    when no group is waiting; the next call of `score` starts it again.
    """

    def __init__(
        self,
        group: WorkerGroup[Any],
        score: ScoreTokens,
        timeout_s: float,
        replacer: Replacer[Any] | None = None,
    ) -> None:
        """Scores nothing yet.

        Args:
            group: The ranks.
            score: A method of the group.
            timeout_s: Bound on a wave.
            replacer: Starts lost workers again, if they are independent of each other; None: their loss is an error.
        """
        self._replacer = replacer
        self.group = group
        self._score_tokens = score
        self._timeout_s = timeout_s
        self._waiting: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._wave_lock = asyncio.Lock()
        """Held while a wave is being scored."""

    async def resize(self, change: Callable[[Sequence[WorkerHandle[Any]]], Sequence[WorkerHandle[Any]]]) -> None:
        """Changes the workers of the group between two waves; removed workers are idle when this returns."""
        async with self._wave_lock:
            self.group.workers = tuple(change(self.group.workers))

    async def score(self, lengths: list[int], rollouts: TableRef) -> tuple[TableRef, ...]:
        """Scores one group.

        Args:
            lengths: Tokens of each sample, prompt included.
            rollouts: The group's ROLLOUTS table.

        Returns:
            The token-score tables of the group's wave, one per rank.

        Raises:
            WorkerError: The wave failed.
        """
        future: asyncio.Future[tuple[TableRef, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append((lengths, rollouts, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Scores one wave after another until no group is waiting."""
        # One turn of the event loop lets groups that finished together join the first wave.
        await asyncio.sleep(0)
        while self._waiting:
            async with self._wave_lock:
                wave, self._waiting = self._waiting, []
                await self._score(wave)

    async def _score(self, wave: Sequence[_Waiting]) -> None:
        """Scores a wave; every group in it receives the same tables or the same error."""
        lengths = [length for group, _, _ in wave for length in group]
        plans = plan_ranks(lengths, range(len(lengths)), self.group.ranks, self.group.micro_batch_tokens)
        try:
            results = await self._on_all_ranks(plans, [ref for _, ref, _ in wave])
        except WorkerError as error:
            for _, _, future in wave:
                if not future.done():
                    future.set_exception(error)
            return
        tables = tuple(table for _, table in results)
        for _, _, future in wave:
            if not future.done():
                future.set_result(tables)

    async def _on_all_ranks(self, plans: Sequence[RankPlan], tables: Sequence[TableRef]) -> Scores:
        """The scores of a wave; it is scored again where a lost worker has been replaced. Raises WorkerError."""
        while True:
            try:
                return await self._score_tokens(plans, *tables, timeout_s=self._timeout_s)
            except (WorkerDied, WorkerTimeout) as error:
                if self._replacer is None:
                    raise
                workers = self.group.workers
                (lost,) = [worker for worker in workers if worker.name == error.worker]
                new = await self._replacer.replace(lost, error)
                self.group.workers = tuple(new if worker is lost else worker for worker in workers)


class Scorer:
    """Scores finished groups with the reward workers and all token scorers."""

    def __init__(self, rewards: RewardPool, token_scorers: Sequence[TokenScorer]) -> None:
        self.rewards = rewards
        self.token_scorers = tuple(token_scorers)

    async def score(self, summary: GroupSummary, rollouts: TableRef, row: int) -> ScoredGroup:
        """Scores one group with all of them concurrently.

        Args:
            summary: The group's summary.
            rollouts: The group's ROLLOUTS table.
            row: Row of the prompt in the prompt pool.

        Raises:
            WorkerError: The first call that failed; the others are cancelled.
        """
        lengths = row_lengths(summary)
        (rewards, reward_table), *tokens = await gather_all(
            [self.rewards.score(rollouts), *(scorer.score(lengths, rollouts) for scorer in self.token_scorers)]
        )
        group = ScoredGroup(
            summary, rewards, rollouts, reward_table, tuple(ref for refs in tokens for ref in refs), row
        )
        if not summary.candidates:
            return group
        own = len(summary.samples)
        return replace(group, rewards=rewards.part(0, own), candidates=rewards.part(own))


def row_lengths(summary: GroupSummary) -> list[int]:
    """Tokens of every row of the group's ROLLOUTS table, prompt included."""
    return [length for sample in (*summary.samples, *summary.candidates) for length in sample.row_lengths]
