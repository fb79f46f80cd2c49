"""The expected gradient with the group's mean as baseline, exactly: over all groups of n samples of a small policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from troupe.workers.algorithms.advantages import group_advantages, leave_one_out_advantages

LOGITS = torch.tensor([0.3, -1.1, 0.8], dtype=torch.double)
REWARDS = torch.tensor([1.0, 0.25, -2.0], dtype=torch.double)
"""Reward of each of the three responses that the policy may give."""

Advantages = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def policy_gradient() -> torch.Tensor:
    """The gradient of the expected reward, by differentiating it."""
    logits = LOGITS.clone().requires_grad_()
    (logits.softmax(0) * REWARDS).sum().backward()
    assert logits.grad is not None
    return logits.grad


def expected_gradient(n: int, advantages: Advantages) -> torch.Tensor:
    """The expectation of mean_i A_i grad log pi(y_i): the sum over all groups of n samples, by their probabilities."""
    probabilities = LOGITS.softmax(0)
    total = torch.zeros_like(LOGITS)
    for group in product(range(len(LOGITS)), repeat=n):
        given = advantages(REWARDS[list(group)], torch.zeros(n, dtype=torch.long))
        for response, advantage in zip(group, given, strict=True):
            score = torch.eye(len(LOGITS), dtype=torch.double)[response] - probabilities  # grad log pi of a softmax
            total += probabilities[list(group)].prod() * advantage * score / n
    return total


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_mean_with_the_sample_itself_gives_n_minus_1_of_n_parts_of_the_policy_gradient(n: int) -> None:
    found = expected_gradient(n, lambda rewards, groups: group_advantages(rewards, groups, normalize_by_std=False))
    torch.testing.assert_close(found, policy_gradient() * (n - 1) / n)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_the_mean_of_the_others_gives_the_policy_gradient(n: int) -> None:
    torch.testing.assert_close(expected_gradient(n, leave_one_out_advantages), policy_gradient())


def test_dividing_by_the_groups_deviation_is_more_than_a_factor() -> None:
    found = expected_gradient(4, lambda rewards, groups: group_advantages(rewards, groups, normalize_by_std=True))
    factors = found / policy_gradient()
    assert factors.max() / factors.min() > 1.01
