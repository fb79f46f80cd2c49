"""Scoring: sends a finished group to a reward worker and to every model that scores tokens, concurrently.

Reward workers are independent: the least-loaded one scores the group. Models that score tokens (the reference, and
policy and critic unless they train at the same time) are worker groups whose ranks share each call. Groups that finish
while such a call is running form the next wave, so waves grow when scoring is slower than generation. Reward and
reference workers can be added and removed during a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import Scores, ScoreTokens, WorkerGroup
from troupe.orchestrator.errors import WorkerDied, WorkerError, WorkerTimeout
from troupe.orchestrator.pools.replicas import ReplicaPool
from troupe.orchestrator.rollouts.reward_pool import FaultLog, RewardPool
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.training.batch import plan_rows
from troupe.workers.contract.environments import OK
from troupe.workers.contract.messages import (
    Fault,
    GroupSummary,
    RewardSummary,
)
from troupe.workers.contract.rewards import differ
from troupe.workers.contract.roles import TableRef


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
    unscored: Mapping[int, str] = field(default_factory=dict)
    """Why samples (and candidates) lost their reward: a model has no finite score of a token. By index."""

    @property
    def failures(self) -> list[tuple[int, str]]:
        """(index, reason) of the samples that have no reward."""
        own = enumerate(zip(self.summary.samples, self.rewards.statuses, strict=True))
        scored = [(i, status, i in self.unscored or sample.status != OK) for i, (sample, status) in own]
        return [(i, status if before else f"reward: {status}") for i, status, before in scored if status != OK]

    def without(self, unscored: Mapping[int, str]) -> ScoredGroup:
        """The group without the rewards of samples and candidates, which have these statuses instead, by index."""
        own = len(self.rewards.statuses)
        others = {index - own: why for index, why in unscored.items()}
        candidates = None if self.candidates is None else self.candidates.without(others)
        unscored = {**self.unscored, **unscored}
        return replace(self, rewards=self.rewards.without(unscored), candidates=candidates, unscored=unscored)

    def paired(self) -> ScoredGroup:
        """The group without the rewards of samples whose partner, the reference's response of the same number, has
        none: it gives them no advantage."""
        partners = () if self.candidates is None else self.candidates.statuses
        own = enumerate(zip(self.rewards.statuses, partners, strict=False))
        alone = {i: f"response of the reference: {why}" for i, (status, why) in own if status == OK and why != OK}
        return self.without(alone) if alone else self

    @cached_property
    def truncated(self) -> frozenset[int]:
        """Indices of the samples that were cut at the longest response."""
        return frozenset([s.sample_index for s in self.summary.samples if s.finish_reason == "length"])

    @property
    def has_signal(self) -> bool:
        """Whether the rewards of its samples and candidates, or of their steps, differ; in a game, those of a player's
        samples."""
        others = () if self.candidates is None else self.candidates.rewards
        return self.rewards.steps_differ or self.differs((*self.rewards.rewards, *others))

    def differs(self, values: Sequence[float | None]) -> bool:
        """Whether the values of its samples (and candidates) differ; in a game, those of a player's samples."""
        if not self.players:
            return differ([value for value in values if value is not None])
        return any(differ([v for i in own if (v := values[i]) is not None]) for own in self.players.values())

    @cached_property
    def players(self) -> dict[str, list[int]]:
        """Indices of the samples by the player of a game whose part they are, or empty if there are no players."""
        found: dict[str, list[int]] = {}
        for sample in self.summary.samples:
            if sample.player:
                found.setdefault(sample.player, []).append(sample.sample_index)
        return found

    @property
    def least_rewarded(self) -> int:
        """Samples that have a reward; in a game, those of the player with the fewest."""
        rewarded = set(self.rewarded)
        return min((len(rewarded.intersection(own)) for own in self.players.values()), default=len(rewarded))

    @cached_property
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
    """Decides which groups are worth training on (dynamic sampling: DAPO, arXiv 2503.14476, sec. 3.2)."""

    keep: Callable[[RewardSummary], bool] | None = None
    """The user's filter, used instead of the comparison of rewards."""

    def problem(self, group: ScoredGroup, settings: GroupSettings) -> str:
        """Why the group is worth replacing, or empty if it is not. `settings`: the source's settings: which component
        must differ between the samples, and whether truncated ones carry no loss."""
        component = settings.signal_in
        if self.keep is not None:
            if not self.keep(group.rewards):
                return "the algorithm's keep_group refused the group"
        elif component is None:
            if not group.has_signal:
                return "all rewards of the group are equal"
        elif not group.differs(
            [
                value if reward is not None else None
                for value, reward in zip(group.rewards.components[component], group.rewards.rewards, strict=True)
            ]
        ):
            return f"all values of {component} in the group are equal"
        if settings.mask_truncated and group.truncated.issuperset(group.rewarded):
            return "all samples of the group are truncated"
        return ""


@dataclass(frozen=True)
class WaveScores:
    """The scores of a wave."""

    tables: tuple[TableRef, ...]
    """Token-score tables, one per rank."""
    failed: Mapping[tuple[str, int], str]
    """Why samples have no finite score, by (prompt_uid, sample_index)."""


