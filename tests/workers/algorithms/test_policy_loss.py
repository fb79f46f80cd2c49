"""Losses against numbers worked by hand, naive float64 loops, TRL's formulas, and their own invariances."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.algorithms.policy_loss import (
    PolicyTokens,
    exact_kl,
    importance_weights,
    kl_penalty,
    policy_loss,
    sequence_sums,
    token_weights,
    value_loss,
)
from troupe.workers.contract.algorithm_config import CriticLossConfig, ImportanceConfig, PolicyLossConfig

NO_CORRECTION = ImportanceConfig(mode="none")


def plain_config(**changes: object) -> PolicyLossConfig:
    return PolicyLossConfig.model_validate({"importance": NO_CORRECTION, **changes})


def tokens_of(logprobs: list[float], advantages: list[float], **changes: object) -> PolicyTokens:
    current = torch.tensor(logprobs, dtype=torch.double, requires_grad=True)
    count = len(logprobs)
    given_fields = {
        "logprobs": current,
        "entropy": torch.zeros(count),
        "rollout_logprobs": current.detach().clone(),
        "advantages": torch.tensor(advantages, dtype=torch.double),
        "weights": torch.full((count,), 1.0 / count, dtype=torch.double),
        "loss_mask": torch.ones(count, dtype=torch.bool),
        "sequence": torch.zeros(count, dtype=torch.int64),
    }
    return PolicyTokens(**{**given_fields, **changes})


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad(loss, of, retain_graph=True)
    return result


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([True, True, False, True, True, True])
    sequence = torch.tensor([0, 0, 0, 1, 1, 1])
    own = sequence_sums(mask.float(), sequence)[sequence]
    token_mean = token_weights(mask, own, "token_mean", total_loss_tokens=10, total_sequences=4, max_tokens=8)
    assert token_mean.tolist() == pytest.approx([0.1, 0.1, 0, 0.1, 0.1, 0.1])
    sequence_mean = token_weights(mask, own, "sequence_mean", 10, 4, 8)
    assert sequence_mean.tolist() == pytest.approx([1 / 8, 1 / 8, 0, 1 / 12, 1 / 12, 1 / 12])
    constant = token_weights(mask, own, "constant", 10, 4, 8)
    assert constant.tolist() == pytest.approx([1 / 32, 1 / 32, 0, 1 / 32, 1 / 32, 1 / 32])
    sums = {name: token_weights(mask, own, name, 10, 4, 8).tolist() for name in ("sequence_sum", "only_token_mean")}
    third = pytest.approx(1 / 3)
    assert sums == {
        "sequence_sum": [1 / 4, 1 / 4, 0, 1 / 4, 1 / 4, 1 / 4],
        "only_token_mean": [1 / 2, 1 / 2, 0, *[third] * 3],
    }
    with pytest.raises(ValueError, match="aggregation"):
        token_weights(mask, own, "median", 10, 4, 8)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_token_weights_of_nothing(aggregation: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert token_weights(none.bool(), none, aggregation, 0, 0, 1).shape == (0,)
    masked = token_weights(torch.tensor([False]), torch.tensor([0]), aggregation, 0, 0, 1)
    assert masked.tolist() == [0.0]


def test_clipping_by_hand() -> None:
    # Ratios 1.5, 0.5, 1.5, 0.5, 1.1 with clip 0.2 / 0.4; advantages +, +, -, -, +.
    old = torch.zeros(5, dtype=torch.double)
    ratios, advantages = [1.5, 0.5, 1.5, 0.5, 1.1], [1.0, 2.0, -1.0, -2.0, 3.0]
    tokens = tokens_of([math.log(r) for r in ratios], advantages, old_logprobs=old)
    output = policy_loss(tokens, plain_config(clip_low=0.2, clip_high=0.4))
    # -1.4 (clipped) , -1.0 (free), +1.5 (free), +1.6 (clipped), -3.3 (free)
    assert output.loss.item() == pytest.approx((-1.4 - 1.0 + 1.5 + 1.6 - 3.3) / 5)
    assert float(output.sums["clip_fraction"]) == 2
    # d(-A r)/d logprob = -A r where free, 0 outside the clip.
    expected = torch.tensor([0.0, -1.0, 1.5, 0.0, -3.3]).double() / 5
    torch.testing.assert_close(gradient(output.loss, tokens.logprobs), expected)


def test_dual_clip_by_hand() -> None:
    old = torch.zeros(3, dtype=torch.double)
    tokens = tokens_of([math.log(r) for r in (5.0, 2.0, 5.0)], [-1.0, -1.0, 1.0], old_logprobs=old)
    output = policy_loss(tokens, plain_config(dual_clip=3.0))
    assert output.loss.item() == pytest.approx((3.0 + 2.0 - 1.2) / 3)
    torch.testing.assert_close(
        gradient(output.loss, tokens.logprobs), torch.tensor([0.0, 2.0 / 3, 0.0], dtype=torch.double)
    )
    assert float(output.sums["clip_fraction"]) == 2


def test_ratio_one_gives_the_policy_gradient() -> None:
    tokens = tokens_of([-0.3, -2.0, -1.1], [0.5, -1.0, 2.0])
    output = policy_loss(tokens, plain_config())
    assert output.loss.item() == pytest.approx(-(0.5 - 1.0 + 2.0) / 3)
    torch.testing.assert_close(gradient(output.loss, tokens.logprobs), -tokens.advantages / 3)
    explicit = policy_loss(replace(tokens, old_logprobs=tokens.logprobs.detach()), plain_config())
    torch.testing.assert_close(gradient(explicit.loss, tokens.logprobs), -tokens.advantages / 3)


def reference_loss(tokens: PolicyTokens, config: PolicyLossConfig) -> tuple[float, list[float]]:
    """Loss and gradient by a plain loop: the formulas written out token by token with Python floats."""
    loss, grads = 0.0, []
    cap = config.importance.cap or math.inf
    for t in range(len(tokens.logprobs)):
        if not tokens.loss_mask[t]:
            grads.append(0.0)
            continue
        new, weight, advantage = tokens.logprobs[t].item(), float(tokens.weights[t]), float(tokens.advantages[t])
        old = new if tokens.old_logprobs is None else float(tokens.old_logprobs[t])
        ratio = math.exp(new - old)
        w = math.exp(old - float(tokens.rollout_logprobs[t]))
        if config.importance.mode == "none":
            w = 1.0
        elif config.importance.mode == "truncate":
            w = min(w, cap)
        elif not 1 / cap <= w <= cap:
            w = 0.0
        free = -advantage * ratio
        bounded = -advantage * min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        term, slope = (free, free) if free >= bounded else (bounded, 0.0)
        if config.dual_clip is not None and advantage < 0 and term > -config.dual_clip * advantage:
            term, slope = -config.dual_clip * advantage, 0.0
        kl = kl_slope = 0.0
        if config.kl_coef and tokens.ref_logprobs is not None:
            d = new - float(tokens.ref_logprobs[t])
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[config.kl_estimator]
            kl_slope = {"k1": d, "k2": d, "k3": 1 - math.exp(-d)}[config.kl_estimator]
        loss += weight * (w * term + config.kl_coef * kl - config.entropy_coef * float(tokens.entropy[t]))
        grads.append(weight * (w * slope + config.kl_coef * kl_slope))
    return loss, grads


@pytest.mark.parametrize("mode", ["none", "truncate", "mask"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("on_policy", [True, False])
def test_against_a_plain_loop(mode: str, estimator: str, dual_clip: float | None, on_policy: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    count = 200

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.double) * scale

    base = -noise(1.0).abs()
    mask = torch.rand(count, generator=generator) > 0.2
    sequence = torch.arange(count) // 17
    tokens = PolicyTokens(
        logprobs=(base + noise(0.4)).requires_grad_(),
        entropy=noise(1.0).abs(),
        rollout_logprobs=base + noise(0.5),
        advantages=noise(1.0),
        weights=token_weights(
            mask, sequence_sums(mask.float(), sequence)[sequence], "sequence_mean", 500, 40, 30
        ).double(),
        loss_mask=mask,
        sequence=sequence,
        old_logprobs=None if on_policy else base,
        ref_logprobs=base + noise(0.3),
    )
    config = PolicyLossConfig.model_validate(
        {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": dual_clip,
            "kl_coef": 0.1,
            "kl_estimator": estimator,
            "entropy_coef": 0.01,
            "importance": {"mode": mode, "cap": 1.5},
        }
    )
    output = policy_loss(tokens, config)
    loss, grads = reference_loss(tokens, config)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(
        gradient(output.loss, tokens.logprobs), torch.tensor(grads, dtype=torch.double), rtol=1e-6, atol=1e-12
    )
    parts = output.terms["policy_loss"] + output.terms["kl_loss"] + output.terms["entropy_loss"]
    assert float(parts) == pytest.approx(loss, rel=1e-6)


def test_entropy_bonus_has_its_gradient() -> None:
    entropy = torch.tensor([1.0, 2.0], dtype=torch.double, requires_grad=True)
    output = policy_loss(tokens_of([-1.0, -1.0], [0.0, 0.0], entropy=entropy), plain_config(entropy_coef=0.5))
    torch.testing.assert_close(gradient(output.loss, entropy), torch.tensor([-0.25, -0.25], dtype=torch.double))


def test_matches_trl_on_a_padded_batch() -> None:
    """TRL 1.16 GRPOTrainer: loss types `grpo` and `dapo` with beta, written as in its `_compute_loss`."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 7, 1, 5])
    mask = torch.arange(7)[None, :] < lengths[:, None]
    new, old, ref = (-torch.rand(4, 7, generator=generator, dtype=torch.double) for _ in range(3))
    new.requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.double)[:, None].expand(4, 7)
    coef_1 = torch.exp(new - old)
    coef_2 = torch.clamp(coef_1, 0.8, 1.28)
    per_token = -torch.min(coef_1 * advantages, coef_2 * advantages)
    per_token = per_token + 0.04 * (torch.exp(ref - new) - (ref - new) - 1)
    theirs = {
        "sequence_mean": ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(),
        "token_mean": (per_token * mask).sum() / mask.sum(),
    }
    flat = new.detach()[mask].clone().requires_grad_()
    sequence = torch.repeat_interleave(torch.arange(4), lengths)
    for aggregation, expected in theirs.items():
        weights = token_weights(torch.ones(16).bool(), lengths[sequence], aggregation, 16, 4, 7).double()
        tokens = PolicyTokens(
            flat, torch.zeros(16), old[mask], advantages[mask], weights, mask[mask], sequence, old[mask], ref[mask]
        )
        output = policy_loss(tokens, plain_config(clip_high=0.28, kl_coef=0.04))
        assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
        (expected_grad,) = torch.autograd.grad(expected, new, retain_graph=True)
        torch.testing.assert_close(gradient(output.loss, flat), expected_grad[mask], rtol=1e-6, atol=1e-12)


