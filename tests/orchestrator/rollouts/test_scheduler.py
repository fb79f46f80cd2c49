"""The rollout scheduler against fakes: staleness, accounting, failures and fencing of late results."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import on_virtual_time
from tests.fakes import (
    FakePolicy,
    FakeReward,
    FakeTable,
    FaultyEngine,
    FaultyReward,
    FaultyWorker,
    fake_pool,
    fake_spec,
    policy_group,
    pool_spec,
)
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.errors import BatchFailed, DataLost, EnginesLost
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.rollouts import scheduler
from troupe.orchestrator.rollouts.open_groups import GroupProgress
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler, sampling_seed
from troupe.orchestrator.rollouts.scoring import ScoredGroup, Scorer, TokenScorer
from troupe.orchestrator.rollouts.step_counts import replaced_counts, sample_counts
from troupe.orchestrator.rollouts.weight_sync import FileSync
from troupe.orchestrator.training.ledger import Ledger
from troupe.workers.algorithms.custom import CustomAlgorithm, GroupRewards
from troupe.workers.contract.messages import (
    EpisodeSummary,
    GroupSummary,
    RankPlan,
    RewardSummary,
    SampleSummary,
    ScoreSummary,
)


class FakeRollouts:
    """A scheduler with the fakes that it needs."""

    def __init__(
        self,
        engines: int = 2,
        staleness: int = 0,
        steps: int = 6,
        groups: int = 5,
        reward: FakeReward | None = None,
        restarts: int = 2,
        ledger: Ledger | None = None,
        version: int = 0,
        max_failed_fraction: float = 0.5,
        **algorithm: Any,
    ) -> None:
        self.engines = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(engines)]
        weights = PoolWeights(lambda engine: self.sync.bring_up(engine))
        self.pool = fake_pool(self.engines, pool_spec(restarts=restarts), weights)
        self.policy = FakePolicy()
        policy = policy_group(self.policy)
        self.sync = FileSync(policy, self.pool, 1.0)
        self.ledger = ledger or Ledger()
        reward = reward or FakeReward()
        scorer = Scorer(
            RewardPool([FaultyWorker("reward-0", reward)], 1.0), [TokenScorer(policy, policy.compute_logprobs, 1.0)]
        )
        rows = itertools.count()
        spec = fake_spec(
            schedule={"steps": steps, "prompts_per_step": groups, "max_staleness": staleness},
            failures={"max_failed_fraction": max_failed_fraction},
            algorithm=algorithm,
        )
        self.scheduler = RolloutScheduler(
            spec,
            self.pool,
            scorer,
            self.ledger,
            lambda: PromptPick(f"e0-r{(row := next(rows))}", row, draw=row + 1),
            None,
            version,
        )

    async def train(self, steps: int, update_s: float = 0.0, beside: bool = False) -> list[list[ScoredGroup]]:
        """Run the controller's loop without updates. `beside`: engines load a version beside the next step."""
        self.scheduler.start()
        batches = []
        loading = asyncio.create_task(asyncio.sleep(0))
        for step in range(self.scheduler.version, steps):
            batch = await asyncio.wait_for(self.scheduler.next_batch(), 10)
            await asyncio.sleep(update_s)
            for group in batch:
                for i, status in enumerate(group.rewards.statuses):
                    if status == "ok":
                        self.ledger.mark_trained(group.summary.prompt_uid, i)
            await loading
            await self.sync.publish(step + 1)
            loading = asyncio.create_task(self._load(step + 1))
            if not beside:
                await loading
            self.scheduler.advance(step + 1)
            batches.append(batch)
        await loading
        await self.scheduler.close()
        await self.pool.close()
        self.ledger.check()
        return batches

    async def _load(self, version: int) -> None:
        await self.sync.load()
        self.scheduler.serve(version)


def oldest(batch: list[ScoredGroup]) -> int:
    """Oldest policy version of any token in the batch."""
    return min(s.oldest_version for g in batch for s in g.summary.samples)