_Waiting = tuple[list[int], TableRef, asyncio.Future[WaveScores]]
"""Lengths of a group's samples (tokens), their table, and the future that receives the scores."""


class TokenScorer:
    """Scores the tokens of groups in waves on one worker group. A task runs while groups are waiting. It takes all of
    them as one wave, waits for the ranks to score it, and ends when no group is waiting; the next call of `score`
    starts it again."""

    def __init__(
        self,
        group: WorkerGroup[Any],
        score: ScoreTokens,
        timeout_s: float,
        pool: ReplicaPool[Any] | None = None,
        sources: Sequence[str] | None = None,
    ) -> None:
        """Scores nothing yet. `pool`: the workers of the group, if they are independent of each other: it replaces lost
        ones, and workers join and leave the group between two waves. If None, the group does not change, and losing a
        worker is an error."""
        self.role = group.role
        """The role of the ranks."""
        self._sources = sources
        self._group = group
        self._pool = pool
        self._score_tokens = score
        self._timeout_s = timeout_s
        self._waiting: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None

    def scores(self, source: str) -> bool:
        return self._sources is None or source in self._sources

    async def score(self, lengths: list[int], rollouts: TableRef) -> WaveScores:
        """Scores one group. `lengths`: tokens of each sample, prompt included. Raises WorkerError if the wave
        failed."""
        future: asyncio.Future[WaveScores] = asyncio.get_running_loop().create_future()
        self._waiting.append((lengths, rollouts, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        """Scores one wave after another until no group is waiting."""
        # One iteration of the event loop lets groups that finished together join the first wave.
        await asyncio.sleep(0)
        while self._waiting:
            wave, self._waiting = self._waiting, []
            await self._score(wave)

    async def _score(self, wave: Sequence[_Waiting]) -> None:
        """Scores a wave; every group in it receives the same scores or the same error."""
        lengths = [length for group, _, _ in wave for length in group]
        rollouts = [ref for _, ref, _ in wave]
        try:
            if self._pool is None:
                results = await self._on_all_ranks(lengths, rollouts)
            else:
                results = await self._on_pool(self._pool, lengths, rollouts)
        except WorkerError as error:
            for _, _, future in wave:
                if not future.done():
                    future.set_exception(error)
            return
        failed = {key: why for summary, _ in results for key, why in summary.failed.items()}
        scores = WaveScores(tuple(table for _, table in results), failed)
        for _, _, future in wave:
            if not future.done():
                future.set_result(scores)

    async def _on_all_ranks(self, lengths: Sequence[int], rollouts: Sequence[TableRef]) -> Scores:
        plans = plan_rows(lengths, self._group)
        return await self._score_tokens(plans, *rollouts, timeout_s=self._timeout_s)

    async def _on_pool(self, pool: ReplicaPool[Any], lengths: Sequence[int], rollouts: Sequence[TableRef]) -> Scores:
        """The scores of a wave on the workers that serve; repeated after a lost worker was replaced."""
        while True:
            workers = pool.serving
            if not workers:
                raise pool.exhausted()
            self._group.workers = tuple(workers)
            try:
                with pool.busy(*workers):
                    return await self._on_all_ranks(lengths, rollouts)
            except (WorkerDied, WorkerTimeout) as error:
                (lost,) = [worker for worker in workers if worker.name == error.worker]
                await pool.lose(lost, error)
                await pool.until_started(lost.name)
                if lost.name not in pool.names:
                    raise pool.exhausted() from error


class Scorer:
    """Scores finished groups with the reward workers and all token scorers."""

    def __init__(self, rewards: RewardPool, token_scorers: Sequence[TokenScorer]) -> None:
        self.rewards = rewards
        self.token_scorers = tuple(token_scorers)
        self._faults = FaultLog("role")

    async def score(self, summary: GroupSummary, rollouts: TableRef, row: int, settings: GroupSettings) -> ScoredGroup:
        """Scores one group concurrently with all that score its source. Raises the WorkerError of the
        first call that failed; the others are cancelled."""
        scorers = [scorer for scorer in self.token_scorers if scorer.scores(settings.source)]
        lengths = row_lengths(summary) if scorers else []
        calls = (scorer.score(lengths, rollouts) for scorer in scorers)
        results: list[Any] = await gather_all([self.rewards.score(rollouts, settings.rewards), *calls])
        (rewards, reward_table), *tokens = results
        failed = {
            index: f"{scorer.role}: {why}"
            for scorer, scores in zip(scorers, tokens, strict=True)
            for (uid, index), why in scores.failed.items()
            if uid == summary.prompt_uid and rewards.rewards[index] is not None
        }
        tables = tuple(ref for scores in tokens for ref in scores.tables)
        group = ScoredGroup(summary, rewards, rollouts, reward_table, tables, row)
        if summary.candidates:
            own = len(summary.samples)
            group = replace(group, rewards=rewards.part(0, own), candidates=rewards.part(own))
        if failed:
            self._faults.note(Fault(why, f"{summary.prompt_uid}[{index}]", 1) for index, why in failed.items())
            group = group.without(failed)
        return group


def row_lengths(summary: GroupSummary) -> list[int]:
    """Tokens of every row of the group's ROLLOUTS table, prompt included."""
    return [length for sample in (*summary.samples, *summary.candidates) for length in sample.row_lengths]
