"""Policy objectives against numbers worked by hand, TRL's own loss function, and what must hold of every row of the
algorithm table: splits, padding and wild numbers change nothing they should not."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.workers.algorithms.advantages import best_of_group
from troupe.workers.algorithms.policy_loss import (
    PolicyTokens,
    clip_bounds,
    importance_weights,
    kl_penalty,
    policy_log_ratio,
    policy_loss,
    sequence_sums,
    token_weights,
)
from troupe.workers.contract.algorithm_config import ImportanceConfig, PolicyLossConfig

NO_CORRECTION = ImportanceConfig(mode="none")
MAX_TOKENS = 9
LENGTHS = (3, 7, 1, 5, 4)


def config_of(name: str, **changes: object) -> PolicyLossConfig:
    """The loss of a row of the table, without the sampler's correction unless asked for."""
    return PolicyLossConfig.model_validate({**dict(ALGORITHMS[name].loss), "importance": NO_CORRECTION, **changes})


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad(loss, of, retain_graph=True)
    return result


def tokens_of(
    logprobs: Sequence[float], old: Sequence[float] | None, advantages: Sequence[float], **changes: Any
) -> PolicyTokens:
    """One sequence of float64 tokens of weight 1 each."""
    count = len(logprobs)
    current = torch.tensor(logprobs, dtype=torch.double, requires_grad=True)
    before = None if old is None else torch.tensor(old, dtype=torch.double)
    fields = {
        "logprobs": current,
        "entropy": torch.zeros(count),
        "rollout_logprobs": current.detach() if before is None else before,
        "advantages": torch.tensor(advantages, dtype=torch.double),
        "weights": torch.ones(count, dtype=torch.double),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "sequence": torch.zeros(count, dtype=torch.int64),
        "old_logprobs": before,
    }
    return PolicyTokens(**{**fields, **changes})


