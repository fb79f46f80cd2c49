"""Advantages against numbers worked by hand, the plain recursions, and their own invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.algorithms.advantages import (
    STD_EPS,
    explained_variance,
    gae,
    group_advantages,
    shaped_rewards,
    whiten,
)

numbers = st.floats(-100, 100, allow_nan=False)


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0, 2.0, 2.0, 4.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    std_0, std_2 = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2), math.sqrt((2 * (2 / 3) ** 2 + (4 / 3) ** 2) / 2)
    expected = [
        *[d / (std_0 + STD_EPS) for d in (2 / 3, -1 / 3, -1 / 3)],
        0.0,
        *[d / (std_2 + STD_EPS) for d in (-2 / 3, -2 / 3, 4 / 3)],
    ]
    assert group_advantages(rewards, groups, True).tolist() == pytest.approx(expected)
    unscaled = group_advantages(rewards, groups, False)
    assert unscaled.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0, -2 / 3, -2 / 3, 4 / 3])


def test_group_advantages_match_trl() -> None:
    rewards = torch.rand(6, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    groups = torch.arange(6).repeat_interleave(8)
    torch.testing.assert_close(group_advantages(rewards.flatten(), groups, True), theirs.flatten())


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exactly_zero(normalize: bool) -> None:
    # Three times 0.1 does not add up to 0.3 in binary: the mean is off by a rounding error.
    rewards = torch.full((3,), 0.1, dtype=torch.double)
    assert group_advantages(rewards, torch.zeros(3, dtype=torch.int64), normalize).tolist() == [0.0, 0.0, 0.0]


def test_no_samples() -> None:
    none = torch.zeros(0)
    assert group_advantages(none, none.long(), True).shape == (0,)
    assert gae(none, none, none.long(), 1.0, 0.95).shape == (0,)
    assert shaped_rewards(none, none.long(), None, 0.0).shape == (0,)
    assert explained_variance(none, none) == 0.0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), numbers), min_size=1, max_size=20), st.booleans(), st.randoms())
def test_groups_sum_to_zero_in_any_order(samples: list[tuple[int, float]], normalize: bool, random: object) -> None:
    groups, rewards = (torch.tensor(column) for column in zip(*samples, strict=True))
    advantages = group_advantages(rewards, groups, normalize)
    for group in set(groups.tolist()):
        assert float(advantages[groups == group].sum()) == pytest.approx(0.0, abs=1e-6)
    order = list(range(len(samples)))
    random.shuffle(order)  # pyright: ignore[reportAttributeAccessIssue]
    shuffled = group_advantages(rewards[order], groups[order], normalize)
    torch.testing.assert_close(shuffled, advantages[order], rtol=1e-6, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), numbers)
def test_group_advantages_ignore_a_shift(rewards: list[float], shift: float) -> None:
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    base = torch.tensor(rewards, dtype=torch.double)
    torch.testing.assert_close(
        group_advantages(base + shift, groups, True), group_advantages(base, groups, True), rtol=1e-4, atol=1e-8
    )


def test_shaped_rewards_by_hand() -> None:
    rewards, lengths = torch.tensor([7.0, -1.0, 0.5]), torch.tensor([2, 0, 3])
    kl = torch.tensor([1.0, 2.0, 0.0, -1.0, 4.0])
    shaped = shaped_rewards(rewards, lengths, kl, kl_coef=0.1)
    assert shaped.tolist() == pytest.approx([-0.1, -0.2 + 7.0, 0.0, 0.1, -0.4 + 0.5])
    assert shaped_rewards(rewards, lengths, None, 0.0).tolist() == pytest.approx([0.0, 7.0, 0.0, 0.0, 0.5])


def test_gae_by_hand() -> None:
    # One sequence of two tokens, rewards 0 and 1, values 0.5 and 0.25, gamma 0.9, lambda 0.8.
    advantages = gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([2]), 0.9, 0.8)
    last = 1.0 - 0.25
    first = 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    assert advantages.tolist() == pytest.approx([first, last])


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    advantages, following, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t], next_value = following, values[t]
    return advantages


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.tuples(numbers, numbers), max_size=9), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_of_ragged_sequences(sequences: list[list[tuple[float, float]]], gamma: float, gae_lambda: float) -> None:
    rewards, values, expected = [], [], []
    for sequence in sequences:
        one_rewards, one_values = [r for r, _ in sequence], [v for _, v in sequence]
        rewards += one_rewards
        values += one_values
        expected += naive_gae(one_rewards, one_values, gamma, gae_lambda)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    result = gae(
        torch.tensor(rewards, dtype=torch.double), torch.tensor(values, dtype=torch.double), lengths, gamma, gae_lambda
    )
    assert result.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rewards, values = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.3, 0.6, 0.9])
    advantages = gae(rewards, values, torch.tensor([3]), 1.0, 1.0)
    torch.testing.assert_close(advantages, torch.tensor([3.0 - 0.3, 3.0 - 0.6, 1.0 - 0.9]).double())


def test_whiten() -> None:
    values = torch.tensor([1.0, 100.0, 2.0, 6.0])
    mask = torch.tensor([True, False, True, True])
    result = whiten(values, mask)
    assert result[1] == 0.0
    assert float(result[mask].mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(result[mask].var()) == pytest.approx(1.0, abs=1e-6)
    # TRL: (x - mean) * rsqrt(var + 1e-8), var with Bessel's correction.
    assert result.tolist() == pytest.approx([-2 / math.sqrt(7), 0.0, -1 / math.sqrt(7), 3 / math.sqrt(7)])
    assert whiten(values, torch.tensor([True, False, False, False])).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert whiten(torch.full((3,), 4.0), torch.ones(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0
