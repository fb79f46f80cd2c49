"""Lost reward and reference workers are replaced, and what they were asked is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.clock import on_virtual_time
from tests.fakes import FakePolicy, FakeReward, FakeTable, FaultyWorker
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.errors import DataLost, JudgeLost, WorkerDied, WorkerError
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.workers.contract.messages import RewardRequest, ScoredGroups

TABLE = FakeTable("rollouts", ("p0",), samples=4)


class Started:
    """Starts workers, and remembers them."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.workers: list[FaultyWorker[Any]] = []
        self.fail = 0

    async def launch(self, name: str) -> FaultyWorker[Any]:
        await asyncio.sleep(0.01)
        if self.fail:
            self.fail -= 1
            raise WorkerDied(name, "start", "out of memory")
        self.workers.append(FaultyWorker(name, self._make()))
        return self.workers[-1]


def with_pool(test: Callable[[RewardPool, Started], Awaitable[None]], workers: int = 1, restarts: int = 2) -> None:
    async def run() -> None:
        started = Started(FakeReward)
        first = [await started.launch(f"reward-{number}") for number in range(workers)]
        pool = RewardPool(first, 0.2, started.launch, RestartBudget("reward", restarts), judge_start_s=5.0)
        try:
            await test(pool, started)
        finally:
            await pool.close()

    on_virtual_time(run())


@pytest.mark.parametrize("frozen", [False, True], ids=["dead", "frozen"])
def test_a_lost_reward_worker_is_replaced_and_scores_its_groups_again(frozen: bool) -> None:
    async def test(pool: RewardPool, started: Started) -> None:
        if frozen:
            started.workers[0].frozen = True
        else:
            started.workers[0].kill()
        scored = await asyncio.gather(*(pool.score(TABLE) for _ in range(5)))
        assert [len(summary.rewards) for summary, _ in scored] == [4] * 5
        assert len(started.workers) == 2 and started.workers[0].dead
        assert started.workers[1].calls == ["score_groups"] * 3, "two alone, and then three that wait"
        assert pool.names == ["reward-0"]

    with_pool(test)


def test_a_group_that_waits_for_others_of_its_worker_is_no_loss() -> None:
    """Samples whose reward function times out take a worker that long, one after the other."""

    class Slow(FakeReward):
        def __init__(self) -> None:
            self.turn = asyncio.Lock()

        async def score(self, rollouts: FakeTable, rewards: str = "", vote: bool = False) -> Any:
            async with self.turn:
                await asyncio.sleep(0.7)
                return await super().score(rollouts, rewards, vote)

    async def run() -> None:
        worker = FaultyWorker("reward-0", Slow())
        pool = RewardPool([worker], timeout_s=1.0)
        scored = await asyncio.gather(*(pool.score(TABLE) for _ in range(8)))
        assert len(scored) == 8 and not worker.dead

    on_virtual_time(run())


def test_a_worker_has_the_next_group_while_it_scores_one() -> None:
    """A round trip between two groups would leave it idle; with more groups, a loss would be noticed later."""
    present: list[int] = []

    class Counting(FakeReward):
        def __init__(self) -> None:
            self.turn, self.groups = asyncio.Lock(), 0

        async def score(self, rollouts: FakeTable, rewards: str = "", vote: bool = False) -> Any:
            self.groups += 1
            async with self.turn:
                await asyncio.sleep(0.1)
                present.append(self.groups)
                self.groups -= 1
            summary, table = await super().score(rollouts, rewards, vote)
            return replace(summary, seconds=0.1), table

    async def run() -> None:
        pool = RewardPool([FaultyWorker("reward-0", Counting())], timeout_s=1.0)
        await asyncio.gather(*(pool.score(TABLE) for _ in range(6)))

    on_virtual_time(run())
    assert present == [2, 2, 2, 2, 2, 1], "with the group that it has scored"


@pytest.mark.parametrize("groups", [1, 4])
def test_a_frozen_worker_is_lost_within_the_time_of_the_groups_that_it_has(groups: int) -> None:
    async def test(pool: RewardPool, started: Started) -> None:
        await pool.score(TABLE)
        started.workers[0].frozen = True
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(pool.score(TABLE) for _ in range(groups)))
        assert asyncio.get_running_loop().time() - began < 0.25, "the first of them has the time of one"
        assert started.workers[0].dead

    with_pool(test)