def own_tokens(mask: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Loss tokens of each token's sequence."""
    return sequence_sums(mask.float(), sequence)[sequence]


def random_tokens(
    seed: int,
    aggregation: str,
    lengths: Sequence[int] = LENGTHS,
    drift: float = 0.3,
    holes: float = 0.25,
    dtype: torch.dtype = torch.double,
) -> PolicyTokens:
    """A ragged batch with holes in the loss mask; one advantage per sequence; weights are those of the whole batch."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    total = int(counts.sum())

    def noise(scale: float) -> torch.Tensor:
        return (torch.randn(total, generator=generator, dtype=torch.double) * scale).to(dtype)

    old = -noise(1.5).abs()
    mask = torch.rand(total, generator=generator) >= holes
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.double).to(dtype)[sequence]
    weights = token_weights(mask, own_tokens(mask, sequence), aggregation, int(mask.sum()), len(lengths), MAX_TOKENS)
    return PolicyTokens(
        logprobs=(old + noise(drift)).requires_grad_(),
        entropy=noise(1.0).abs(),
        rollout_logprobs=old + noise(0.5),
        advantages=advantages,
        weights=weights.to(dtype),
        loss_mask=mask,
        sequence=sequence,
        old_logprobs=old,
        ref_logprobs=old + noise(0.4),
    )


# --- GSPO ---


def test_gspo_by_hand() -> None:
    """Ratios 2 and 1/8 have the geometric mean 1/2, for both tokens; the third token is not the policy's."""
    tokens = tokens_of(
        [math.log(2), math.log(1 / 8), -5.0],
        [0.0, 0.0, -1.0],
        [1.0, 1.0, 1.0],
        loss_mask=torch.tensor([True, True, False]),
        weights=torch.tensor([0.5, 0.5, 0.0], dtype=torch.double),
    )
    output = policy_loss(tokens, config_of("gspo", clip_low=0.9))
    assert output.loss.item() == pytest.approx(-0.5)
    # d s / d log pi_t = s / |o|: each token gets -A s / 2, once over the mean of both.
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([-0.25, -0.25, 0.0])
    # A = 1 is bounded above only, and 1/2 is not above 1 + 4e-4; A = -1 is bounded below.
    assert policy_loss(tokens, config_of("gspo")).loss.item() == pytest.approx(-0.5)
    punished = replace(tokens, advantages=-tokens.advantages)
    output = policy_loss(punished, config_of("gspo"))
    assert output.loss.item() == pytest.approx(1 - 3e-4)
    assert gradient(output.loss, tokens.logprobs).tolist() == [0.0, 0.0, 0.0]
    assert float(output.sums["clip_fraction"]) == 2


def test_gspo_is_one_clipped_ratio_per_response() -> None:
    """GSPO, eq. 5: the mean over responses of min(s A, clip(s) A), with nothing left of the tokens."""
    config = config_of("gspo", clip_low=0.1, clip_high=0.15)
    tokens = random_tokens(5, "sequence_mean", drift=0.6, holes=0.2)
    assert tokens.old_logprobs is not None
    total, expected = 0.0, torch.zeros(len(tokens.logprobs), dtype=torch.double)
    clipped = set()
    for row in range(len(LENGTHS)):
        members = (tokens.sequence == row) & tokens.loss_mask
        if not members.any():
            continue
        leaf = tokens.logprobs.detach().clone().requires_grad_()
        ratio = (leaf - tokens.old_logprobs)[members].mean().exp()
        advantage = tokens.advantages[tokens.sequence == row][0]
        objective = torch.min(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage) / len(LENGTHS)
        clipped.add(bool(gradient(objective, leaf).abs().sum() == 0))
        total -= objective.item()
        expected -= gradient(objective, leaf)
    assert clipped == {True, False}
    output = policy_loss(tokens, config)
    assert output.loss.item() == pytest.approx(total, rel=1e-7)
    torch.testing.assert_close(gradient(output.loss, tokens.logprobs), expected, rtol=1e-6, atol=1e-9)


def test_gspo_token_has_the_value_of_gspo_and_the_gradient_of_tokens() -> None:
    tokens = random_tokens(6, "sequence_mean")
    assert tokens.old_logprobs is not None
    wide = {"clip_low": 0.99, "clip_high": 99.0}  # nothing is clipped
    sequence, own = (policy_loss(tokens, config_of(name, **wide)) for name in ("gspo", "gspo_token"))
    token = policy_loss(tokens, config_of("grpo", **wide))
    assert own.loss.item() == pytest.approx(sequence.loss.item(), rel=1e-12)
    mask = tokens.loss_mask.double()
    zeroed = [torch.where(tokens.loss_mask, x, 0.0).detach() for x in (tokens.logprobs, tokens.old_logprobs)]
    ratios = [
        policy_log_ratio(zeroed[0], zeroed[1], mask, tokens.sequence, level).exp() for level in ("sequence", "token")
    ]
    # Eq. 14: the gradient of s sg[..] pi / sg[pi] is s times that of log pi, where the token ratio's is r times it.
    scaled = gradient(token.loss, tokens.logprobs) * ratios[0] / ratios[1]
    torch.testing.assert_close(gradient(own.loss, tokens.logprobs), scaled, rtol=1e-9, atol=1e-12)
    # With one advantage per response the gradients of GSPO and GSPO-token are the same (sec. 4.3).
    torch.testing.assert_close(
        gradient(own.loss, tokens.logprobs), gradient(sequence.loss, tokens.logprobs), rtol=1e-6, atol=1e-9
    )


def test_gspo_token_takes_advantages_that_differ_within_a_response() -> None:
    tokens = tokens_of([math.log(1.2), 0.0], [0.0, 0.0], [1.0, -3.0])
    s = math.sqrt(1.2)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    own = policy_loss(tokens, config_of("gspo_token", **wide))
    assert own.loss.item() == pytest.approx(-s + 3 * s)
    assert gradient(own.loss, tokens.logprobs).tolist() == pytest.approx([-s, 3 * s])
    shared = policy_loss(tokens, config_of("gspo", **wide))
    assert shared.loss.item() == pytest.approx(2 * s)
    assert gradient(shared.loss, tokens.logprobs).tolist() == pytest.approx([s, s])


# --- CISPO ---


def test_cispo_by_hand() -> None:
    """Ratios 8, 2, 1/4 with a bound of 5: every token keeps its gradient, the first with the weight 5."""
    tokens = tokens_of(
        [math.log(0.4), math.log(0.5), -1.0], [math.log(0.05), math.log(0.25), -1 + math.log(4)], [1, -2, 3]
    )
    output = policy_loss(tokens, config_of("cispo"))
    weights = [5.0, 2.0, 0.25]
    value = -(5 * math.log(0.4) + 2 * -2 * math.log(0.5) + 0.25 * 3 * -1.0)
    assert output.loss.item() == pytest.approx(value)
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx(
        [-w * a for w, a in zip(weights, [1, -2, 3], strict=True)]
    )
    assert float(output.sums["clip_fraction"]) == 1


# --- DCPO ---


def test_dynamic_bounds_are_the_papers_numbers() -> None:
    """The table of sec. 3.1: at q = 0.9 a new probability from 0.69, at q = 0.01 from 0.005 to 0.05."""
    config = config_of("dcpo")
    assert (config.clip_low, config.clip_high, config.max_ratio) == (0.16, 0.2, 10.0)
    q = torch.tensor([0.9, 0.01, 1e-4], dtype=torch.double)
    low, high = clip_bounds(q.log(), config)
    assert isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor)
    assert (low * q).tolist() == pytest.approx([0.6919, 0.005, 5e-5], abs=5e-5)
    assert (high * q)[:2].tolist() == pytest.approx([1.0685, 0.05], abs=5e-5)
    # sqrt(1 + 0.8 / 1e-4) / 2 + 1/2 would be 45.2.
    assert float(high[2]) == 10.0
    _, unlimited = clip_bounds(q.log(), config.model_copy(update={"max_ratio": None}))
    assert isinstance(unlimited, torch.Tensor) and float(unlimited[2]) == pytest.approx(0.5 + 0.5 * math.sqrt(8001))


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(0.01, 0.24), st.floats(0.01, 0.5))
@example(0.04, 0.01, 0.5)
def test_dynamic_bounds_solve_the_inequality(q: float, clip_low: float, clip_high: float) -> None:
    """At a bound |(r - 1) r q| is epsilon (sec. 3.1), where the lower one exists."""
    config = PolicyLossConfig(dynamic_clip=True, clip_low=clip_low, clip_high=clip_high)
    low, high = (float(bound) for bound in clip_bounds(torch.tensor([q], dtype=torch.double).log(), config))
    assert (high - 1) * high * q == pytest.approx(clip_high)
    assert 0.5 <= low < 1 < high
    if q > 4 * clip_low:
        assert (1 - low) * low * q == pytest.approx(clip_low)
    else:
        assert low == pytest.approx(0.5, abs=1e-6)  # the root of a rounding error where q is four times the bound