def test_synchronous_training_is_strictly_on_policy() -> None:
    """Staleness 0: every token of step v was sampled with version v, and no group is generated beyond the last step."""
    rollouts = FakeRollouts(staleness=0)
    batches = on_virtual_time(rollouts.train(6))
    for version, batch in enumerate(batches):
        assert {(s.oldest_version, s.newest_version) for g in batch for s in g.summary.samples} == {(version, version)}
    counts = rollouts.ledger.counts()
    assert counts == {"dispatched": 120, "trained": 120, "dropped": 0, "in_flight": 0, "retries": 0}


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_staleness_stays_within_its_bound_and_no_group_is_dropped_for_it(staleness: int) -> None:
    """With long-tailed generation times and slow training, generation runs ahead and the bound holds."""
    rollouts = FakeRollouts(engines=3, staleness=staleness, steps=20)
    for engine in rollouts.engines:
        engine.mean_s = 0.004
    batches = on_virtual_time(rollouts.train(20, update_s=0.004))
    ages = [version - oldest(batch) for version, batch in enumerate(batches)]
    assert max(ages) <= staleness
    assert max(ages) > 0
    assert rollouts.ledger.counts()["dropped"] == 0
    assert rollouts.ledger.counts()["trained"] == 20 * 5 * 4


@settings(max_examples=60, deadline=None)
@given(
    staleness=st.integers(1, 4),
    engines=st.integers(1, 4),
    groups=st.integers(1, 5),
    load_s=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
    update_s=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
    means=st.lists(st.sampled_from([0.0002, 0.002, 0.02]), min_size=4, max_size=4),
)
def test_staleness_stays_within_its_bound_however_long_engines_take_to_load(
    staleness: int, engines: int, groups: int, load_s: float, update_s: float, means: list[float]
) -> None:
    """Groups that a trained batch makes room for start at its weights: none becomes too old, and none is dropped.

    Engines load one after another here: the first ones serve a version long before the last one.
    """
    rollouts = FakeRollouts(engines=engines, staleness=staleness, steps=12, groups=groups)
    for number, engine in enumerate(rollouts.engines):
        engine.mean_s, engine.load_s = means[number], load_s * number
    batches = on_virtual_time(rollouts.train(12, update_s, beside=True))
    assert all(step - oldest(batch) <= staleness for step, batch in enumerate(batches))
    counts = rollouts.ledger.counts()
    assert (counts["trained"], counts["dropped"], counts["retries"]) == (12 * groups * 4, 0, 0)


async def test_slots_of_a_trained_batch_open_once_the_engines_serve_its_weights() -> None:
    """In whatever order the two become known."""
    rollouts = FakeRollouts(staleness=1, groups=5)
    opened = rollouts.ledger.counts
    rollouts.scheduler.start()
    await rollouts.scheduler.next_batch()
    rollouts.scheduler.advance(1)
    await rollouts.scheduler.next_batch()  # it was opened before
    assert opened()["dispatched"] == 2 * 5 * 4
    rollouts.scheduler.serve(1)
    assert opened()["dispatched"] == 3 * 5 * 4
    rollouts.scheduler.serve(2)
    assert opened()["dispatched"] == 3 * 5 * 4
    rollouts.scheduler.advance(2)
    assert opened()["dispatched"] == 4 * 5 * 4
    await rollouts.scheduler.close()


def test_each_sample_is_trained_once_although_engines_lose_calls() -> None:
    """Lost calls are retried, the ledger balances and no prompt is trained twice."""
    rollouts = FakeRollouts(engines=3, staleness=2, steps=10)
    for engine in rollouts.engines:
        engine.fail_next = 2
    batches = on_virtual_time(rollouts.train(10))
    uids = Counter(group.summary.prompt_uid for batch in batches for group in batch)
    assert set(uids.values()) == {1}
    assert len(uids) == 50
    assert rollouts.ledger.counts()["retries"] >= 6


def test_a_killed_engine_is_replaced_and_its_groups_are_rescheduled() -> None:
    """One of two engines is killed during the run."""
    rollouts = FakeRollouts(engines=2, steps=6)

    async def run() -> list[list[ScoredGroup]]:
        async def kill_first() -> None:
            await asyncio.sleep(0.005)
            rollouts.pool.workers[0].handle.kill()

        killer = asyncio.create_task(kill_first())
        batches = await rollouts.train(6)
        await killer
        return batches

    batches = on_virtual_time(run())
    assert sum(len(b) for b in batches) == 30
    assert rollouts.pool.budget.total == 1