class Recording(FakeReward):
    """Records the groups of its calls."""

    def __init__(self, takes_s: float = 0.0, says_s: float = 0.0) -> None:
        """What a group takes, and what its summary says of that."""
        self.takes_s, self.says_s = takes_s, says_s
        self.calls: list[list[str]] = []
        self.lost = ""

    async def score_groups(self, asked: Sequence[RewardRequest], *rollouts: FakeTable) -> tuple[ScoredGroups, Any]:
        self.calls.append([table.uids[0] for table in rollouts])
        if self.lost in self.calls[-1]:
            raise DataLost("reward-0", "score_groups", "the node is gone")
        return await super().score_groups(asked, *rollouts)

    async def score(self, rollouts: FakeTable, rewards: str = "", vote: bool = False) -> Any:
        await asyncio.sleep(self.takes_s)
        summary, _ = await super().score(rollouts, rewards, vote)
        return replace(summary, seconds=self.says_s), FakeTable(rewards, rollouts.uids)


async def answers(pool: RewardPool, uids: Sequence[str]) -> list[str]:
    """What groups that finish together get: for each (uid of the summary, its table), or the class of its error."""
    tables = [FakeTable("rollouts", (uid,)) for uid in uids]
    scored = await asyncio.gather(
        *(pool.score(table, f"of {table.uids[0]}") for table in tables), return_exceptions=True
    )
    return [
        type(one).__name__ if isinstance(one, BaseException) else f"{one[0].prompt_uid} {one[1].kind} {one[1].uids[0]}"
        for one in scored
    ]


def own(uids: Sequence[str]) -> list[str]:
    return [f"{uid} of {uid} {uid}" for uid in uids]


def test_groups_that_finish_together_share_a_call_and_get_their_own_answers() -> None:
    reward, uids = Recording(), [f"p{number}" for number in range(20)]

    async def run() -> None:
        pool = RewardPool([FaultyWorker("reward-0", reward)], 1.0)
        assert await answers(pool, ["first"]) == own(["first"])
        assert await answers(pool, uids) == own(uids)

    on_virtual_time(run())
    assert reward.calls == [["first"], uids[:16], uids[16:]]


@pytest.mark.parametrize("says_s", [0.011, 30.0])
def test_groups_that_take_a_worker_long_do_not_wait_for_each_other(says_s: float) -> None:
    reward, uids = Recording(says_s=says_s), ["a", "b", "c", "d"]

    async def run() -> None:
        pool = RewardPool([FaultyWorker("reward-0", reward)], 1.0)
        assert await answers(pool, uids) == own(uids)
        assert await answers(pool, uids) == own(uids)

    on_virtual_time(run())
    assert reward.calls == [[uid] for uid in (*uids, *uids)]


def test_groups_that_a_call_does_not_reach_wait_again_before_others() -> None:
    """They were fast before, and each now takes nearly the time after which a worker is lost."""
    reward, uids = Recording(takes_s=0.9), ["a", "b", "c"]

    async def run() -> None:
        worker = FaultyWorker("reward-0", reward)
        pool = RewardPool([worker], 1.0)
        await answers(pool, ["first"])
        scored = []
        for together in (uids, ["x"], ["y"]):  # the worker has room for two calls
            scored.append(asyncio.ensure_future(answers(pool, together)))
            await asyncio.sleep(0.1)
        assert [await one for one in scored] == [own(uids), own("x"), own("y")] and not worker.dead

    on_virtual_time(run())
    assert reward.calls == [["first"], uids, ["x"], ["b", "c", "y"], ["c", "y"], ["y"]]


def test_a_group_whose_data_are_lost_fails_alone() -> None:
    reward, uids = Recording(), ["a", "b", "c"]

    async def run() -> None:
        pool = RewardPool([FaultyWorker("reward-0", reward)], 1.0)
        await answers(pool, ["first"])
        reward.lost = "b"
        assert await answers(pool, uids) == [*own("a"), "DataLost", *own("c")]
        reward.lost = ""
        assert await answers(pool, uids) == own(uids)

    on_virtual_time(run())
    assert reward.calls == [["first"], uids, ["a"], ["b"], ["c"], uids], "only groups of a failed call are alone"