def test_dcpo_lets_improbable_tokens_move_further() -> None:
    """Ratio 3 at q = 0.01 is free where the fixed clip of DAPO stops it; at q = 0.3 it is not."""
    old = [math.log(0.01), math.log(0.3)]
    tokens = tokens_of([x + math.log(3) for x in old], old, [1.0, 1.0])
    dynamic, fixed = (policy_loss(tokens, config_of(name)) for name in ("dcpo", "dapo"))
    bound = 0.5 + 0.5 * math.sqrt(1 + 0.8 / 0.3)
    assert dynamic.loss.item() == pytest.approx(-3.0 - bound)
    assert gradient(dynamic.loss, tokens.logprobs).tolist() == pytest.approx([-3.0, 0.0])
    assert fixed.loss.item() == pytest.approx(-2 * 1.28)
    assert gradient(fixed.loss, tokens.logprobs).tolist() == [0.0, 0.0]


def test_only_token_mean_is_the_sum_of_the_sequences_means() -> None:
    mask = torch.tensor([True, True, False, True, False, True, True, True])
    sequence = torch.tensor([0, 0, 0, 1, 2, 3, 3, 3])
    weights = token_weights(mask, own_tokens(mask, sequence), "only_token_mean", 99, 50, 8)
    third = 1 / 3
    assert weights.tolist() == pytest.approx([0.5, 0.5, 0, 1, 0, third, third, third])
    tokens = random_tokens(7, "only_token_mean")
    means = [
        policy_loss(
            replace(
                tokens,
                loss_mask=tokens.loss_mask & (tokens.sequence == row),
                weights=torch.ones(len(tokens.weights)).double(),
            ),
            config_of("dcpo"),
        )
        for row in range(len(LENGTHS))
    ]
    expected = sum(output.loss.item() / max(float(output.sums["tokens"]), 1.0) for output in means)
    assert policy_loss(tokens, config_of("dcpo")).loss.item() == pytest.approx(expected, rel=1e-6)


# --- Policy gradient, clip and penalty ---


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant", "only_token_mean"])
def test_at_ratio_one_all_objectives_have_one_gradient(aggregation: str) -> None:
    tokens = replace(random_tokens(8, aggregation), old_logprobs=None)
    expected = -tokens.advantages * tokens.weights
    for name in (
        "reinforce",
        "rloo",
        "grpo",
        "ppo_penalty",
        "ppo_kl_limit",
        "trpo",
        "gspo_token",
        "gmpo",
        "sapo",
        "cispo",
        "dcpo",
        "raft",
    ):
        output = policy_loss(tokens, config_of(name, aggregation=aggregation), 0.7)
        torch.testing.assert_close(gradient(output.loss, tokens.logprobs), expected, rtol=1e-9, atol=1e-12)