def test_masked_tokens_reach_nothing() -> None:
    mask = torch.tensor([True, False, True])
    clean = tokens_of([-1.0, -2.0], [1.0, -1.0])
    poison = torch.tensor([0.0, math.nan, 0.0], dtype=torch.double)
    dirty = PolicyTokens(
        logprobs=torch.tensor([-1.0, math.inf, -2.0], dtype=torch.double, requires_grad=True),
        entropy=poison,
        rollout_logprobs=torch.tensor([-1.0, -math.inf, -2.0], dtype=torch.double),
        advantages=torch.tensor([1.0, math.nan, -1.0], dtype=torch.double),
        weights=torch.tensor([0.5, math.nan, 0.5], dtype=torch.double),
        loss_mask=mask,
        sequence=torch.zeros(3, dtype=torch.int64),
        ref_logprobs=torch.tensor([-1.5, math.nan, -1.5], dtype=torch.double),
    )
    config = plain_config(kl_coef=0.1, entropy_coef=0.1)
    output = policy_loss(dirty, config)
    expected = policy_loss(replace(clean, ref_logprobs=torch.tensor([-1.5, -1.5])), config)
    assert output.loss.item() == pytest.approx(expected.loss.item())
    grads = gradient(output.loss, dirty.logprobs)
    torch.testing.assert_close(grads[mask], gradient(expected.loss, clean.logprobs))
    assert grads[1] == 0.0
    for name, value in output.sums.items():
        assert float(value) == pytest.approx(float(expected.sums[name])), name
    assert all(math.isfinite(float(value)) for value in output.maxima.values())


