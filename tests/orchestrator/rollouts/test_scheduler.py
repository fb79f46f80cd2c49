"""The scheduler against fakes: staleness, completeness, failures, fences."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from orchestrator import scheduler
from orchestrator.engine_pool import PoolBounds
from orchestrator.errors import BatchFailed, EnginesLost
from orchestrator.ledger import Ledger
from orchestrator.prompts import PromptPick
from orchestrator.scheduler import RolloutScheduler, SchedulePlan
from orchestrator.scoring import RewardPool, ScoredGroup, Scorer, TokenScorer
from orchestrator.weight_sync import FileSync
from tests.fakes import BOUNDS, FakeEngine, FakeHandle, FakePolicy, FakeReward, fake_pool, gang


class Stage:
    """A scheduler with everything around it."""

    def __init__(
        self,
        engines: int = 2,
        staleness: int = 0,
        steps: int = 6,
        groups: int = 5,
        reward: FakeReward | None = None,
        bounds: PoolBounds = BOUNDS,
        ledger: Ledger | None = None,
        version: int = 0,
        max_failed_fraction: float = 0.5,
        replaceable: int = 0,
        greedy_baseline: bool = False,
    ) -> None:
        self.engines = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(engines)]
        self.pool = fake_pool(self.engines, bounds)
        self.policy = FakePolicy()
        self.sync = FileSync(gang(self.policy), self.pool, 1.0)
        self.ledger = ledger or Ledger()
        reward = reward or FakeReward()
        scorer = Scorer(
            RewardPool([FakeHandle("reward-0", reward)], 1.0), [TokenScorer(gang(self.policy), "compute_logprobs", 1.0)]
        )
        rows = itertools.count()
        plan = SchedulePlan(groups, reward.samples, staleness, steps, 3, max_failed_fraction, 2, 17)
        plan = replace(plan, replaceable=replaceable, greedy_baseline=greedy_baseline)
        self.scheduler = RolloutScheduler(
            plan,
            self.pool,
            scorer,
            self.ledger,
            lambda: PromptPick(f"e0-r{(row := next(rows))}", row),
            None,
            version,
        )

    async def train(self, steps: int, update_s: float = 0.0) -> list[list[ScoredGroup]]:
        """The controller's loop without the learning."""
        self.scheduler.start()
        batches = []
        for step in range(self.scheduler.version, steps):
            batch = await asyncio.wait_for(self.scheduler.next_batch(), 10)
            await asyncio.sleep(update_s)
            for group in batch:
                for i, status in enumerate(group.rewards.statuses):
                    if status == "ok":
                        self.ledger.trained(group.summary.prompt_uid, i)
            await self.sync.push(step + 1)
            self.scheduler.advance(step + 1)
            batches.append(batch)
        await self.scheduler.close()
        await self.pool.close()
        self.ledger.check()
        return batches


def oldest(batch: list[ScoredGroup]) -> int:
    """Oldest version any token of the batch was sampled with."""
    return min(s.oldest_version for g in batch for s in g.summary.samples)


def test_synchronous_training_is_strictly_on_policy() -> None:
    """Staleness 0: every token of step v was sampled with version v, and nothing is generated beyond the last step."""
    stage = Stage(staleness=0)
    batches = asyncio.run(stage.train(6))
    for version, batch in enumerate(batches):
        assert {(s.oldest_version, s.newest_version) for g in batch for s in g.summary.samples} == {(version, version)}
    counts = stage.ledger.counts()
    assert counts == {"dispatched": 120, "trained": 120, "dropped": 0, "in_flight": 0, "retries": 0}


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_staleness_bound_holds_and_no_group_is_dropped_for_age(staleness: int) -> None:
    """With long tails and training that takes time, the bound holds, and generation really runs ahead."""
    stage = Stage(engines=3, staleness=staleness, steps=20)
    for engine in stage.engines:
        engine.mean_s = 0.004
    batches = asyncio.run(stage.train(20, update_s=0.004))
    ages = [version - oldest(batch) for version, batch in enumerate(batches)]
    assert max(ages) <= staleness
    assert max(ages) > 0
    assert stage.ledger.counts()["dropped"] == 0
    assert stage.ledger.counts()["trained"] == 20 * 5 * 4


def test_each_sample_is_trained_exactly_once_whatever_engines_do() -> None:
    """Engines that lose calls at random: retries, but the books balance and no prompt is trained twice."""
    stage = Stage(engines=3, staleness=2, steps=10)
    for engine in stage.engines:
        engine.fail_next = 2
    batches = asyncio.run(stage.train(10))
    uids = Counter(group.summary.prompt_uid for batch in batches for group in batch)
    assert set(uids.values()) == {1}
    assert len(uids) == 50
    assert stage.ledger.counts()["retries"] >= 6


