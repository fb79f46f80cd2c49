"""Sums and comparisons of rewards: rounding of their parts must not decide what is solved."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.rollouts.held_out import PromptResult, summarize
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.spec.sections import CurriculumConfig
from troupe.workers.contract.messages import GroupSummary, RewardSummary
from troupe.workers.contract.reward_config import RewardFunctionConfig
from troupe.workers.contract.rewards import differ, is_solved, total
from troupe.workers.reward import combine, reward_spans
from troupe.workers.rewards.runner import EnvironmentReward, RewardResult, Sample

PERFECT = RewardResult(1.0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_a_perfect_sample_is_solved_in_any_division_of_the_weight(parts: list[int]) -> None:
    """Weights whose exact sum is 1; each is a float as a spec has it."""
    weights = [float(Fraction(part, sum(parts))) for part in parts]
    reward = combine([str(n) for n in range(len(parts))], weights, [PERFECT] * len(parts)).reward
    assert reward is not None and is_solved(reward, 1.0)


@pytest.mark.parametrize("weights", itertools.permutations((0.7, 0.2, 0.1)))
def test_a_sum_does_not_depend_on_the_order_of_its_parts(weights: tuple[float, ...]) -> None:
    assert combine(["a", "b", "c"], weights, [PERFECT] * 3).reward == 1.0
    ends = reward_spans(weights, [RewardResult(1.0, steps=((1, 1.0),))] * 3, 1, list)
    assert ends == ((1, 1.0),)
    turns = tuple((turn, value) for turn, value in enumerate(weights))
    sample = Sample("", "", "{}", 3, "stop", turn_rewards=turns)
    (result,) = EnvironmentReward(RewardFunctionConfig(name="environment")).score([sample])
    assert result.value == 1.0


def test_what_is_not_finite_stays_so() -> None:
    assert math.isnan(total([math.inf, -math.inf])) and total([1e308, 1e308]) == math.inf
    assert total([]) == 0.0


def test_rounding_is_no_difference_and_the_least_step_of_a_reward_is_one() -> None:
    almost = 1.0 - 2**-53
    assert is_solved(almost, 1.0) and not is_solved(1.0 - 1e-6, 1.0)
    assert is_solved(3e6 * almost, 3e6) and not is_solved(-1.0, 0.0)
    assert not differ([1.0, almost]) and not differ([]) and differ([1.0, 1.0 - 1e-6])


def test_every_place_that_asks_what_is_solved_forgives_rounding() -> None:
    almost = 1.0 - 2**-53
    found = summarize(
        [PromptResult((almost, almost), (4, 4), 0, (0, 0))],
        refused=0,
        samples=2,
        solved_at=1.0,
        average="accuracy",
        pass_at=[2],
    )
    assert {name: found.estimates[name].value for name in ("accuracy", "pass@2", "maj@2")} == {
        "accuracy": 1.0,
        "pass@2": 1.0,
        "maj@2": 1.0,
    }
    rewards = RewardSummary("e0-r0", 0, ("ok", "ok"), (almost, 1.0), {})
    curriculum = Curriculum(CurriculumConfig(), 1, RowTable((0,), (1.0,)))
    curriculum.observe(0, rewards)
    assert curriculum.state()["step"] == [[0, 2.0, 2.0]]
    group = ScoredGroup(GroupSummary("e0-r0", 0, "rollout-0", (), 1.0), rewards, object(), object(), ())
    assert not group.has_signal
