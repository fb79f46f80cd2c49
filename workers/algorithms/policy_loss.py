"""Pure loss functions on flat per-token tensors.

Every tensor here is 1-D over the response tokens of one micro-batch. A loss is `sum_t weight_t * loss_t`, and
the weights (`token_weights`) carry the totals of the whole optimizer update: adding up micro-batches and ranks
gives the update's loss however the batch is split.

A token with `loss_mask` False takes part in nothing: whatever stands there, NaN included, reaches neither the
loss, nor a gradient, nor a metric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from workers.config import CriticLossConfig, ImportanceConfig, PolicyLossConfig

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped here before `exp`, so that one wild token gives a huge number and not infinity."""


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's loss, and detached statistics (float64 scalars) over its loss tokens."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    terms: Mapping[str, torch.Tensor]
    """The loss and its parts: they add up over micro-batches and ranks."""
    sums: Mapping[str, torch.Tensor]
    """Sums over loss tokens; added up over micro-batches and ranks and divided by the sum `tokens` they are means."""
    maxima: Mapping[str, torch.Tensor]

    def statistics(self) -> LossOutput:
        """The same without the graph of the loss, which may hold on to activations long after its backward pass."""
        return replace(self, loss=self.loss.detach())


def token_weights(
    loss_mask: torch.Tensor,
    sequence: torch.Tensor,
    aggregation: str,
    total_loss_tokens: int,
    total_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """float32 [T]: the weight of each token in the update's loss; 0 where `loss_mask` is False.

    token_mean: 1 / total_loss_tokens (DAPO, arXiv 2503.14476). sequence_mean: 1 / (total_sequences * loss tokens of
    the sequence) (GRPO, arXiv 2402.03300). constant: 1 / (total_sequences * max_tokens) (Dr. GRPO, arXiv 2503.20783).
    only_token_mean: 1 / loss tokens of the sequence (DCPO, arXiv 2509.02333, sec. 3.3).
    The totals are those of the whole update over all ranks. Raises ValueError for another aggregation.
    """
    mask = loss_mask.float()
    if aggregation == "token_mean":
        return mask / max(total_loss_tokens, 1)
    if aggregation == "constant":
        return mask / max(total_sequences * max_tokens, 1)
    share = mask / sequence_sums(mask, sequence).clamp(min=1.0)[sequence]
    if aggregation == "sequence_mean":
        return share / max(total_sequences, 1)
    if aggregation == "only_token_mean":
        return share
    raise ValueError(f"unknown aggregation {aggregation!r}")


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[B]: sums of `values` [T] over the tokens of each sequence; `sequence`: int64 [T], numbers below B."""
    sums = values.new_zeros(int(sequence.max()) + 1 if len(sequence) else 0)
    return sums.index_add(0, sequence, values)


def kl_penalty(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, to be differentiated through `logprobs`.

    With d = logprobs - ref_logprobs and tokens drawn from the policy (Schulman, "Approximating KL divergence", 2020):

    k1 = d: unbiased in value. Its own derivative averages to zero, so that as a loss it would do nothing;
      here its gradient is k2's.
    k2 = d^2 / 2: biased in value; its gradient d * grad(logprobs) is, on average, exactly that of
      KL(policy || reference).
    k3 = exp(-d) - 1 + d: unbiased in value and never negative, the term of the GRPO paper (arXiv 2402.03300).
      Its gradient is, on average, that of KL(reference || policy): the same to second order while the two are close.

    All hold on policy; after several updates on one batch they are approximations. Raises ValueError for another name.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        squared = 0.5 * difference.square()
        return difference.detach() + squared - squared.detach()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        # For tiny differences exp(-d) - 1 + d cancels; expm1 keeps the digits.
        return torch.expm1((-difference).clamp(max=MAX_LOG_RATIO)) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}")


def exact_kl(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[T]: KL(old || new) = sum_v old(v) (log old(v) - log new(v)), in nats, of log-probs [T, vocabulary].

    What both forbid (log-prob -inf) adds nothing. The mean over states that the old policy visits is what TRPO bounds
    (arXiv 1502.05477, eq. 12).
    """
    terms = old.exp() * (old - new)
    return terms.masked_fill(old == -torch.inf, 0.0).sum(-1)


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, sequence: torch.Tensor, config: ImportanceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, cut): corrections for tokens sampled by an engine whose numbers differ from the trainer's.

    With w = exp(old_logprobs - rollout_logprobs), or its product over the sequence: `truncate` gives min(w, cap)
    (truncated importance sampling), `mask` gives w inside [1/cap, cap] and 0 outside, `none` gives 1. `cut` is True
    where w was changed. All [T]; outside the loss mask both log-probs must be 0. No gradient flows through the weights.
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    if config.level == "sequence":
        log_ratio = sequence_sums(log_ratio, sequence)[sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.mode == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "truncate":
        return ratio.clamp(max=config.cap), ratio > config.cap
    outside = (ratio > config.cap) | (ratio < 1.0 / config.cap)
    return ratio.masked_fill(outside, 0.0), outside


def policy_log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, tokens: torch.Tensor, sequence: torch.Tensor, level: str
) -> torch.Tensor:
    """log of the ratio of new to old policy, [T], at one of three levels.

    token: log pi - log pi_old. sequence: its mean over the sequence's loss tokens, the same for all of them (GSPO,
    arXiv 2507.18071, eq. 7). sequence_token: that value, with the gradient of the token's own (eq. 14).
    `tokens`: float [T], 1 on loss tokens and 0 elsewhere, where both log-probs must be 0.
    """
    own = logprobs - old_logprobs
    if level == "token":
        return own.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    count = sequence_sums(tokens, sequence).clamp(min=1.0)
    mean = (sequence_sums(own, sequence) / count)[sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if level == "sequence":
        return mean
    return mean.detach() + own - own.detach()


def clip_bounds(
    old_logprobs: torch.Tensor, config: PolicyLossConfig
) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    """(lower, upper) bound of the ratio: numbers, or [T] with `dynamic_clip`.

    DCPO (arXiv 2509.02333, eq. 7) bounds |(r - 1) p| instead of |r - 1|; with q the old probability that is
    1/2 + 1/2 sqrt(max(1 - 4 clip_low / q, 0)) <= r <= 1/2 + 1/2 sqrt(1 + 4 clip_high / q), and r <= `max_ratio`.
    """
    if not config.dynamic_clip:
        return 1.0 - config.clip_low, 1.0 + config.clip_high
    inverse = (-old_logprobs.detach()).clamp(max=MAX_LOG_RATIO).exp()
    lower = 0.5 + 0.5 * (1.0 - 4.0 * config.clip_low * inverse).clamp(min=0.0).sqrt()
    upper = 0.5 + 0.5 * (1.0 + 4.0 * config.clip_high * inverse).sqrt()
    return lower, upper if config.max_ratio is None else upper.clamp(max=config.max_ratio)


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    bounds: tuple[torch.Tensor | float, torch.Tensor | float],
    dual_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped) per token: the clipped objective of PPO (arXiv 1707.06347), negated.

    max(-A r, -A clip(r, lower, upper)), and, with `dual_clip` c and A < 0, at most -c A (arXiv 1912.09729).
    `clipped` is True where the token gives no gradient because of a bound.
    """
    lower, upper = (torch.as_tensor(bound, dtype=ratio.dtype, device=ratio.device) for bound in bounds)
    plain = -advantages * ratio
    bounded = -advantages * torch.minimum(torch.maximum(ratio, lower), upper)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(beyond, ceiling, loss), clipped | beyond
    return loss, clipped


@dataclass(frozen=True)
class PolicyTokens:
    """What the policy loss reads; every field is 1-D over the micro-batch's response tokens."""

    logprobs: torch.Tensor
    """Of the policy being trained, with gradient."""
    entropy: torch.Tensor
    """Of the policy's distribution at each token, in nats; needs a gradient only with an entropy bonus."""
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """From `token_weights`."""
    loss_mask: torch.Tensor
    sequence: torch.Tensor
    """int64: which sequence of the micro-batch each token belongs to."""
    old_logprobs: torch.Tensor | None = None
    """None: this is the first update on the batch, and the old policy is the current one."""
    ref_logprobs: torch.Tensor | None = None