def test_killed_engine_is_replaced_and_its_groups_run_again() -> None:
    """kill -9 of one of two engines in mid-run."""
    stage = Stage(engines=2, steps=6)

    async def run() -> list[list[ScoredGroup]]:
        async def assassin() -> None:
            await asyncio.sleep(0.005)
            stage.pool.engines[0].handle.kill()

        killer = asyncio.create_task(assassin())
        batches = await stage.train(6)
        await killer
        return batches

    batches = asyncio.run(run())
    assert sum(len(b) for b in batches) == 30
    assert stage.pool.restarts_used == 1


def test_frozen_engine_is_found_by_the_probe_and_its_late_result_is_fenced() -> None:
    """SIGSTOP: no answer to the probe, so it is quarantined; what it says later is of an abandoned attempt."""
    stage = Stage(engines=2, steps=3)

    async def run() -> list[list[ScoredGroup]]:
        handle = stage.pool.engines[0].handle
        assert isinstance(handle, FakeHandle)
        handle.frozen = True

        async def probe() -> None:
            await asyncio.sleep(0.01)
            await stage.pool.probe_all()

        prober = asyncio.create_task(probe())
        batches = await stage.train(3)
        await prober
        return batches

    batches = asyncio.run(run())
    assert sum(len(b) for b in batches) == 15
    assert stage.ledger.counts()["retries"] > 0
    assert not stage.ledger.is_current("e0-r0", 0)


def test_all_engines_dead_ends_the_run_with_one_error() -> None:
    """F4: no engine, no restart left: a typed error within the bound, not a wait."""
    bounds = replace(BOUNDS, restarts=0)
    stage = Stage(engines=2, bounds=bounds)
    for engine in stage.pool.engines:
        engine.handle.kill()
    with pytest.raises(EnginesLost, match="no rollout engine is left"):
        asyncio.run(stage.train(1))


def test_refused_prompts_are_dropped_counted_and_replaced() -> None:
    """A bad prompt costs nobody else anything."""
    stage = Stage(steps=2)
    for engine in stage.engines:
        engine.refuse_rows = frozenset({1, 3})
    batches = asyncio.run(stage.train(2))
    assert [len(b) for b in batches] == [5, 5]
    assert stage.ledger.drop_reasons() == {"prompt refused: too long": 8}


def test_only_refused_prompts_end_the_run() -> None:
    """Data of which no row is usable is an error, not an endless search."""
    stage = Stage(steps=2)
    for engine in stage.engines:
        engine.refuse_rows = frozenset(range(10_000))
    with pytest.raises(BatchFailed, match="prompts in a row were refused"):
        asyncio.run(stage.train(1))


def test_failed_rewards_mask_samples_and_drop_groups_that_become_too_small() -> None:
    """One failed sample is dropped alone; three of four leave no comparison, so the group is replaced."""
    reward = FakeReward(
        {("e0-r0", 1): "timeout after 5 s"} | {("e0-r2", i): "error: ValueError: no" for i in (0, 1, 2)}
    )
    stage = Stage(steps=1, reward=reward)
    batches = asyncio.run(stage.train(1))
    assert "e0-r2" not in {g.summary.prompt_uid for g in batches[0]}
    assert stage.ledger.drop_reasons() == {"reward: timeout after 5 s": 1, "reward: error: ValueError: no": 4}
    assert stage.ledger.counts()["trained"] == 19


def test_dynamic_sampling_replaces_groups_without_signal_within_its_budget() -> None:
    """Of 5 groups a step, 10 may be replaced; the rest of the silent ones are trained on, and all are accounted for."""
    reward = FakeReward(silent=frozenset(f"e0-r{row}" for row in range(12)))
    stage = Stage(steps=2, reward=reward, replaceable=2)
    first, second = asyncio.run(stage.train(2))
    assert [group.has_signal for group in first].count(False) == 2  # r10 and r11: the budget was spent by then
    assert all(group.has_signal for group in second)
    assert stage.ledger.drop_reasons() == {"no signal: all rewards of the group are equal": 40}
    assert stage.ledger.counts()["trained"] == 40
    plain = Stage(steps=1, reward=reward)
    assert not any(group.has_signal for group in asyncio.run(plain.train(1))[0])
    assert plain.ledger.drop_reasons() == {}


