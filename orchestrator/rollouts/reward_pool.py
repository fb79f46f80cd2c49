"""The reward workers: groups that finish together share a call to one of them, and faults are warned about once."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import JudgeLost
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.training.ledger import kind_of
from troupe.workers.contract.messages import (
    SHARED_CALL_S,
    Fault,
    KeepRequest,
    KeptTable,
    ReferenceScores,
    RewardRequest,
    RewardSummary,
    ScoredGroups,
    Unscored,
)
from troupe.workers.contract.roles import Reward, TableRef

logger = logging.getLogger(__name__)

_JUDGE_PAUSE_S = 1.0
_CALLS_AT_ONCE = 2
"""Calls that a reward worker has: while it serves one, the next is there already, and no round trip divides them."""
_GROUPS_IN_A_CALL = 16
"""Most groups that share a call to a reward worker. Of a call for each of them the driver would pay the most."""


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
        self._offsets: Mapping[str, Mapping[str, float]] = {}
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
        request = RewardRequest(rewards, vote, self._offsets.get(rewards, {}))
        while True:
            group = _Unscored(rollouts, request, loop.create_future())
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

    def set_offsets(self, offsets: Mapping[str, Mapping[str, float]]) -> None:
        """Takes measured offsets, by the set of reward functions, then by reward model."""
        self._offsets = offsets

    async def score_references(self, model: str, references: TableRef) -> ReferenceScores:
        """Scores reference answers on the least-loaded worker; see `Reward.score_references`. Raises WorkerError."""

        async def ask(worker: WorkerHandle[Reward]) -> ReferenceScores:
            async with self._room[worker]:
                timeout_s = _CALLS_AT_ONCE * self._timeout_s
                return await worker.call(Reward.score_references, timeout_s, model, references)

        return await self.call(ask)

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