@pytest.mark.parametrize("objective", ["clip", "likelihood"])
def test_the_loss_on_observations_is_their_mean_negative_log_likelihood(objective: str) -> None:
    """By a loop in float64 over two micro-batches; no other term changes, and no token is in both."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([True, False, False, True, True, False, True, False])
    logprobs = -torch.rand(8, generator=generator, dtype=torch.double)
    advantages = torch.randn(8, generator=generator, dtype=torch.double)
    total, slopes = 0.0, list[float]()
    for part in (slice(0, 5), slice(5, 8)):
        kept = {"loss_mask": mask[part], "total_observation_tokens": 4}
        tokens = tokens_of(logprobs[part].tolist(), advantages[part].tolist(), **kept)
        without = policy_loss(tokens, plain_config(objective=objective))
        output = policy_loss(tokens, plain_config(objective=objective, observation_coef=0.3))
        assert output.terms["policy_loss"] == without.terms["policy_loss"]
        assert output.sums == without.sums
        total += float(output.terms["observation_loss"])
        slopes += (gradient(output.loss, tokens.logprobs) - gradient(without.loss, tokens.logprobs)).tolist()
    expected = 0.0
    for logprob, sampled in zip(logprobs.tolist(), mask.tolist(), strict=True):
        expected += 0.0 if sampled else -0.3 * logprob / 4
    assert total == pytest.approx(expected, rel=1e-14)
    assert slopes == pytest.approx([0.0 if sampled else -0.3 / 4 for sampled in mask.tolist()], rel=1e-12)


def test_a_wild_ratio_stays_finite() -> None:
    tokens = tokens_of([-1.0], [-1.0], old_logprobs=torch.tensor([-2000.0], dtype=torch.double))
    assert math.isfinite(policy_loss(tokens, plain_config()).loss.item())


def test_kl_coef_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(tokens_of([-1.0], [1.0]), plain_config(kl_coef=0.1))


def test_metrics_by_hand() -> None:
    tokens = tokens_of(
        [-1.0, -2.0],
        [1.0, 1.0],
        old_logprobs=torch.tensor([-1.5, -2.0], dtype=torch.double),
        rollout_logprobs=torch.tensor([-1.2, -3.0], dtype=torch.double),
        entropy=torch.tensor([0.5, 1.0]),
    )
    output = policy_loss(tokens, PolicyLossConfig(importance=ImportanceConfig(mode="truncate", cap=2.0)))
    assert float(output.sums["tokens"]) == 2
    assert float(output.sums["rollout_logprob_gap"]) == pytest.approx(0.3 + 1.0)
    assert float(output.maxima["rollout_logprob_gap_max"]) == pytest.approx(1.0)
    assert float(output.sums["entropy"]) == pytest.approx(1.5)
    assert float(output.sums["kl_old"]) == pytest.approx(math.exp(0.5) - 1.5)
    assert float(output.sums["importance_weight"]) == pytest.approx(math.exp(-0.3) + 2.0)
    assert float(output.sums["importance_cut_fraction"]) == 1


def test_importance_weights_by_hand() -> None:
    old = torch.tensor([0.0, math.log(3.0), -math.log(3.0)])
    sampled = torch.zeros(3)
    truncated, cut = importance_weights(old, sampled, torch.arange(3), ImportanceConfig(mode="truncate", cap=2.0))
    assert truncated.tolist() == pytest.approx([1.0, 2.0, 1 / 3]) and cut.tolist() == [False, True, False]
    masked, cut = importance_weights(old, sampled, torch.arange(3), ImportanceConfig(mode="mask", cap=2.0))
    assert masked.tolist() == [1.0, 0.0, 0.0] and cut.tolist() == [False, True, True]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_in_expectation(estimator: str) -> None:
    """Averaged over a whole vocabulary, k1's and k2's gradient is that of KL(pi || ref), k3's of KL(ref || pi)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.double, requires_grad=True)
    ref = torch.randn(6, generator=generator, dtype=torch.double).log_softmax(-1)
    policy = logits.log_softmax(-1)
    expectation = (policy.exp().detach() * kl_penalty(policy, ref, estimator)).sum()
    reverse, forward = (policy.exp() * (policy - ref)).sum(), (ref.exp() * (ref - policy)).sum()
    if estimator != "k2":
        assert expectation.item() == pytest.approx(reverse.item())
    exact = forward if estimator == "k3" else reverse
    torch.testing.assert_close(gradient(expectation, logits), gradient(exact, logits))