def test_a_frozen_engine_is_found_by_the_probe_and_its_late_result_is_fenced() -> None:
    """A stopped process does not answer the probe and is quarantined; its later results are of an abandoned attempt."""
    rollouts = FakeRollouts(engines=2, steps=3)

    async def run() -> list[list[ScoredGroup]]:
        handle = rollouts.pool.workers[0].handle
        assert isinstance(handle, FaultyWorker)
        handle.frozen = True

        async def probe() -> None:
            await asyncio.sleep(0.01)
            await rollouts.pool.probe_all()

        prober = asyncio.create_task(probe())
        batches = await rollouts.train(3)
        await prober
        return batches

    batches = on_virtual_time(run())
    assert sum(len(b) for b in batches) == 15
    assert rollouts.ledger.counts()["retries"] > 0
    assert not rollouts.ledger.is_current("e0-r0", 0)


def test_losing_all_engines_ends_the_run_with_engines_lost() -> None:
    """Without an engine and without a restart left, the run fails instead of waiting."""
    rollouts = FakeRollouts(engines=2, restarts=0)
    for engine in rollouts.pool.workers:
        engine.handle.kill()
    with pytest.raises(EnginesLost, match="no rollout engine is left"):
        on_virtual_time(rollouts.train(1))


def test_refused_prompts_are_dropped_counted_and_replaced() -> None:
    """A bad prompt has no effect on the other prompts of its batch."""
    rollouts = FakeRollouts(steps=2)
    for engine in rollouts.engines:
        engine.refuse_rows = frozenset({1, 3})
    batches = on_virtual_time(rollouts.train(2))
    assert [len(b) for b in batches] == [5, 5]
    assert rollouts.ledger.drop_reasons() == {"prompt refused: too long": 8}


def test_a_run_with_only_refused_prompts_ends() -> None:
    """Data without a usable row is an error, not an endless loop."""
    rollouts = FakeRollouts(steps=2)
    for engine in rollouts.engines:
        engine.refuse_rows = frozenset(range(10_000))
    with pytest.raises(BatchFailed, match="prompts of this step were refused"):
        on_virtual_time(rollouts.train(1))


def test_failed_rewards_drop_samples_and_groups_that_become_too_small() -> None:
    """One failed sample is dropped alone. If three of four fail, no baseline is left and the group is replaced."""
    reward = FaultyReward(
        {("e0-r0", 1): "timeout after 5 s"} | {("e0-r2", i): "error: ValueError: no" for i in (0, 1, 2)}
    )
    rollouts = FakeRollouts(steps=1, reward=reward)
    batches = on_virtual_time(rollouts.train(1))
    assert "e0-r2" not in {g.summary.prompt_uid for g in batches[0]}
    assert rollouts.ledger.drop_reasons() == {"reward: timeout after 5 s": 1, "reward: error: ValueError": 4}
    assert rollouts.ledger.counts()["trained"] == 19


def test_a_group_whose_data_are_lost_each_time_is_replaced() -> None:
    class Reward(FakeReward):
        async def score(
            self, rollouts: FakeTable, rewards: str = "", vote: bool = False
        ) -> tuple[RewardSummary, FakeTable]:
            if rollouts.uids == ("e0-r2",):
                raise DataLost("reward-0", "score", "the node is gone")
            return await super().score(rollouts, rewards, vote)

    rollouts = FakeRollouts(steps=1, reward=Reward())
    on_virtual_time(rollouts.train(1))
    assert rollouts.ledger.drop_reasons() == {"its data were lost 3 times": 4}


def test_dynamic_sampling_replaces_zero_advantage_groups_within_its_budget() -> None:
    """A step of 5 groups may replace 10; further zero-advantage groups are trained. The ledger counts them all."""
    reward = FaultyReward(uniform=frozenset(f"e0-r{row}" for row in range(12)))
    rollouts = FakeRollouts(steps=2, reward=reward, dynamic_sampling=2)
    first, second = on_virtual_time(rollouts.train(2))
    assert [group.has_signal for group in first].count(False) == 2  # r10 and r11: the budget is spent
    assert all(group.has_signal for group in second)
    assert rollouts.ledger.drop_reasons() == {"no signal: all rewards of the group are equal": 40}
    assert rollouts.ledger.counts()["trained"] == 40
    plain = FakeRollouts(steps=1, reward=reward)
    assert not any(group.has_signal for group in on_virtual_time(plain.train(1))[0])
    assert plain.ledger.drop_reasons() == {}


def test_groups_that_stay_equal_for_ever_cost_each_step_its_budget_and_no_more() -> None:
    reward = FaultyReward(uniform=frozenset(f"e0-r{row}" for row in range(100)))
    rollouts = FakeRollouts(steps=6, reward=reward, dynamic_sampling=1)
    batches = on_virtual_time(rollouts.train(6))
    assert [len(batch) for batch in batches] == [5] * 6
    assert not any(group.has_signal for batch in batches for group in batch)
    counts = rollouts.ledger.counts()
    assert (counts["trained"], counts["dropped"], counts["in_flight"]) == (6 * 20, 6 * 20, 0)