def test_the_greedy_response_is_scored_with_its_group_and_not_in_the_books() -> None:
    """ReMax: one more request for every prompt, on the group's engine, whose reward stays a number beside the group."""
    stage = Stage(steps=1, greedy_baseline=True)
    (batch,) = asyncio.run(stage.train(1))
    assert [group.greedy_reward for group in batch] == [0.0] * 5
    for engine in stage.engines:
        groups, greedy = ([r.prompt_uid for r in engine.served if r.greedy is wanted] for wanted in (False, True))
        assert sorted(groups) == sorted(greedy)
        assert all(request.samples == 1 for request in engine.served if request.greedy)
    counts = stage.ledger.counts()
    assert (counts["dispatched"], counts["trained"], counts["retries"]) == (20, 20, 0)


def test_a_group_whose_greedy_response_has_no_reward_is_replaced() -> None:
    """There is nothing to compare the group with."""
    reward = FakeReward({("e0-r1", 0): "timeout after 5 s"})
    stage = Stage(steps=1, reward=reward, greedy_baseline=True)
    (batch,) = asyncio.run(stage.train(1))
    assert "e0-r1" not in {group.summary.prompt_uid for group in batch}
    assert stage.ledger.drop_reasons() == {"reward of the greedy response: timeout after 5 s": 4}


def test_too_many_failed_rewards_stop_the_run_and_say_why() -> None:
    """A reward that always fails is an error with its reason, not a run on nothing."""
    reward = FakeReward({(f"e0-r{r}", i): "error: KeyError: 'x'" for r in range(100) for i in range(4)})
    with pytest.raises(BatchFailed, match="KeyError"):
        asyncio.run(Stage(steps=1, reward=reward).train(1))


def test_groups_in_flight_at_a_checkpoint_are_dispatched_again_on_resume() -> None:
    """Resume: same prompts, next attempt, nothing lost and nothing trained twice."""
    first = Stage(staleness=1, steps=4)

    async def interrupted() -> None:
        await first.train(2)

    asyncio.run(interrupted())
    open_before = {g.prompt_uid for g in first.ledger.open_groups()}
    assert len(open_before) == 10
    ledger = Ledger.restore(first.ledger.state())
    second = Stage(staleness=1, steps=4, ledger=ledger, version=2)
    second.policy.updates.clear()

    async def resumed() -> list[list[ScoredGroup]]:
        await second.sync.push(2)
        return await second.train(4)

    batches = asyncio.run(resumed())
    assert {g.summary.prompt_uid for b in batches for g in b} == open_before
    assert {g.summary.attempt for b in batches for g in b} == {1}
    assert ledger.counts()["trained"] == 80


def test_groups_are_opened_in_order_and_hold_up_nothing_else() -> None:
    """Between any two turns of the loop only a few groups are opened, however many slots are free."""
    stage = Stage(groups=100, staleness=1, steps=3)

    async def run() -> list[list[ScoredGroup]]:
        seen = [0]

        async def watch() -> None:
            while True:
                await asyncio.sleep(0)
                seen.append(stage.ledger.counts()["dispatched"] // 4)

        watching = asyncio.create_task(watch())
        batches = await stage.train(3)
        watching.cancel()
        assert seen[-1] == 300
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * scheduler._OPENED_AT_ONCE
        return batches

    batches = asyncio.run(run())
    assert [len(batch) for batch in batches] == [100] * 3
    uids = sorted(int(group.summary.prompt_uid.removeprefix("e0-r")) for batch in batches for group in batch)
    assert uids == list(range(300))


def test_an_error_while_groups_are_opened_ends_the_batch() -> None:
    """Also where it comes after the first of them, when nobody waits for the opening itself."""
    stage = Stage(groups=100)
    rows = itertools.count()

    def draw() -> PromptPick:
        if (row := next(rows)) == 50:
            raise ValueError("no more prompts")
        return PromptPick(f"e0-r{row}", row)

    stage.scheduler._next_prompt = draw
    with pytest.raises(ValueError, match="no more prompts"):
        asyncio.run(stage.train(1))


def test_a_scheduler_that_is_closed_opens_no_more() -> None:
    stage = Stage(groups=100)

    async def run() -> None:
        stage.scheduler.start()
        await stage.scheduler.close()
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert stage.ledger.counts()["dispatched"] == 4 * scheduler._OPENED_AT_ONCE
    assert len(stage.ledger.open_groups()) == scheduler._OPENED_AT_ONCE


def test_batches_come_in_order_of_dispatch() -> None:
    """The order inside a batch does not depend on who finished first (reproducible sums)."""
    batches = asyncio.run(Stage(engines=3).train(3))
    for step, batch in enumerate(batches):
        assert [g.summary.prompt_uid for g in batch] == [f"e0-r{i}" for i in range(step * 5, step * 5 + 5)]