def _surrogate(
    logprobs: torch.Tensor,
    ratio: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, clipped) per token: the policy-gradient part, before importance weights."""
    untouched = torch.zeros_like(ratio, dtype=torch.bool)
    if config.objective == "policy_gradient":
        return -advantages * logprobs, untouched
    if config.objective == "kl_penalty":
        return -advantages * ratio, untouched
    if config.objective == "cispo":
        # Only an upper bound: the weight of a token is limited, and every token keeps its gradient.
        bound = 1.0 + config.clip_high
        weight = ratio.detach().clamp(max=bound)
        return -advantages * weight * logprobs, ratio.detach() > bound
    return clipped_surrogate(ratio, advantages, clip_bounds(old_logprobs, config), config.dual_clip)


def policy_loss(tokens: PolicyTokens, config: PolicyLossConfig, kl_old_coef: float = 0.0) -> LossOutput:
    """sum_t weight_t (importance_t surrogate_t + kl_old_coef kl_old_t + kl_coef kl_t - entropy_coef entropy_t).

    `kl_old_coef`: beta of PPO's KL penalty, on the k3 estimate of KL(old || new) from tokens of the old policy.
    Raises ValueError where `kl_coef` is set and there are no `ref_logprobs`.
    """
    mask = tokens.loss_mask
    logprobs, advantages, weights = (
        _masked(value, mask) for value in (tokens.logprobs, tokens.advantages, tokens.weights)
    )
    rollout_logprobs, entropy = _masked(tokens.rollout_logprobs, mask), _masked(tokens.entropy, mask)
    old_logprobs = logprobs.detach() if tokens.old_logprobs is None else _masked(tokens.old_logprobs, mask)
    log_ratio = policy_log_ratio(logprobs, old_logprobs, mask.float(), tokens.sequence, config.ratio)
    ratio = log_ratio.exp()
    token_log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl_old = torch.expm1(token_log_ratio) - token_log_ratio
    importance, cut = importance_weights(old_logprobs, rollout_logprobs, tokens.sequence, config.importance)
    surrogate, clipped = _surrogate(logprobs, ratio, old_logprobs, advantages, config)
    policy_term = (weights * importance * surrogate).sum()
    loss = policy_term
    gap = (old_logprobs - rollout_logprobs).abs()
    sums = {
        "tokens": mask.float(),
        "clip_fraction": (clipped & mask).float(),
        "kl_old": kl_old,
        "entropy": entropy,
        "importance_weight": _masked(importance, mask),
        "importance_cut_fraction": (cut & mask).float(),
        "rollout_logprob_gap": gap,
    }
    terms = {"policy_loss": policy_term}
    if kl_old_coef:
        terms["kl_old_loss"] = kl_old_coef * (weights * kl_old).sum()
        loss = loss + terms["kl_old_loss"]
    if config.entropy_coef:
        terms["entropy_loss"] = -config.entropy_coef * (weights * entropy).sum()
        loss = loss + terms["entropy_loss"]
    if tokens.ref_logprobs is not None:
        kl = kl_penalty(logprobs, _masked(tokens.ref_logprobs, mask), config.kl_estimator)
        sums["kl_ref"] = kl
        if config.kl_coef:
            terms["kl_loss"] = config.kl_coef * (weights * kl).sum()
            loss = loss + terms["kl_loss"]
    elif config.kl_coef:
        raise ValueError("kl_coef is set, but the batch has no ref_logprobs")
    return LossOutput(
        loss=loss,
        terms=_totals(terms | {"loss": loss}),
        sums=_totals(sums),
        maxima={"rollout_logprob_gap_max": _maximum(gap), "ratio_max": _maximum(_masked(ratio.detach(), mask))},
    )


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    loss_mask: torch.Tensor,
    config: CriticLossConfig,
) -> LossOutput:
    """sum_t weight_t * max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, with c = `value_clip`; all 1-D [T].

    Without `value_clip` it is half the squared error (PPO's value loss as in TRL and the original code).
    """
    values, old_values, returns, weights = (_masked(item, loss_mask) for item in (values, old_values, returns, weights))
    error = (values - returns).square()
    worst, clipped = error, torch.zeros_like(loss_mask)
    if config.value_clip is not None:
        near = torch.maximum(torch.minimum(values, old_values + config.value_clip), old_values - config.value_clip)
        bounded = (near - returns).square()
        worst, clipped = torch.maximum(error, bounded), bounded > error
    loss = 0.5 * (weights * worst).sum()
    sums = {
        "tokens": loss_mask.float(),
        "value_clip_fraction": clipped.float(),
        "value_error": error,
        "value": values,
    }
    return LossOutput(
        loss=loss,
        terms=_totals({"loss": loss}),
        sums=_totals(sums),
        maxima={"value_abs_max": _maximum(values.abs())},
    )


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """0 where the mask is False; the gradient there is 0 too, even if the value is not finite."""
    return torch.where(mask, values, 0.0)


def _totals(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.detach().double().sum() for name, part in parts.items()}


def _maximum(values: torch.Tensor) -> torch.Tensor:
    """Largest of non-negative values, 0 of none."""
    return torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.double)]).max()
