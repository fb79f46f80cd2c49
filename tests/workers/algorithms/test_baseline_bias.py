"""The expected gradient with the group's mean as baseline, exactly: over all groups of n samples of a small policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from troupe.orchestrator.algorithms.section import AlgorithmConfig, advantage, policy_loss
from troupe.workers.algorithms.advantages import SampledTokens, group_advantages, leave_one_out_advantages
from troupe.workers.algorithms.estimators import estimate
from troupe.workers.algorithms.policy_loss import token_weights
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.algorithm_config import AdvantageConfig

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
        for response, above in zip(group, given, strict=True):
            score = torch.eye(len(LOGITS), dtype=torch.double)[response] - probabilities  # grad log pi of a softmax
            total += probabilities[list(group)].prod() * above * score / n
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


# Responses of different length, by the product's advantages and token weights.

RESPONSES = ("e", "ae", "be", "aa", "ab", "ba", "bb")
"""Everything a policy with two words and an end writes in at most two tokens."""
TOKENS = "abe"
STATES = {"": 0, "a": 1, "b": 2}
"""The policy has a logit for each token in each state, the response so far."""
TOKEN_LOGITS = torch.tensor([[0.2, -0.4, 0.5], [0.1, 0.7, -0.3], [-0.6, 0.3, 0.4]], dtype=torch.double)
RESPONSE_REWARDS = torch.tensor([0.0, 1.0, 0.25, 1.0, -0.5, 0.5, 0.75], dtype=torch.double)
DEFAULTS = ("rloo", "dr_grpo", "grpo", "reinforce_pp_baseline")
AGGREGATIONS = ("sequence_sum", "constant", "token_mean", "sequence_mean")
ALGORITHMS_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "algorithms.md"


@cache
def scores() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Probability of each response, and grad log pi of each of its tokens: [tokens, 9]."""
    probabilities, gradients = [], []
    for response in RESPONSES:
        logits = TOKEN_LOGITS.clone().requires_grad_()
        logprobs = [
            logits[STATES[response[:place]]].log_softmax(0)[TOKENS.index(token)] for place, token in enumerate(response)
        ]
        slopes = [torch.autograd.grad(logprob, logits, retain_graph=True)[0].flatten() for logprob in logprobs]
        probabilities.append(torch.stack(logprobs).sum().exp().detach())
        gradients.append(torch.stack(slopes))
    return torch.stack(probabilities), gradients


def true_gradient() -> torch.Tensor:
    """The gradient of the expected reward."""
    probabilities, gradients = scores()
    sums = torch.stack([gradient.sum(0) for gradient in gradients])
    return (probabilities * RESPONSE_REWARDS) @ sums


def update_gradient(how: AdvantageConfig, aggregation: str, sampled: tuple[int, ...], n: int) -> torch.Tensor:
    """What the product's first update on these responses, in groups of n, follows."""
    _, gradients = scores()
    lengths = torch.tensor([len(RESPONSES[response]) for response in sampled])
    zeros = torch.zeros(int(lengths.sum()))
    groups = torch.arange(len(sampled)) // n
    batch = SampledTokens(RESPONSE_REWARDS[list(sampled)], groups, lengths, zeros, zeros, zeros, None)
    advantages = estimate(how, batch, AdvantageState()).advantages
    own, totals = lengths[batch.sequence], (len(zeros), len(sampled))
    weights = token_weights(torch.ones(len(zeros)).bool(), own, aggregation, *totals, 2)
    return ((weights.double() * advantages)[:, None] * torch.cat([gradients[response] for response in sampled])).sum(0)


@cache
def residual(name: str, aggregation: str | None, n: int, groups: int = 1) -> float:
    """Part of the policy gradient that no factor of the expected gradient gives: the sine of their angle.

    The expectation is over all updates on `groups` groups of n responses.
    """
    probabilities, _ = scores()
    config = AlgorithmConfig.model_validate({"name": name, "aggregation": aggregation})
    how, aggregation = advantage(config), policy_loss(config).aggregation
    total = torch.zeros(9, dtype=torch.double)
    for sampled in product(range(len(RESPONSES)), repeat=n * groups):
        total += probabilities[list(sampled)].prod() * update_gradient(how, aggregation, sampled, n)
    true = true_gradient()
    factor = (total @ true) / (total @ total)
    return float((factor * total - true).norm() / true.norm())


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_summed_tokens_give_the_policy_gradient_up_to_a_factor(name: str, n: int) -> None:
    for aggregation in ("sequence_sum", "constant"):
        assert residual(name, aggregation, n) < 1e-6
    for aggregation in ("token_mean", "sequence_mean"):
        assert residual(name, aggregation, n) > 0.01


def test_the_leave_one_out_mean_with_summed_tokens_is_the_policy_gradient_itself() -> None:
    probabilities, _ = scores()
    how = advantage(AlgorithmConfig(name="rloo"))
    for n in (2, 3):
        total = torch.zeros(9, dtype=torch.double)
        for group in product(range(len(RESPONSES)), repeat=n):
            total += probabilities[list(group)].prod() * update_gradient(how, "sequence_sum", group, n)
        torch.testing.assert_close(total, true_gradient(), rtol=1e-6, atol=1e-9)


def test_the_page_has_what_the_defaults_cost() -> None:
    page = ALGORITHMS_PAGE.read_text(encoding="utf-8")
    for name in DEFAULTS:
        default = policy_loss(AlgorithmConfig(name=name)).aggregation
        (row,) = re.findall(rf"^\| `{name}` \| `{default}` \|(.*)\|$", page, re.MULTILINE)
        shown = [float(cell.strip().rstrip("%")) for cell in row.split("|")]
        found = [residual(name, None, 2), residual(name, None, 2, groups=2), residual(name, None, 3)]
        found.append(residual(name, "sequence_sum", 2))
        assert shown == pytest.approx([100 * part for part in found], abs=0.051)