class ShapedReward(FakeReward):
    """A correctness and a shaping term that differs in every group; the reward is their sum."""

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        """Rows divisible by 3 are all right, those with remainder 1 all wrong, the others mixed; sample 3 fails."""
        uid, samples = rollouts.uids[0], rollouts.samples
        row = int(uid.removeprefix("e0-r"))
        right = [(1.0, 0.0, float(i % 2))[row % 3] for i in range(samples)]
        failed = [i == 3 for i in range(samples)]
        # The failed sample's components differ from the others': they must not count.
        correct = tuple(0.5 if bad else value for bad, value in zip(failed, right, strict=True))
        length = tuple(-0.1 * i for i in range(samples))
        sums = tuple(None if bad else a + b for bad, a, b in zip(failed, correct, length, strict=True))
        statuses = tuple("timeout" if bad else "ok" for bad in failed)
        components: dict[str, tuple[float | None, ...]] = {"correct": correct, "length": length}
        return RewardSummary(uid, rollouts.attempt, statuses, sums, components), FakeTable("rewards", (uid,))


def test_dynamic_sampling_on_a_component_replaces_groups_by_that_component_alone() -> None:
    """DAPO filters on correctness: the shaping term differs in every group and would keep them all."""
    given: dict[str, Any] = {"steps": 2, "reward": ShapedReward(), "dynamic_sampling": 4, "max_failed_fraction": 1.0}
    on = FakeRollouts(**given, dynamic_sampling_on="correct")
    batches = on_virtual_time(on.train(2))
    rows = [group.row for batch in batches for group in batch]
    assert rows == [row for row in range(30) if row % 3 == 2]
    assert on.ledger.drop_reasons() == {
        "reward: timeout": 30,
        "no signal: all values of correct in the group are equal": 20 * 3,
    }
    assert on.ledger.counts()["trained"] == 10 * 3
    total = FakeRollouts(**given)
    assert [group.row for batch in on_virtual_time(total.train(2)) for group in batch] == list(range(10))


SEEN: list[GroupRewards] = []


def _some_are_wrong(group: GroupRewards) -> bool:
    SEEN.append(group)
    return min(group.components["correct"]) == 0.0


filtering = CustomAlgorithm(keep_group=_some_are_wrong)


def test_a_filter_of_the_users_own_decides_in_place_of_the_comparison_of_rewards() -> None:
    """It sees only samples with a reward; a failure in it ends the run and names it."""
    algorithm = {"name": f"{__name__}:filtering", "dynamic_sampling": 4}
    rollouts = FakeRollouts(steps=1, reward=ShapedReward(), max_failed_fraction=1.0, **algorithm)
    (batch,) = on_virtual_time(rollouts.train(1))
    assert [group.row for group in batch] == [row for row in range(8) if row % 3 != 0]
    assert all(len(one.rewards) == 3 == len(one.components["correct"]) for one in SEEN)
    assert rollouts.ledger.drop_reasons()["no signal: the algorithm's keep_group refused the group"] == 3 * 3


def test_a_group_of_truncated_samples_is_replaced_where_they_carry_no_loss() -> None:
    for masks in (False, True):
        rollouts = FakeRollouts(steps=1, dynamic_sampling=1, mask_truncated=masks)
        for engine in rollouts.engines:
            engine.truncated = frozenset(range(4))
        on_virtual_time(rollouts.train(1))
        # The budget of five replacements is spent; the groups after it are kept.
        reasons = {"no signal: all samples of the group are truncated": 5 * 4} if masks else {}
        assert rollouts.ledger.drop_reasons() == reasons
    partly = FakeRollouts(steps=1, dynamic_sampling=1, mask_truncated=True)
    for engine in partly.engines:
        engine.truncated = frozenset({0, 1, 2})
    on_virtual_time(partly.train(1))
    assert partly.ledger.drop_reasons() == {}