def test_policy_gradient_by_hand() -> None:
    # -A r: the ratios are 2 and 1/4.
    tokens = tokens_of([-0.5, -2.0], [-0.5 - math.log(2), -2.0 + math.log(4)], [2.0, -1.0])
    output = policy_loss(tokens, config_of("reinforce"))
    assert output.loss.item() == pytest.approx(-4.0 + 0.25)
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([-4.0, 0.25])
    # The first update on a batch: REINFORCE, -A grad log pi.
    output = policy_loss(replace(tokens, old_logprobs=None), config_of("reinforce"))
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([-2.0, 1.0])


@pytest.mark.parametrize("name", ["reinforce", "actor_critic", "actor_critic_gae", "remax", "rloo", "ppo_kl_limit"])
def test_a_second_update_has_the_gradient_of_the_policy_it_changes(name: str) -> None:
    """A bandit of three arms, all rewards known: the exact gradient of the expected advantage is
    sum_a pi(a) A(a) grad log pi(a). The batch has every arm with the probability that the policy had before its first
    update. Without the ratio the second update's gradient is that of another policy and wrong in sign.
    """
    advantages = torch.tensor([1.0, 0.08, -1.0], dtype=torch.double)
    old = torch.tensor([0.2, 0.6, 0.2], dtype=torch.double).log()
    logits = torch.tensor([0.24, 0.56, 0.2], dtype=torch.double).log().requires_grad_()
    new = logits.log_softmax(-1)
    expected = -gradient((new.exp() * advantages).sum(), logits)
    tokens = tokens_of([0.0] * 3, old.tolist(), advantages.tolist())
    # 0.24 / 0.2 is a ratio of 1.2 and so within the rows' clip range.
    config = config_of(name, clip_high=0.21)
    batch = replace(tokens, logprobs=new, weights=old.exp())
    torch.testing.assert_close(gradient(policy_loss(batch, config).loss, logits), expected, rtol=1e-12, atol=1e-15)
    without_ratio = gradient(-(old.exp() * advantages * new).sum(), logits)
    assert (without_ratio.sign() != expected.sign()).any()


def test_outliers_keep_the_sign_of_their_gradient() -> None:
    """Beyond +-20 nats: the loss is finite, and a token is pushed where its advantage and the KL term say."""
    config = config_of("grpo", kl_coef=0.1)
    # A ratio of e^25 with a negative advantage: the token became far too likely. It must become less likely.
    likely = tokens_of([-1.0], [-26.0], [-1.0])
    assert float(gradient(policy_loss(likely, config_of("grpo")).loss, likely.logprobs)) == pytest.approx(math.exp(20))
    # 25 nats less likely than under the reference: k3's gradient is 1 - e^25 there, so the token must become likelier.
    rare = replace(tokens_of([-26.0], None, [0.0]), ref_logprobs=torch.tensor([-1.0], dtype=torch.double))
    slope = float(gradient(policy_loss(rare, config).loss, rare.logprobs))
    assert slope == pytest.approx(0.1 * (1 - math.exp(20)))
    # Within the limit nothing is approximated.
    for d in (-19.9, -3.0, 0.0, 5.0, 60.0):
        point = torch.tensor([d - 1.0], dtype=torch.double, requires_grad=True)
        kl = kl_penalty(point, torch.tensor([-1.0], dtype=torch.double), "k3")
        assert kl.item() == pytest.approx(math.expm1(-d) + d, rel=1e-12)
        assert float(gradient(kl.sum(), point)) == pytest.approx(1 - math.exp(-d), rel=1e-12)