def test_a_group_that_nobody_waits_for_is_not_scored() -> None:
    reward = Recording()

    async def run() -> None:
        pool = RewardPool([FaultyWorker("reward-0", reward)], 1.0)
        await answers(pool, ["first"])
        kept, cancelled = (asyncio.ensure_future(answers(pool, [uid])) for uid in ("kept", "cancelled"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await kept == own(["kept"])

    on_virtual_time(run())
    assert "cancelled" not in reward.calls[-1]


def test_a_worker_that_joins_gets_the_groups_that_wait() -> None:
    """The only worker is frozen with two calls: nothing else would end before it is lost."""

    async def run() -> None:
        handles = [FaultyWorker(f"reward-{number}", Recording(says_s=1.0)) for number in range(2)]

        async def launch(name: str) -> FaultyWorker[Any]:
            return handles[1]

        pool = RewardPool(handles[:1], 9.0, launch)
        handles[0].frozen = True
        scored = asyncio.ensure_future(answers(pool, ["a", "b", "c", "d"]))
        await asyncio.sleep(0.1)
        await pool.join("reward-1")
        await asyncio.sleep(0.1)
        assert handles[1].target.calls == [["c"], ["d"]]
        handles[0].frozen = False
        assert await scored == own("abcd")

    on_virtual_time(run())


def test_groups_of_a_lost_worker_do_not_wait_for_its_replacement() -> None:
    async def test(pool: RewardPool, started: Started) -> None:
        started.workers[0].kill()
        await asyncio.gather(*(pool.score(TABLE) for _ in range(3)))
        assert sorted(pool.names) == ["reward-0", "reward-1"], "one serves, and one is being started"
        await asyncio.sleep(0.05)
        assert len(pool.workers) == 2

    with_pool(test, workers=2)


def test_a_replacement_that_does_not_start_costs_another_restart() -> None:
    async def test(pool: RewardPool, started: Started) -> None:
        started.fail = 1
        started.workers[0].kill()
        await pool.score(TABLE)
        started.workers[1].kill()
        why = r"reward-0.score_groups: the process is gone \(2 of 2 restarts used: failures.reward_restarts\)"
        with pytest.raises(WorkerError, match=why):
            await pool.score(TABLE)

    with_pool(test)


def test_a_group_waits_for_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.orchestrator.rollouts.reward_pool._JUDGE_PAUSE_S", 0.01)

    class Waiting(FakeReward):
        calls = 0

        async def score(self, rollouts: FakeTable, rewards: str = "", vote: bool = False) -> Any:
            self.calls += 1
            if self.calls < 4:
                raise JudgeLost("reward-0", "score", "no judge worker is running")
            return await super().score(rollouts, rewards, vote)

    async def run() -> None:
        worker = FaultyWorker("reward-0", Waiting())
        summary, _ = await RewardPool([worker], 1.0, judge_start_s=5.0).score(TABLE)
        assert len(summary.rewards) == 4 and worker.calls == ["score_groups"] * 4
        with pytest.raises(JudgeLost):
            await RewardPool([FaultyWorker("reward-0", Waiting())], 0.0, judge_start_s=0.0).score(TABLE)

    on_virtual_time(run())


@pytest.mark.parametrize("frozen", [False, True], ids=["dead", "frozen"])
def test_a_lost_rank_is_replaced_and_its_wave_is_scored_again(frozen: bool) -> None:
    async def run() -> None:
        started = Started(FakePolicy)
        ranks = [await started.launch(f"reference-{number}") for number in range(2)]
        group = PolicyGroup("reference", ranks, 4096)
        replicas = ReplicaPool(ranks, started.launch, RestartBudget("reference", 1))
        scorer = TokenScorer(group, group.compute_logprobs, 0.2, replicas)
        if frozen:
            ranks[1].frozen = True
        else:
            ranks[1].kill()
        tables = await asyncio.gather(*(scorer.score([8, 8], TABLE) for _ in range(3)))
        assert [len(found.tables) for found in tables] == [2, 2, 2], "one table for each rank"
        assert [worker.name for worker in group.workers] == ["reference-0", "reference-1"]
        assert group.workers[0] is ranks[0] and group.workers[1] is started.workers[2]
        ranks[0].kill()
        with pytest.raises(WorkerError, match=r"1 of 1 restarts used: failures\.reference_restarts"):
            await scorer.score([8], TABLE)

    on_virtual_time(run())
