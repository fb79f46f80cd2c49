"""Lost reward and reference workers are replaced, and what they were asked is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.clock import on_virtual_time
from tests.fakes import FakePolicy, FakeReward, FakeTable, FaultyWorker
from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.errors import JudgeLost, WorkerDied, WorkerError
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.rollouts.scoring import RewardPool, TokenScorer

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
        assert started.workers[1].calls.count("score") == 5
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
            return await super().score(rollouts, rewards, vote)

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
        why = r"reward-0.score: the process is gone \(2 of 2 restarts used: failures.reward_restarts\)"
        with pytest.raises(WorkerError, match=why):
            await pool.score(TABLE)

    with_pool(test)


def test_a_group_waits_for_its_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.orchestrator.rollouts.scoring._JUDGE_PAUSE_S", 0.01)

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
        assert len(summary.rewards) == 4 and worker.calls == ["score"] * 4
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