def test_raft_is_the_likelihood_of_the_best() -> None:
    """The mean over groups of the mean negative log-likelihood of the best response."""
    tokens = replace(random_tokens(9, "sequence_mean", lengths=(3, 5, 2, 4), holes=0.0), old_logprobs=None)
    scores = best_of_group(torch.tensor([0.0, 1.0, 3.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    tokens = replace(tokens, advantages=scores[tokens.sequence])
    output = policy_loss(tokens, config_of("raft"))
    best = [-tokens.logprobs[tokens.sequence == row].mean().item() for row in (1, 2)]
    assert output.loss.item() == pytest.approx(sum(best) / 2, rel=1e-6)
    # The policy that sampled does not matter, in the first update or in a later one.
    later = policy_loss(replace(tokens, old_logprobs=tokens.rollout_logprobs - 3.0), ALGORITHMS["raft"].loss)
    assert later.loss.item() == output.loss.item()


def test_raft_weighs_groups_equally_after_samples_were_dropped() -> None:
    """Groups of 3 and 1 samples: each counts with half the loss."""
    tokens = replace(random_tokens(9, "sequence_mean", lengths=(3, 5, 2, 4), holes=0.0), old_logprobs=None)
    scores = best_of_group(torch.tensor([0.0, 1.0, 3.0, 2.0]), torch.tensor([0, 0, 0, 1]))
    output = policy_loss(replace(tokens, advantages=scores[tokens.sequence]), config_of("raft"))
    best = [-tokens.logprobs[tokens.sequence == row].mean().item() for row in (2, 3)]
    assert output.loss.item() == pytest.approx(sum(best) / 2, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["ppo", "dapo", "dcpo"]),
    st.floats(-3, 3),
    st.floats(0.002, 1),
    st.floats(-2, 2, allow_subnormal=False),
)
@example("dcpo", 3.0, 0.01, -1.0)  # dual clip
def test_no_gradient_beyond_a_bound(name: str, log_ratio: float, q: float, advantage: float) -> None:
    config, old = config_of(name), math.log(q)
    tokens = tokens_of([old + log_ratio], [old], [advantage])
    low, high = (float(bound) for bound in clip_bounds(torch.tensor([old], dtype=torch.double), config))
    output = policy_loss(tokens, config)
    slope, ratio = float(gradient(output.loss, tokens.logprobs)), math.exp(log_ratio)
    highest = high if advantage > 0 else config.dual_clip or math.inf
    outside = ratio > highest or (advantage < 0 and ratio < low)
    assert slope == pytest.approx(0.0 if outside else -advantage * ratio, rel=1e-9, abs=1e-12)
    assert bool(output.sums["clip_fraction"]) == (outside and advantage != 0)


def test_kl_penalty_by_hand() -> None:
    """PPO, eq. 8, with KL(old || new) from tokens of the old policy: r - 1 - log r, whose derivative is r - 1."""
    tokens = tokens_of([math.log(2), math.log(0.5), -1.0], [0.0, 0.0, -1.0], [1.0, 3.0, 2.0])
    output = policy_loss(tokens, config_of("ppo_penalty"), kl_old_coef=0.5)
    k = [1 - math.log(2), -0.5 + math.log(2), 0.0]
    assert float(output.terms["policy_loss"]) == pytest.approx(-2.0 - 1.5 - 2.0)
    assert float(output.terms["kl_old_loss"]) == pytest.approx(0.5 * sum(k))
    assert output.loss.item() == pytest.approx(-5.5 + 0.5 * sum(k))
    # -A r + beta (r - 1): nothing is clipped.
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([-2 + 0.5, -1.5 - 0.25, -2.0])
    assert float(output.sums["clip_fraction"]) == 0
    assert float(output.sums["kl_old"]) == pytest.approx(sum(k))


def test_penalty_is_kl_old_new_in_expectation() -> None:
    """Averaged over the old policy's whole vocabulary, value and gradient are exactly those of KL(old || new)."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(7, generator=generator, dtype=torch.double, requires_grad=True)
    old = torch.randn(7, generator=generator, dtype=torch.double).log_softmax(-1)
    tokens = replace(tokens_of([0.0] * 7, old.tolist(), [0.0] * 7), logprobs=logits.log_softmax(-1), weights=old.exp())
    output = policy_loss(tokens, config_of("ppo_penalty"), kl_old_coef=1.0)
    exact = (old.exp() * (old - logits.log_softmax(-1))).sum()
    assert output.loss.item() == pytest.approx(exact.item())
    torch.testing.assert_close(gradient(output.loss, logits), gradient(exact, logits))


def test_kl_in_the_loss_is_the_rows_estimator() -> None:
    """REINFORCE++'s baseline variant adds 0.01 k2, with the gradient d per token."""
    tokens = replace(
        tokens_of([-1.0, -2.0], None, [0.0, 0.0]), ref_logprobs=torch.tensor([-1.5, -1.0], dtype=torch.double)
    )
    output = policy_loss(tokens, config_of("reinforce_pp_baseline"))
    assert float(output.terms["kl_loss"]) == pytest.approx(0.01 * (0.125 + 0.5))
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([0.005, -0.01])
    assert float(kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2")) == pytest.approx(0.125)


# --- Sampler against trainer ---


def test_importance_of_a_whole_sequence_by_hand() -> None:
    """Products of w: 2 * 1/4 = 1/2 (three tokens, one 1), 4, and 1/8."""
    log = math.log
    old = torch.tensor([log(2), log(1 / 4), 0.0, log(4), log(1 / 2), log(1 / 4)])
    sequence = torch.tensor([0, 0, 0, 1, 2, 2])

    def weights(**changes: object) -> tuple[list[float], list[bool]]:
        config = ImportanceConfig.model_validate({"level": "sequence", "cap": 3.0, **changes})
        w, cut = importance_weights(old, torch.zeros(6), sequence, config)
        return w.tolist(), cut.tolist()

    truncated, cut = weights(mode="truncate")
    assert truncated == pytest.approx([0.5, 0.5, 0.5, 3.0, 0.125, 0.125])
    assert cut == [False, False, False, True, False, False]
    masked, cut = weights(mode="mask")
    assert masked == pytest.approx([0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    assert cut == [False, False, False, True, True, True]
    assert weights(mode="none") == ([1.0] * 6, [False] * 6)


def test_importance_of_a_sequence_ignores_foreign_tokens() -> None:
    """What the sampler and the trainer say of a masked token is no part of the product."""
    tokens = tokens_of(
        [-1.0, -1.0, -1.0],
        [-1.0, -9.0, -1.0],
        [1.0, 1.0, 1.0],
        rollout_logprobs=torch.tensor([-1.0 - math.log(1.5), -1.0, -1.0], dtype=torch.double),
        loss_mask=torch.tensor([True, False, True]),
    )
    config = config_of("grpo", importance=ImportanceConfig(mode="mask", level="sequence", cap=2.0))
    output = policy_loss(tokens, config)
    assert output.loss.item() == pytest.approx(-3.0)
    assert gradient(output.loss, tokens.logprobs).tolist() == pytest.approx([-1.5, 0.0, -1.5])
    assert float(output.sums["importance_weight"]) == pytest.approx(3.0)


# --- TRL ---


@cache
def trl_function(module: str, owner: str) -> Any:
    """`_compute_loss` of one of TRL's trainers, compiled from the installed package's file.

    Importing the trainer takes half a minute (it imports vLLM); its loss function alone needs only torch.
    """
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    folder = "experimental/gmpo" if owner == "GMPOTrainer" else "trainer"
    tree = ast.parse((Path(found.origin).parent / folder / f"{module}.py").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss")
    names: dict[str, Any] = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}  # the latter for metrics only
    exec(compile(ast.Module([function], []), f"trl {module}", "exec"), names)
    return names["_compute_loss"]


def padded(tokens: PolicyTokens, values: torch.Tensor) -> torch.Tensor:
    """[B, T] of a flat column, 0 in the padding."""
    rows = [values[tokens.sequence == row] for row in range(int(tokens.sequence.max()) + 1)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_trainer(logprobs: torch.Tensor, **settings_: Any) -> SimpleNamespace:
    """What the loss functions read of a trainer."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor, sync_gradients=True
    )
    defaults = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        "accelerator": accelerator,
        "args": SimpleNamespace(
            use_bias_correction_kl=False,
            delta=settings_.pop("delta", None),
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_TOKENS,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
    }
    return SimpleNamespace(**(defaults | settings_))


def trl_loss(tokens: PolicyTokens, trainer: str = "grpo", **settings_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, gradient over the flat tokens) by TRL's trainer on the padded batch."""
    assert tokens.old_logprobs is not None and tokens.ref_logprobs is not None
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    mask, nothing = padded(tokens, tokens.loss_mask.to(leaf.dtype)), torch.zeros(len(LENGTHS), 0)
    old = padded(tokens, tokens.old_logprobs)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": padded(tokens, tokens.advantages)[:, 0],
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": padded(tokens, tokens.ref_logprobs),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": settings_.pop("importance_sampling_ratio", None),
    }
    name = trainer.upper() + "Trainer"
    function = trl_function(f"{trainer}_trainer", name)
    loss = function(trl_trainer(padded(tokens, leaf), **settings_), None, inputs)
    return loss, gradient(loss, leaf)


LIKE_TRL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (changes to Troupe's row, TRL's settings)
    "grpo": ({"kl_coef": 0.04}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ({}, {"loss_type": "dr_grpo"}),
    "dapo": ({}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ({}, {"loss_type": "bnpo"}),
    "two_sided": ({"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "gspo": (
        {"clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    ),
    "gspo_as_published": (
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({}, {"loss_type": "cispo", "epsilon_high": 1 + ALGORITHMS["cispo"].loss.clip_high}),
    "gmpo": ({}, {"trainer": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}),
    "gmpo_tight": ({"clip_low": 0.1, "clip_high": 0.2}, {"trainer": "gmpo", "epsilon_low": 0.1, "epsilon_high": 0.2}),
    "sapo": ({}, {"loss_type": "sapo"}),
    "cispo_tight": ({"clip_high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
}
ROW_OF = {"bnpo": "ppo", "two_sided": "grpo", "gspo_as_published": "gspo", "cispo_tight": "cispo", "gmpo_tight": "gmpo"}


@pytest.mark.parametrize("case", LIKE_TRL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trl_gives_the_same_loss_and_gradient(case: str, dtype: torch.dtype) -> None:
    """TRL 1.16's own `GRPOTrainer._compute_loss`, on a padded batch with masked tokens inside the responses."""
    changes, theirs = LIKE_TRL[case]
    config = config_of(ROW_OF.get(case, case), **changes)
    for seed in range(5):
        # A response without a loss token adds its advantage to the value (not to the gradient) of TRL's GMPO.
        holes = 0.0 if "trainer" in theirs else 0.25
        tokens = random_tokens(seed, config.aggregation, drift=0.5, holes=holes, dtype=dtype)
        expected, expected_gradient = trl_loss(tokens, **theirs)
        output = policy_loss(tokens, config)
        assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)
        torch.testing.assert_close(gradient(output.loss, tokens.logprobs), expected_gradient, rtol=0, atol=1e-5)


def test_trl_weighs_tokens_for_the_sampler_in_the_same_place() -> None:
    """The truncated weight multiplies the policy term, and not the KL to the reference."""
    importance = ImportanceConfig(mode="truncate", cap=1.25)
    config = config_of("grpo", importance=importance, kl_coef=0.04)
    tokens = random_tokens(1, config.aggregation)
    assert tokens.old_logprobs is not None
    ratio = (tokens.old_logprobs - tokens.rollout_logprobs).exp().clamp(max=1.25)
    expected, expected_gradient = trl_loss(
        tokens,
        loss_type="grpo",
        beta=0.04,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        importance_sampling_ratio=padded(tokens, ratio),
    )
    output = policy_loss(tokens, config)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient(output.loss, tokens.logprobs), expected_gradient, rtol=1e-6, atol=1e-9)


def test_trls_rloo_moves_in_the_same_direction() -> None:
    """On the first update RLOO's gradient in TRL is Troupe's, times tokens per response (a mean over responses)."""
    tokens = random_tokens(4, "token_mean", drift=0.0)
    _, expected = trl_loss(tokens, trainer="rloo")
    output = policy_loss(tokens, config_of("rloo"))
    per_response = float(tokens.loss_mask.sum()) / len(LENGTHS)
    torch.testing.assert_close(gradient(output.loss, tokens.logprobs) * per_response, expected, rtol=1e-6, atol=1e-9)


# --- What holds of every row ---


def row_config(name: str) -> tuple[PolicyLossConfig, float]:
    """The row's loss with everything that can be added to it, and a penalty on KL(old || new)."""
    row = ALGORITHMS[name]
    changes = {"kl_coef": 0.1, "entropy_coef": 0.01, "importance": row.loss.importance.model_copy(update={"cap": 1.5})}
    return row.loss.model_copy(update=changes), 0.5 if row.kl_penalty else 0.0


def with_penalties(tokens: PolicyTokens) -> PolicyTokens:
    """The same with a penalty on the change of every third token, divergences and means of scores."""
    number, dtype = torch.arange(len(tokens.sequence)), tokens.logprobs.dtype
    means = {"centering": (number % 7).to(dtype), "sampler_mass": 1.0 / (1.0 + number.to(dtype))}
    return replace(tokens, penalties=(number % 3 == 0).to(dtype), divergences=(number % 5).to(dtype), **means)


def select(tokens: PolicyTokens, index: torch.Tensor, **changes: torch.Tensor) -> PolicyTokens:
    columns = {name: value[index] for name, value in vars(tokens).items() if isinstance(value, torch.Tensor)}
    return replace(tokens, **{**columns, **changes})


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=2, max_size=7).filter(lambda lengths: sum(lengths) > 0),
    st.integers(0, 2**31),
    st.integers(1, 6),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_micro_batches_add_up(
    name: str, lengths: list[int], seed: int, cut: int, by_sequence: bool, random: object
) -> None:
    """Loss, gradient and sums are those of the micro-batches added up, in any order of sequences."""
    config, beta = row_config(name)
    level = "sequence" if by_sequence else "token"
    config = config.model_copy(update={"importance": config.importance.model_copy(update={"level": level})})
    tokens = with_penalties(random_tokens(seed, config.aggregation, lengths))
    whole = policy_loss(tokens, config, beta)
    rows = list(range(len(lengths)))
    random.shuffle(rows)  # pyright: ignore[reportAttributeAccessIssue]
    parts = []
    for part in (rows[:cut], rows[cut:]):
        index = torch.cat([(tokens.sequence == row).nonzero().flatten() for row in [*part, -1]])
        local = torch.repeat_interleave(torch.arange(len(part)), torch.tensor([lengths[row] for row in part]).long())
        mask = tokens.loss_mask[index]
        total = int(tokens.loss_mask.sum())
        own = own_tokens(mask, local)
        weights = token_weights(mask, own, config.aggregation, total, len(lengths), MAX_TOKENS).double()
        parts.append(policy_loss(select(tokens, index, sequence=local, weights=weights), config, beta))
    loss = torch.stack([part.loss for part in parts]).sum()
    torch.testing.assert_close(loss, whole.loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        gradient(loss, tokens.logprobs), gradient(whole.loss, tokens.logprobs), rtol=1e-6, atol=1e-9
    )
    for kind in ("sums", "terms"):
        for key, value in getattr(whole, kind).items():
            added = sum(float(getattr(part, kind)[key]) for part in parts)
            assert added == pytest.approx(float(value), rel=1e-6, abs=1e-9), key
    for key, value in whole.maxima.items():
        assert max(float(part.maxima[key]) for part in parts) == pytest.approx(float(value)), key


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_tokens_reach_nothing(name: str, level: str, poison: float) -> None:
    """Loss, gradient and metrics are those of the batch without its masked tokens, whatever stands there."""
    config, beta = row_config(name)
    config = config.model_copy(update={"importance": config.importance.model_copy(update={"level": level})})
    tokens = with_penalties(random_tokens(11, config.aggregation))
    mask = tokens.loss_mask
    assert not mask.all()
    clean = policy_loss(select(tokens, mask), config, beta)
    dirty_columns = {
        column: torch.where(mask, value, poison).detach()
        for column, value in vars(tokens).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    dirty = replace(tokens, **dirty_columns)
    dirty.logprobs.requires_grad_()
    output = policy_loss(dirty, config, beta)
    assert output.loss.item() == pytest.approx(clean.loss.item(), rel=1e-9)
    grads = gradient(output.loss, dirty.logprobs)
    torch.testing.assert_close(grads[mask], gradient(clean.loss, tokens.logprobs)[mask], rtol=1e-9, atol=1e-12)
    assert grads[~mask].tolist() == [0.0] * int((~mask).sum())
    for kind in ("sums", "terms", "maxima"):
        for key, value in getattr(clean, kind).items():
            assert float(getattr(output, kind)[key]) == pytest.approx(float(value), rel=1e-6), key


@pytest.mark.parametrize("name", ALGORITHMS)
def test_padding_changes_nothing(name: str) -> None:
    """Masked tokens at the end of a sequence, and sequences of nothing else, do not move the loss."""
    config, beta = row_config(name)
    tokens = with_penalties(random_tokens(12, config.aggregation, holes=0.0))
    expected = policy_loss(tokens, config, beta)
    count, rows = len(tokens.sequence), len(LENGTHS)
    # Three tokens of padding: behind the first sequence, behind the last, and in a separate sequence.
    order = torch.tensor([0, 1, 2, count, *range(3, count), count + 1, count + 2])
    columns = {}
    for column, value in vars(tokens).items():
        if not isinstance(value, torch.Tensor):
            continue
        pad = torch.tensor([0, rows - 1, rows]) if column == "sequence" else torch.zeros(3, dtype=value.dtype)
        columns[column] = torch.cat([value, pad])[order]
    own = own_tokens(columns["loss_mask"], columns["sequence"])
    weights = token_weights(columns["loss_mask"], own, config.aggregation, count, rows, MAX_TOKENS)
    output = policy_loss(replace(tokens, **{**columns, "weights": weights.double()}), config, beta)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(
        gradient(output.loss, tokens.logprobs), gradient(expected.loss, tokens.logprobs), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_wild_log_ratios_stay_finite(name: str) -> None:
    """float32, log-probs up to 10,000 nats apart both ways: no infinity, no NaN."""
    config, beta = row_config(name)
    wild = torch.tensor([-1e4, -1.0, -0.0, -1e4, -1e2, -0.0, -1e-30, -60.0])
    mask, sequence = torch.ones(8, dtype=torch.bool), torch.tensor([0, 0, 1, 2, 2, 3, 3, 3])
    for advantage in (1.0, -1.0):
        logprobs = wild.clone().requires_grad_()
        tokens = PolicyTokens(
            logprobs=logprobs,
            entropy=torch.zeros(8),
            rollout_logprobs=wild.roll(1),
            advantages=torch.full((8,), advantage),
            weights=token_weights(mask, own_tokens(mask, sequence), config.aggregation, 8, 4, MAX_TOKENS),
            loss_mask=mask,
            sequence=sequence,
            old_logprobs=wild.flip(0),
            ref_logprobs=wild.roll(3),
        )
        output = policy_loss(with_penalties(tokens), config, beta)
        assert math.isfinite(output.loss.item())
        assert torch.isfinite(gradient(output.loss, logprobs)).all()
        for kind in ("sums", "terms", "maxima"):
            assert all(math.isfinite(float(value)) for value in getattr(output, kind).values()), kind