def test_the_greedy_response_is_scored_with_its_group_and_not_counted_in_the_ledger() -> None:
    """ReMax needs one more request per prompt, on the engine of the group. Only its reward is kept."""
    rollouts = FakeRollouts(steps=1, name="remax")
    (batch,) = on_virtual_time(rollouts.train(1))
    assert [group.greedy_reward for group in batch] == [0.0] * 5
    for engine in rollouts.engines:
        groups, greedy = ([r.prompt_uid for r in engine.served if r.greedy is wanted] for wanted in (False, True))
        assert sorted(groups) == sorted(greedy)
        assert all(request.samples == 1 for request in engine.served if request.greedy)
    counts = rollouts.ledger.counts()
    assert (counts["dispatched"], counts["trained"], counts["retries"]) == (20, 20, 0)


def test_a_group_whose_greedy_response_has_no_reward_is_replaced() -> None:
    """The group has no baseline."""
    reward = FaultyReward({("e0-r1", 0): "timeout after 5 s"})
    rollouts = FakeRollouts(steps=1, reward=reward, name="remax")
    (batch,) = on_virtual_time(rollouts.train(1))
    assert "e0-r1" not in {group.summary.prompt_uid for group in batch}
    assert rollouts.ledger.drop_reasons() == {"reward of the greedy response: timeout after 5 s": 4}


