"""Scoring: sends a finished group to a reward worker and to every model that scores tokens, concurrently.

Reward workers are independent: the least-loaded one scores the group. Models that score tokens (the reference, and
policy and critic unless they train at the same time) are worker groups whose ranks share each call. Groups that finish
while such a call is running form the next wave, so waves grow when scoring is slower than generation. Reward and
reference workers can be added and removed during a run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import Scores, ScoreTokens, WorkerGroup, WorkerHandle
from troupe.orchestrator.errors import JudgeLost, WorkerDied, WorkerError, WorkerTimeout
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.training.batch import plan_rows
from troupe.orchestrator.training.ledger import kind_of
from troupe.workers.contract.environments import OK
from troupe.workers.contract.messages import (
    SHARED_CALL_S,
    Fault,
    GroupSummary,
    KeepRequest,
    KeptTable,
    RewardRequest,
    RewardSummary,
    ScoredGroups,
    Unscored,
)
from troupe.workers.contract.rewards import differ
from troupe.workers.contract.roles import Reward, TableRef

logger = logging.getLogger(__name__)

_JUDGE_PAUSE_S = 1.0
_CALLS_AT_ONCE = 2
"""Calls that a reward worker has: while it serves one, the next is there already, and no round trip divides them."""
_GROUPS_IN_A_CALL = 16
"""Most groups that share a call to a reward worker. Of a call for each of them the driver would pay the most."""


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


@dataclass(eq=False)
class _Unscored:
    """A group that waits for its rewards."""

    rollouts: TableRef
    request: RewardRequest
    scored: asyncio.Future[tuple[RewardSummary, TableRef]]


class RewardPool(ReplicaPool[WorkerHandle[Reward]]):
    """The reward workers; the least-loaded one scores each group. Groups that wait in the same turn of the event loop
    share a call if they are scored fast enough (`SHARED_CALL_S`). A worker has `_CALLS_AT_ONCE` calls at most, and for
    each of them the time of one group: if reward functions time out, groups wait long for each other, and the worker
    is not lost."""

    def __init__(
        self,
        workers: Sequence[WorkerHandle[Reward]],
        timeout_s: float,
        launch: Callable[[str], Awaitable[WorkerHandle[Reward]]] | None = None,
        budget: RestartBudget | None = None,
        judge_start_s: float = 0.0,
    ) -> None:
        """Creates the pool (see `ReplicaPool`). `judge_start_s`: longest time to replace a judge that has died."""
        super().__init__(workers, launch, budget)
        self._timeout_s = timeout_s
        self._judge_start_s = judge_start_s
        self._faults = FaultLog("reward function")
        room = partial(asyncio.Semaphore, _CALLS_AT_ONCE)
        self._room: defaultdict[WorkerHandle[Reward], asyncio.Semaphore] = defaultdict(room)
        self._waiting: deque[_Unscored] = deque()
        self._shared_calls: set[asyncio.Task[None]] = set()
        self._sending = False
        """Whether `_send` runs in the next turn of the event loop."""
        self._group_s = math.inf
        """Longest time of a group of the last call (seconds)."""

    async def score(
        self, rollouts: TableRef, rewards: str = "", *, vote: bool = False
    ) -> tuple[RewardSummary, TableRef]:
        """Scores one group on the least-loaded worker. Without a judge the group waits until there is one again.
        Returns rewards by sample, and a reference to the REWARDS table. Raises WorkerError if the call failed, every
        worker was lost and none can be replaced, or there is no judge for too long. `rewards`: name of a set of reward
        functions in `ScoringConfig.sets`, or empty for the role's."""
        loop, deadline = asyncio.get_running_loop(), None
        while True:
            group = _Unscored(rollouts, RewardRequest(rewards, vote), loop.create_future())
            self._waiting.append(group)
            self._send_soon()
            try:
                summary, table = await group.scored
            except JudgeLost:
                now = loop.time()
                deadline = now + self._judge_start_s + self._timeout_s if deadline is None else deadline
                if now > deadline:
                    raise
                await asyncio.sleep(_JUDGE_PAUSE_S)
            else:
                self._faults.note(summary.faults)
                return summary, table

    def _add(self, worker: WorkerHandle[Reward]) -> None:
        super()._add(worker)
        self._send_soon()

    def _send_soon(self) -> None:
        """Lets `_send` run when all tasks that are ready have run: their groups share calls."""
        if self._waiting and not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Begins calls while groups wait and workers have room. The end of a call, or a worker that joins, unblocks the
        rest."""
        self._sending = False
        room = max(1, _CALLS_AT_ONCE * len(self.serving))
        while len(self._shared_calls) < room and (groups := self._take()):
            task = asyncio.create_task(self._score_groups(groups), name="score")
            self._shared_calls.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._shared_calls.discard(task)
        self._send_soon()

    def _take(self) -> list[_Unscored]:
        """The groups of the next call, which are not cancelled; empty if none waits."""
        groups: list[_Unscored] = []
        most = min(_GROUPS_IN_A_CALL, max(1, SHARED_CALL_S // max(self._group_s, 1e-9)))
        while self._waiting and len(groups) < most:
            if not (group := self._waiting.popleft()).scored.done():
                groups.append(group)
        return groups

    async def _score_groups(self, groups: list[_Unscored]) -> None:
        """Scores groups in one call, or, if it fails, each alone. Those that the worker has not begun wait again."""
        asked, rollouts = [group.request for group in groups], [group.rollouts for group in groups]

        async def ask(worker: WorkerHandle[Reward]) -> tuple[ScoredGroups, list[TableRef]]:
            async with self._room[worker]:
                timeout_s = min(self._calls[worker], _CALLS_AT_ONCE) * self._timeout_s
                return await worker.call_for_tables(Reward.score_groups, len(groups), timeout_s, asked, *rollouts)

        try:
            scored, tables = await self.call(ask)
        except Exception as error:
            if len(groups) > 1:  # only the group that made the call fail should
                for group in groups:
                    await self._score_groups([group])
            elif not groups[0].scored.done():
                groups[0].scored.set_exception(error)
            return
        self._group_s = max(summary.seconds for summary in scored.groups)
        for group, summary, table in zip(groups, scored.groups, tables, strict=False):
            if not group.scored.done():
                group.scored.set_result((summary, table))
        self._waiting.extendleft(reversed(groups[len(scored.groups) :]))

    async def write(
        self, path: str, step: int, tables: Sequence[TableRef], timeout_s: float, unscored: Unscored
    ) -> None:
        """Makes the least-loaded worker write a step's samples; see `Reward.write_trajectories`. Raises WorkerError."""
        await self.call(lambda worker: worker.call(Reward.write_trajectories, timeout_s, path, step, unscored, *tables))

    async def write_evaluation(self, path: str, step: int, tables: Sequence[TableRef]) -> None:
        """Writes the samples of an evaluation as Parquet, on the least-loaded worker; raises WorkerError."""
        await self.call(lambda worker: worker.call(Reward.write_evaluation, self._timeout_s, path, step, *tables))

    async def keep_groups(
        self, folder: str, request: KeepRequest, tables: Sequence[TableRef], timeout_s: float
    ) -> tuple[dict[str, KeptTable], ...]:
        """Makes the least-loaded worker write groups for a later run; see `Reward.keep_groups`. Raises WorkerError."""
        return await self.call(lambda worker: worker.call(Reward.keep_groups, timeout_s, folder, request, *tables))

    async def read_group(self, folder: str, kept: KeptTable) -> TableRef:
        """A table of a group that `keep_groups` wrote, read by the least-loaded worker. Raises WorkerError."""
        _, table = await self.call(
            lambda worker: worker.call_for_table(Reward.read_group, self._timeout_s, folder, kept)
        )
        return table


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


class FaultLog:
    """Warns about each cause when it first occurs, and when its count of samples reaches 10, 100, 1000, ..."""

    def __init__(self, what: str) -> None:
        """`what`: the kind of the causes."""
        self._what = what
        self._samples: Counter[str] = Counter()

    def note(self, faults: Iterable[Fault]) -> None:
        """Counts the faults of one group."""
        for fault in faults:
            cause = kind_of(fault.cause)
            before, after = self._samples[cause], self._samples[cause] + fault.samples
            self._samples[cause] = after
            if not before:
                logger.warning("%s %s: a sample has no reward: %s", self._what, fault.cause, fault.example)
            elif len(str(after)) > len(str(before)):
                logger.warning("%s %s: %d samples so far", self._what, cause, after)