def test_exact_kl_by_hand() -> None:
    """ln 2 for a sure token against a fair coin; what both forbid adds nothing."""
    old = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]).log()
    new = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()
    skewed = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert exact_kl(old, new).tolist() == pytest.approx([math.log(2), 0.0, skewed])


def test_exact_kl_is_torchs_and_the_sampled_estimate_is_its_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    old, new = (torch.randn(5, 9, generator=generator).log_softmax(-1) for _ in range(2))
    found = exact_kl(old, new)
    expected = torch.nn.functional.kl_div(new, old, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found, expected)
    # k3 of (old, new), averaged over the old policy's tokens, is the same number.
    torch.testing.assert_close((old.exp() * kl_penalty(old, new, "k3")).sum(-1), found)


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    st.integers(0, 2**31),
    st.randoms(use_true_random=False),
)
def test_split_and_order_do_not_matter(lengths: list[int], aggregation: str, seed: int, random: object) -> None:
    """Loss, gradient and sums of a batch are those of its micro-batches added up, in any order of sequences."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    total = int(counts.sum())
    fields = torch.randn(5, total, generator=generator, dtype=torch.double)
    mask = torch.rand(total, generator=generator) > 0.3
    weights_leaf = fields[0].clone().requires_grad_()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    config = PolicyLossConfig(kl_coef=0.1, clip_low=0.2)

    def run(rows: list[int]) -> tuple[torch.Tensor, dict[str, float]]:
        index = torch.cat([(sequence == row).nonzero().flatten() for row in rows])
        local = torch.repeat_interleave(torch.arange(len(rows)), counts[torch.tensor(rows)])
        own = sequence_sums(mask[index].float(), local)[local]
        weights = token_weights(mask[index], own, aggregation, int(mask.sum()), len(lengths), 9).double()
        tokens = PolicyTokens(
            logprobs=weights_leaf[index],
            entropy=fields[1][index],
            rollout_logprobs=fields[2][index],
            advantages=fields[3][index],
            weights=weights,
            loss_mask=mask[index],
            sequence=local,
            old_logprobs=fields[0][index] + 0.3 * fields[4][index],
            ref_logprobs=fields[1][index],
        )
        output = policy_loss(tokens, config)
        return output.loss, {name: float(value) for name, value in output.sums.items()}

    rows = list(range(len(lengths)))
    whole, whole_sums = run(rows)
    random.shuffle(rows)  # pyright: ignore[reportAttributeAccessIssue]
    cut = len(rows) // 2
    parts = [run(part) for part in (rows[:cut], rows[cut:]) if part]
    split = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient(split, weights_leaf), gradient(whole, weights_leaf), rtol=1e-6, atol=1e-9)
    for name, value in whole_sums.items():
        assert sum(sums[name] for _, sums in parts) == pytest.approx(value, rel=1e-6, abs=1e-9), name


@settings(max_examples=60, deadline=None)
@given(st.floats(-3, 3), st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3))
def test_no_gradient_outside_the_clip(log_ratio: float, advantage: float) -> None:
    tokens = tokens_of([log_ratio], [advantage], old_logprobs=torch.zeros(1, dtype=torch.double))
    slope = float(gradient(policy_loss(tokens, plain_config()).loss, tokens.logprobs))
    ratio = math.exp(log_ratio)
    outside = (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
    assert slope == pytest.approx(0.0 if outside else -advantage * ratio)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([1.0, 0.0, 2.0, 9.0], dtype=torch.double, requires_grad=True)
    old = torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=torch.double)
    returns = torch.tensor([2.0, 0.0, 1.0, 0.0], dtype=torch.double)
    mask = torch.tensor([True, True, True, False])
    weights = torch.full((4,), 1 / 3, dtype=torch.double) * mask
    output = value_loss(values, old, returns, weights, mask, CriticLossConfig(value_clip=0.2))
    # Near values 0.7, 0.3, 0.7: squared errors max(1, 1.69), max(0, 0.09), max(1, 0.09).
    assert output.loss.item() == pytest.approx(0.5 * (1.69 + 0.09 + 1.0) / 3)
    torch.testing.assert_close(
        gradient(output.loss, values), torch.tensor([0.0, 0.0, 1.0 / 3, 0.0], dtype=torch.double)
    )
    assert float(output.sums["value_clip_fraction"]) == 2 and float(output.sums["tokens"]) == 3
    plain = value_loss(values, old, returns, weights, mask, CriticLossConfig(value_clip=None))
    assert plain.loss.item() == pytest.approx(0.5 * (1.0 + 0.0 + 1.0) / 3)


def test_losses_of_nothing_have_a_gradient_of_zero() -> None:
    parameter = torch.ones(3, requires_grad=True)
    empty = parameter[torch.zeros(0, dtype=torch.int64)]
    none = torch.zeros(0)
    output = policy_loss(PolicyTokens(empty, none, none, none, none, none.bool(), none.long()), PolicyLossConfig())
    assert output.loss.item() == 0.0 and gradient(output.loss, parameter).tolist() == [0.0, 0.0, 0.0]
    values = parameter[torch.zeros(0, dtype=torch.int64)]
    valued = value_loss(values, none, none, none, none.bool(), CriticLossConfig())
    assert valued.loss.item() == 0.0 and gradient(valued.loss, parameter).tolist() == [0.0, 0.0, 0.0]