def test_a_candidate_gives_a_group_of_equal_rewards_a_signal() -> None:
    """Rewards 0 in every sample and 1 in the candidate: the policy can learn from it."""

    class BestIsLast(FakeReward):
        async def score(
            self, rollouts: FakeTable, rewards: str = "", vote: bool = False
        ) -> tuple[RewardSummary, FakeTable]:
            values = tuple(float(i == 4) for i in range(rollouts.samples))
            statuses = ("ok",) * rollouts.samples
            return RewardSummary(rollouts.uids[0], rollouts.attempt, statuses, values, {"all": values}), rollouts

    rollouts = FakeRollouts(steps=1, reward=BestIsLast(), dynamic_sampling=2)
    for engine in rollouts.engines:
        engine.candidates = 1
    scored: list[int] = []

    async def compute_logprobs(plan: RankPlan, *tables: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        scored.append(sum(map(len, plan.micro_batches)) - 5 * len(tables))
        return ScoreSummary(0), FakeTable("old_logprobs", ())

    rollouts.policy.compute_logprobs = compute_logprobs
    (batch,) = on_virtual_time(rollouts.train(1))
    assert set(scored) == {0}  # models that score tokens see every row of a group, the candidate's too
    assert rollouts.ledger.drop_reasons() == {}
    for group in batch:
        assert group.rewards.rewards == (0.0,) * 4 and group.rewards.components == {"all": (0.0,) * 4}
        assert group.candidates is not None and group.candidates.components == {"all": (1.0,)}
        assert (group.rewarded, group.rewarded_candidates) == ([0, 1, 2, 3], [4])


class HalfFails(FakeReward):
    """Rewards of samples; of the responses of the reference (samples 4 to 7), the ones of `failed` have none."""

    def __init__(self, failed: Collection[int]) -> None:
        super().__init__()
        self.failed = failed

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        values = tuple(None if i in self.failed else float(i % 2) for i in range(rollouts.samples))
        statuses = tuple("error: no number" if value is None else "ok" for value in values)
        return RewardSummary(rollouts.uids[0], rollouts.attempt, statuses, values, {}), rollouts


def paired_rollouts(failed: Collection[int], name: str, **arguments: Any) -> FakeRollouts:
    rollouts = FakeRollouts(steps=1, reward=HalfFails(failed), name=name, **arguments)
    for engine in rollouts.engines:
        engine.candidates = 4
    return rollouts


@pytest.mark.parametrize(("name", "dropped"), [("xpo", 5), ("raft", 0)])
def test_a_sample_fails_with_the_response_of_the_reference_that_it_is_compared_with(name: str, dropped: int) -> None:
    """Without its partner it would have no advantage. Other candidates stand beside the samples."""
    rollouts = paired_rollouts({6}, name)
    (batch,) = on_virtual_time(rollouts.train(1))
    why = "response of the reference: error: no number"
    assert rollouts.ledger.drop_reasons() == ({why: dropped} if dropped else {})
    assert {tuple(group.rewarded) for group in batch} == {(0, 1, 3) if dropped else (0, 1, 2, 3)}
    assert all(group.rewarded_candidates == [4, 5, 7] for group in batch)


def test_responses_of_the_reference_that_fail_count_against_the_bound_on_failures() -> None:
    rollouts = paired_rollouts({6}, "xpo", max_failed_fraction=0.1)
    with pytest.raises(
        BatchFailed, match=r"3 samples of this step failed, more than .* allows \(2\).*of the reference"
    ):
        on_virtual_time(rollouts.train(1))


def test_a_partner_without_finite_scores_costs_its_sample_the_reward() -> None:
    samples = tuple(SampleSummary(i, 1, 1, "stop", 0, 0) for i in range(2))
    rewards, partners = (RewardSummary("e0-r0", 0, ("ok",) * 2, own, {}) for own in ((1.0, 0.0), (0.5, 0.25)))
    summary, table = GroupSummary("e0-r0", 0, "rollout-0", samples, 1.0), FakeTable("rollouts", ("e0-r0",))
    group = ScoredGroup(summary, rewards, table, table, (), candidates=partners)
    left = group.without({3: "the score of a token is not finite"}).paired()
    assert (left.rewarded, left.rewarded_candidates) == ([0], [2])
    assert left.failures == [(1, "response of the reference: the score of a token is not finite")]
    assert group.paired() is group


def broken_scores(rollouts: FakeRollouts, failed: Callable[[str], Iterable[int]]) -> None:
    """Scores of tokens that are not finite for these samples of a prompt."""

    async def compute_logprobs(plan: RankPlan, *tables: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        uids = [uid for table in tables for uid in table.uids]
        why = {(uid, i): "the score of a token is not finite" for uid in uids for i in failed(uid)}
        return ScoreSummary(0, why), FakeTable("old_logprobs", ())

    rollouts.policy.compute_logprobs = compute_logprobs


def test_a_sample_without_a_finite_score_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It is dropped, counted and named, as one whose reward failed; whose reward failed already is counted once."""
    rollouts = FakeRollouts(steps=1, reward=FaultyReward({("e0-r1", 2): "timeout after 5 s"}))
    broken_scores(rollouts, lambda uid: {"e0-r0": (1,), "e0-r1": (2,), "e0-r2": (0, 1, 3)}.get(uid, ()))
    (batch,) = on_virtual_time(rollouts.train(1))
    assert {g.summary.prompt_uid: g.rewarded for g in batch}["e0-r0"] == [0, 2, 3]
    assert "e0-r2" not in {g.summary.prompt_uid for g in batch}, "one sample is left, and no baseline"
    why = "policy: the score of a token is not finite"
    assert rollouts.ledger.drop_reasons() == {why: 5, "reward: timeout after 5 s": 1}
    named = [line for line in caplog.messages if line.startswith(f"role {why}: a sample has no reward: e0-r")]
    assert len(named) == 1, "the first of its kind"


def test_a_model_without_finite_scores_ends_the_run() -> None:
    rollouts = FakeRollouts(steps=1)
    broken_scores(rollouts, lambda _: range(4))
    with pytest.raises(BatchFailed, match="policy: the score of a token is not finite"):
        on_virtual_time(rollouts.train(1))


def test_too_many_failed_rewards_stop_the_run_with_their_error() -> None:
    """A reward function that always fails ends the run with its own error."""
    reward = FaultyReward({(f"e0-r{r}", i): "error: KeyError: 'x'" for r in range(100) for i in range(4)})
    with pytest.raises(BatchFailed, match="KeyError"):
        on_virtual_time(FakeRollouts(steps=1, reward=reward).train(1))


def test_half_of_a_step_s_samples_may_fail_where_the_spec_allows_half() -> None:
    failed = {(f"e0-r{row}", i): "error: KeyError: 'x'" for row in range(2) for i in range(4)}
    failed |= {("e0-r2", i): "error: KeyError: 'x'" for i in range(2)}
    on_virtual_time(FakeRollouts(steps=1, reward=FaultyReward(failed)).train(1))
    with pytest.raises(BatchFailed, match="11 samples of this step failed"):
        on_virtual_time(FakeRollouts(steps=1, reward=FaultyReward(failed | {("e0-r3", 0): "timeout"})).train(1))


def test_samples_have_a_seed_by_the_run_and_the_prompt() -> None:
    assert len({sampling_seed(seed, f"e0-r{row}") for seed in range(3) for row in range(3)}) == 9
    rollouts = FakeRollouts(steps=1)
    seeds: dict[str, int] = {}
    for engine in rollouts.engines:
        engine._seconds = lambda request: seeds.update({request.prompt_uid: request.seed}) or 0.0
    on_virtual_time(rollouts.train(1))
    assert seeds == {f"e0-r{row}": sampling_seed(fake_spec().seed, f"e0-r{row}") for row in range(5)}


def test_groups_in_flight_at_a_checkpoint_are_rescheduled_on_resume() -> None:
    """The resumed run has the same prompts with the next attempt; none is lost and none is trained twice."""
    first = FakeRollouts(staleness=1, steps=4)

    async def interrupted() -> None:
        await first.train(2)

    on_virtual_time(interrupted())
    open_before = {g.prompt_uid for g in first.ledger.open_groups()}
    assert len(open_before) == 10
    ledger = Ledger.restore(first.ledger.state())
    second = FakeRollouts(staleness=1, steps=4, ledger=ledger, version=2)
    second.policy.updates.clear()

    async def resumed() -> list[list[ScoredGroup]]:
        await second.sync.push(2)
        return await second.train(4)

    batches = on_virtual_time(resumed())
    assert {g.summary.prompt_uid for b in batches for g in b} == open_before
    assert {g.summary.attempt for b in batches for g in b} == {1}
    assert ledger.counts()["trained"] == 80


def test_failed_samples_of_groups_that_are_sampled_again_do_not_count_on_resume() -> None:
    """Each group has one failed sample. Of the open groups the checkpoint has kept one."""
    reward = FaultyReward({(f"e0-r{r}", 0): "error" for r in range(100)})
    first = FakeRollouts(staleness=1, steps=4, reward=reward)

    async def interrupted() -> tuple[dict[str, Any], list[GroupProgress]]:
        first.scheduler.start()
        async with asyncio.timeout(10):
            while len(first.scheduler.state()["failed_open"]) < 2:
                await asyncio.sleep(0.001)
        state, found = first.scheduler.state(), first.scheduler.groups.progress([])
        await first.scheduler.close()
        await first.pool.close()
        return state, found

    async def resumed(state: dict[str, Any], kept: GroupProgress) -> dict[str, Any]:
        second = FakeRollouts(staleness=1, steps=4, ledger=Ledger.restore(first.ledger.state()))
        second.scheduler.restore(state, [kept])
        restored = second.scheduler.state()
        second.scheduler.start()
        assert second.scheduler.state()["failed_open"] == {kept.prompt_uid: 1}
        await second.scheduler.close()
        return restored

    state, found = on_virtual_time(interrupted())
    scored = [group for group in found if group.scored is not None and group.prompt_uid in state["failed_open"]]
    assert state["failed_samples"] == sum(state["failed_open"].values()) >= 2
    assert on_virtual_time(resumed(state, scored[0]))["failed_samples"] == 1


def test_samples_of_replaced_groups_are_counted_once_across_a_checkpoint_and_a_lost_batch() -> None:
    """Two groups are replaced: one whose rewards fail, one without a signal, in which one sample fails as well."""
    fail = {("e0-r1", i): "error" for i in range(4)} | {("e0-r2", 0): "error"}

    class Slow(FaultyReward):
        async def score(
            self, rollouts: FakeTable, rewards: str = "", vote: bool = False
        ) -> tuple[RewardSummary, FakeTable]:
            summary, table = await super().score(rollouts, rewards, vote)
            return replace(summary, seconds={"e0-r1": 0.5, "e0-r2": 0.25}.get(rollouts.uids[0], 4.0)), table

    given: dict[str, Any] = {"reward": Slow(fail, uniform=frozenset({"e0-r2"})), "dynamic_sampling": 1}
    counted = {"dispatched_samples": 8, "failed_samples": 5, "seconds/reward": 0.75}

    async def run(rollouts: FakeRollouts) -> None:
        rollouts.scheduler.start()
        for _ in range(2):  # the data of the first batch are lost, and it is sampled again
            batch = await asyncio.wait_for(rollouts.scheduler.next_batch(), 10)
            assert len(batch) == 5 and rollouts.scheduler.counts.replaced == counted
            assert rollouts.scheduler.state()["replaced"] == {}
            rollouts.scheduler.resample(batch)
            assert rollouts.scheduler.state()["replaced"] == counted
        await rollouts.scheduler.close()
        await rollouts.pool.close()

    first = FakeRollouts(steps=1, **given)
    on_virtual_time(run(first))
    resumed = FakeRollouts(steps=1, ledger=Ledger.restore(first.ledger.state()))
    resumed.scheduler.restore(first.scheduler.state(), [])
    assert resumed.scheduler.state()["replaced"] == counted
    on_virtual_time(resumed.train(1))
    assert resumed.scheduler.counts.replaced == counted


def test_a_group_that_no_engine_could_generate_has_no_failed_rewards() -> None:
    assert replaced_counts(4, None, None) == {"dispatched_samples": 4}


def test_failed_episodes_count_by_environment() -> None:
    """Two of three episodes ended without a result; one of these had started again, as the third had."""
    states = (("timeout", 1), ("error", 0), ("ok", 2))
    episodes = [EpisodeSummary(1, 5, 10, 0, 0.0, restarts=restarts) for _, restarts in states]
    samples = tuple(
        SampleSummary(i, 10, 5, "stop", 0, 0, status=status, episode=episode)
        for i, ((status, _), episode) in enumerate(zip(states, episodes, strict=True))
    )
    rewards = RewardSummary("e0-r0", 0, ("timeout", "error", "ok"), (None, None, 1.0), {}, seconds=1.5)
    table = FakeTable("rollouts", ("e0-r0",))
    group = ScoredGroup(GroupSummary("e0-r0", 0, "rollout-0", samples, 1.0), rewards, table, table, ())
    counts = sample_counts(group, "maze")
    assert counts == {
        "dispatched_samples": 3,
        "failed_samples": 2,
        "seconds/reward": 1.5,
        "episodes/failed": 2,
        "episodes/restarted": 2,
        "episodes/maze/failed": 2,
        "episodes/maze/restarted": 2,
    }
    assert replaced_counts(3, group, "")["failed_samples"] == 3
    assert "episodes/failed" not in sample_counts(group, None)


def test_groups_are_opened_in_order_a_few_per_loop_iteration() -> None:
    """Opening groups yields to the event loop, however many slots are free."""
    rollouts = FakeRollouts(groups=100, staleness=1, steps=3)

    async def run() -> list[list[ScoredGroup]]:
        seen = [0]

        async def observe() -> None:
            while True:
                await asyncio.sleep(0)
                seen.append(rollouts.ledger.counts()["dispatched"] // 4)

        observer = asyncio.create_task(observe())
        batches = await rollouts.train(3)
        observer.cancel()
        assert seen[-1] == 300
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * scheduler._OPENED_AT_ONCE
        return batches

    batches = asyncio.run(run())
    assert [len(batch) for batch in batches] == [100] * 3
    uids = sorted(int(group.summary.prompt_uid.removeprefix("e0-r")) for batch in batches for group in batch)
    assert uids == list(range(300))


def test_an_error_while_groups_are_opened_is_raised_by_next_batch() -> None:
    """Also after the first groups are open, when no caller awaits the task that opens them."""
    rollouts = FakeRollouts(groups=100)
    rows = itertools.count()

    def draw() -> PromptPick:
        if (row := next(rows)) == 50:
            raise ValueError("no more prompts")
        return PromptPick(f"e0-r{row}", row, draw=row + 1)

    rollouts.scheduler._next_prompt = draw
    with pytest.raises(ValueError, match="no more prompts"):
        on_virtual_time(rollouts.train(1))


def test_a_closed_scheduler_opens_no_more_groups() -> None:
    rollouts = FakeRollouts(groups=100)

    async def run() -> None:
        rollouts.scheduler.start()
        await rollouts.scheduler.close()
        for _ in range(20):
            await asyncio.sleep(0)

    on_virtual_time(run())
    assert rollouts.ledger.counts()["dispatched"] == 4 * scheduler._OPENED_AT_ONCE
    assert len(rollouts.ledger.open_groups()) == scheduler._OPENED_AT_ONCE


def test_a_batch_is_in_order_of_dispatch() -> None:
    """The order in a batch does not depend on which group finishes first, so that sums are reproducible."""
    batches = on_virtual_time(FakeRollouts(engines=3).train(3))
    for step, batch in enumerate(batches):
        assert [g.summary.prompt_uid for g in batch] == [f"e0-r{i}" for i in range(step * 5, step * 5 + 5)]


async def test_groups_near_the_limit_are_taken_before_too_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group per batch and a limit of 2: three that started at version 0 fill the batches 0, 1 and 2."""
    harness = FakeRollouts(engines=1, staleness=2, steps=6, groups=1)
    slow = {1: 0.2, 2: 0.2}
    monkeypatch.setattr(harness.engines[0], "_seconds", lambda request: slow.get(request.row, 0.01))
    batches = await harness.train(6)
    assert all(step - oldest(batch) <= 2 for step, batch in enumerate(batches))
