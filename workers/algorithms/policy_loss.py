"""Pure loss functions on flat per-token tensors.

Every tensor is 1-D over the response tokens of one micro-batch. A loss is `sum_t weight_t * loss_t`. The weights
(`token_weights`) include the totals of the whole optimizer update, so that the sum over micro-batches and ranks is the
update's loss however the batch is split.

Tokens with `loss_mask` False are ignored: their values, NaN included, reach neither the loss, nor a gradient, nor a
metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F

from troupe.workers.algorithms.custom import LossTokens, TokenLoss, custom_loss
from troupe.workers.contract.algorithm_config import CriticLossConfig, ImportanceConfig, PolicyLossConfig
from troupe.workers.contract.messages import RankPlan
from troupe.workers.models.token_batch import TokenBatch, TokenTable

MAX_LOG_RATIO = 20.0
"""Above this `exp` continues as its tangent: an outlier gives a large number instead of infinity, and a gradient of the
right sign instead of none."""
MAX_RATIO = math.exp(MAX_LOG_RATIO)


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's loss, and detached statistics (float64 scalars) over its loss tokens."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    terms: Mapping[str, torch.Tensor]
    """The loss and its parts; they add up over micro-batches and ranks."""
    sums: Mapping[str, torch.Tensor]
    """Sums over loss tokens. Summed over micro-batches and ranks and divided by the sum `tokens`, they are means."""
    maxima: Mapping[str, torch.Tensor]


def token_weights(
    loss_mask: torch.Tensor,
    sequence_tokens: torch.Tensor,
    aggregation: str,
    total_loss_tokens: int,
    total_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """float32 [T]: the weight of each token in the update's loss; 0 where `loss_mask` is False.

    token_mean: 1 / total_loss_tokens (DAPO, arXiv 2503.14476). sequence_mean: 1 / (total_sequences * loss tokens of the
    sequence) (GRPO, arXiv 2402.03300). sequence_sum: 1 / total_sequences, so that a sequence counts with the sum of its
    tokens, the gradient of its log-prob (REINFORCE). constant: 1 / (total_sequences * max_tokens) (Dr. GRPO, arXiv
    2503.20783). only_token_mean: 1 / loss tokens of the sequence (DCPO, arXiv 2509.02333, sec. 3.3).

    A sequence is a sample with all of its rows; `sequence_tokens` [T] are the loss tokens of each token's, also in
    other micro-batches. The totals are over the whole update and all ranks. Raises ValueError if the aggregation is
    unknown.
    """
    mask = loss_mask.float()
    if aggregation == "token_mean":
        return mask / max(total_loss_tokens, 1)
    if aggregation == "sequence_sum":
        return mask / max(total_sequences, 1)
    if aggregation == "constant":
        return mask / max(total_sequences * max_tokens, 1)
    share = mask / sequence_tokens.clamp(min=1)
    if aggregation == "sequence_mean":
        return share / max(total_sequences, 1)
    if aggregation == "only_token_mean":
        return share
    raise ValueError(f"unknown aggregation {aggregation!r}")


def bounded_exp(values: torch.Tensor) -> torch.Tensor:
    """exp(x), continued as its tangent above `MAX_LOG_RATIO`: never infinite, and rising everywhere."""
    return values.clamp(max=MAX_LOG_RATIO).exp() * (1.0 + F.relu(values - MAX_LOG_RATIO))


def bounded_expm1(values: torch.Tensor) -> torch.Tensor:
    """exp(x) - 1 without cancellation near 0, continued as `bounded_exp`."""
    return torch.expm1(values.clamp(max=MAX_LOG_RATIO)) + MAX_RATIO * F.relu(values - MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[B]: sums of `values` [T] over the tokens of each sequence; `sequence`: int64 [T], numbers below B."""
    sums = values.new_zeros(int(sequence.max()) + 1 if len(sequence) else 0)
    return sums.index_add(0, sequence, values)


def sequence_means(values: torch.Tensor, tokens: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """[T]: for each token the mean of `values` over its sequence's loss tokens. `tokens`: 1 on these, 0 elsewhere,
    where the values must be 0."""
    return (sequence_sums(values, sequence) / sequence_sums(tokens, sequence).clamp(min=1.0))[sequence]


def kl_penalty(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, to be differentiated through `logprobs`.

    With d = logprobs - ref_logprobs and tokens drawn from the policy (Schulman, "Approximating KL divergence", 2020):

    k1 = d: unbiased in value. Its own derivative averages to zero and would have no effect as a loss; here its gradient
    is k2's. k2 = d^2 / 2: biased in value; its gradient d * grad(logprobs) is, on average, exactly the gradient of
    KL(policy || reference). k3 = exp(-d) - 1 + d: unbiased in value and never negative, the term of the GRPO paper
    (arXiv 2402.03300).
      Its gradient is, on average, the gradient of KL(reference || policy): the same to second order while the two are
      close.

    All statements hold on policy; after several updates on one batch they are approximations. Raises ValueError for an
    unknown estimator.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        squared = 0.5 * difference.square()
        return difference.detach() + squared - squared.detach()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        return bounded_expm1(-difference) + difference
    raise ValueError(f"unknown KL estimator {estimator!r}")


def exact_kl(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """[T]: KL(old || new) = sum_v old(v) (log old(v) - log new(v)), in nats, of log-probs [T, vocabulary].

    Tokens with a log-prob of -inf under the old policy contribute 0. TRPO bounds the mean over states that the old
    policy visits (arXiv 1502.05477, eq. 12).
    """
    terms = old.exp() * (old - new)
    return terms.masked_fill(old == -torch.inf, 0.0).sum(-1)


def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, sequence: torch.Tensor, config: ImportanceConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, cut): corrections for tokens sampled by an engine whose log-probs differ from the trainer's.

    With w = exp(old_logprobs - rollout_logprobs), or its product over the sequence: `truncate` gives min(w, cap)
    (truncated importance sampling), `mask` gives w inside [1/cap, cap] and 0 outside, `none` gives 1. `cut` is True
    where w was changed. All [T]; outside the loss mask both log-probs must be 0. The weights have no gradient.
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    if config.level == "sequence":
        log_ratio = sequence_sums(log_ratio, sequence)[sequence]
    return sampler_weights(log_ratio, config)


def sampler_weights(log_ratio: torch.Tensor, config: ImportanceConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of `importance_weights`, and whether each was changed, of log w of any shape."""
    ratio, cap = bounded_exp(log_ratio), config.cap or math.inf
    if config.mode == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio > cap) | (ratio < 1.0 / cap)
    return ratio.masked_fill(outside, 0.0), outside


def policy_log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, tokens: torch.Tensor, sequence: torch.Tensor, level: str
) -> torch.Tensor:
    """Log of the ratio of new to old policy, [T], at one of three levels.

    token: log pi - log pi_old. sequence: its mean over the sequence's loss tokens, the same for all of them (GSPO,
    arXiv 2507.18071, eq. 7). sequence_token: that value with the gradient of each token's own (eq. 14).
    `tokens`: float [T], 1 on loss tokens and 0 elsewhere, where both log-probs must be 0.
    """
    own = logprobs - old_logprobs
    if level == "token":
        return own
    mean = sequence_means(own, tokens, sequence)
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
    inverse = bounded_exp(-old_logprobs.detach())
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
    `clipped` is True for tokens without a gradient because of a bound.
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


def sampler_divergence(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(divergence of the policy from the sampler, rise of the token's probability), both [T].

    Over two outcomes, the sampled token and any other, with p and q its probability under policy and sampler: `tv` is
    |p - q|, `kl` is q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (DPPO, arXiv 2602.04879, eq. 13 and 14): lower bounds
    of the divergences over the whole vocabulary.
    """
    p, q = logprobs.exp(), rollout_logprobs.exp()
    if kind == "tv":
        return (p - q).abs(), p - q
    below = 1.0 - torch.finfo(p.dtype).eps  # log(1 - p) stays finite
    others = torch.log1p(-q.clamp(max=below)) - torch.log1p(-p.clamp(max=below))
    return q * (rollout_logprobs - logprobs) + (1.0 - q) * others, p - q


@dataclass(frozen=True)
class PolicyTokens:
    """Inputs of the policy loss; every field is 1-D over the micro-batch's response tokens."""

    logprobs: torch.Tensor
    """Log-probs under the policy being trained, with gradient."""
    entropy: torch.Tensor
    """Entropy of the policy at each token, in nats; needs a gradient only with an entropy bonus."""
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """From `token_weights`."""
    loss_mask: torch.Tensor
    sequence: torch.Tensor
    """int64: number of each token's sequence in the micro-batch. The rows of one sample are one sequence."""
    old_logprobs: torch.Tensor | None = None
    """None in the first update on a batch, when the old policy is the current one."""
    ref_logprobs: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    """Coefficients of |log pi - log pi_old| (KL-Cov, arXiv 2505.22617), or None without any."""
    centering: torch.Tensor | None = None
    """`mean_scores` at each token, with gradient, or None if the loss does not subtract it."""
    sampler_mass: torch.Tensor | None = None
    """What the sampler gave to the tokens that `centering` was computed from."""
    divergences: torch.Tensor | None = None
    """Divergence from a teacher (`distillation.divergence`), with gradient, or None without one."""
    total_observation_tokens: int = 0
    """Tokens of the update that the policy did not sample."""

    def masked(self) -> PolicyTokens:
        """The same with 0 in every number where `loss_mask` is False."""
        others = ("loss_mask", "sequence")
        numbers = {n: v for n, v in vars(self).items() if isinstance(v, torch.Tensor) and n not in others}
        return replace(self, **{name: _masked(value, self.loss_mask) for name, value in numbers.items()})

    def taken(self, chosen: torch.Tensor) -> PolicyTokens:
        """The tokens where `chosen`, bool [T], is True."""
        tensors = {name: value[chosen] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)


def policy_tokens(
    table: TokenTable,
    micro_batch: TokenBatch,
    plan: RankPlan,
    config: PolicyLossConfig,
    max_tokens: int,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
) -> PolicyTokens:
    """Inputs of `policy_loss` for one micro-batch of a TRAIN table, with all rows with loss of each sample if
    `config.needs_whole_samples`.

    The unit of aggregations, and of ratios and weights of a sequence, is the sample: an episode whose history was
    rewritten has several rows and counts once. `logprobs` [T] have a gradient. Raises ValueError if the table has no
    rollout_logprobs or no advantages.
    """
    rollout_logprobs, advantages = (table.floats(name, micro_batch) for name in ("rollout_logprobs", "advantages"))
    if rollout_logprobs is None or advantages is None:
        raise ValueError("a policy batch needs the columns rollout_logprobs and advantages")
    mask = micro_batch.loss_mask
    sample, sample_tokens = table.samples(micro_batch)
    totals = plan.total_loss_tokens, plan.total_sequences
    return PolicyTokens(
        logprobs=logprobs,
        entropy=entropy,
        rollout_logprobs=rollout_logprobs,
        advantages=advantages,
        weights=token_weights(mask, sample_tokens, config.aggregation, *totals, max_tokens),
        loss_mask=mask,
        sequence=sample,
        old_logprobs=table.floats("old_logprobs", micro_batch),
        ref_logprobs=table.floats("ref_logprobs", micro_batch),
        penalties=table.floats("penalties", micro_batch),
        total_observation_tokens=plan.total_observation_tokens,
    )


Surrogate = Callable[[torch.Tensor, torch.Tensor, PolicyTokens, PolicyLossConfig], TokenLoss]
"""From the ratio, the old log-probs and the masked tokens to the policy-gradient part of the loss of each token, before
importance weights. Its metric `clip_fraction` is True at tokens whose gradient a bound changes."""


def _clip(ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig) -> TokenLoss:
    bounds = clip_bounds(old_logprobs, config)
    loss, clipped = clipped_surrogate(ratio, tokens.advantages, bounds, config.dual_clip)
    return TokenLoss(loss, {"clip_fraction": clipped})


def _unclipped(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    # At ratio 1 the gradient equals that of -A log pi. After further updates on the batch the ratio corrects for
    # tokens that the old policy sampled; -A log pi would then have the gradient of another policy's objective.
    return TokenLoss(-tokens.advantages * ratio, {"clip_fraction": torch.zeros_like(ratio)})


def _soft_gate(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    # The factor 4 / temperature gives the gate the slope 1 at ratio 1, as the ratio has.
    positive, negative = (ratio.new_tensor(one) for one in (config.gate_positive, config.gate_negative))
    temperature = torch.where(tokens.advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature)
    return TokenLoss(-tokens.advantages * gate, {"clip_fraction": torch.zeros_like(ratio)})


def _geometric(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    # One-sided, as PPO's minimum: a token that a bound holds back would have moved on in its advantage's direction.
    own, rises = tokens.logprobs - old_logprobs, tokens.advantages > 0
    clipped = torch.where(rises, own > config.clip_high, own < -config.clip_low) & (tokens.advantages != 0)
    near = torch.where(clipped, own.detach().clamp(-config.clip_low, config.clip_high), own)
    mean = policy_log_ratio(near, torch.zeros_like(near), tokens.loss_mask.float(), tokens.sequence, config.ratio)
    return TokenLoss(-tokens.advantages * bounded_exp(mean), {"clip_fraction": clipped})


def _divergence(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    # The region is around the policy that sampled, not around the one before the update (DPPO, sec. 5.2).
    distance, risen = sampler_divergence(tokens.logprobs.detach(), tokens.rollout_logprobs, config.divergence)
    up, down = tokens.advantages > 0, tokens.advantages < 0
    left = (up & (risen > 0) & (distance > config.clip_high)) | (down & (risen < 0) & (distance > config.clip_low))
    return TokenLoss(-tokens.advantages * ratio.masked_fill(left, 0.0), {"clip_fraction": left})


def _cispo(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    # An upper bound only: the weight of a token is limited, but every token keeps its gradient.
    bound = 1.0 + config.clip_high
    weight = ratio.detach().clamp(max=bound)
    return TokenLoss(-tokens.advantages * weight * tokens.logprobs, {"clip_fraction": ratio.detach() > bound})


def _score_centering(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    if tokens.centering is None or tokens.sampler_mass is None:
        raise ValueError("score centering needs the sampler's likeliest tokens, but they were not read")
    metrics = {"clip_fraction": torch.zeros_like(ratio), "sampler_mass": tokens.sampler_mass}
    return TokenLoss(-tokens.advantages * tokens.logprobs, metrics)


def _custom(
    ratio: torch.Tensor, old_logprobs: torch.Tensor, tokens: PolicyTokens, config: PolicyLossConfig
) -> TokenLoss:
    if config.custom is None:
        raise ValueError("the custom objective needs the name of the user's algorithm")
    given = vars(tokens) | {"old_logprobs": old_logprobs}
    return custom_loss(config.custom, LossTokens(**{one.name: given[one.name] for one in fields(LossTokens)}))


SURROGATES: Mapping[str, Surrogate] = {
    "clip": _clip,
    "policy_gradient": _unclipped,
    "kl_penalty": _unclipped,
    "soft_gate": _soft_gate,
    "geometric": _geometric,
    "divergence": _divergence,
    "cispo": _cispo,
    "score_centering": _score_centering,
    "custom": _custom,
}


@dataclass(frozen=True)
class _LossTerms:
    """Terms of a loss with their statistics, all with gradient: the fields of `LossOutput` before they are summed."""

    terms: Mapping[str, torch.Tensor]
    sums: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]


def policy_loss(tokens: PolicyTokens, config: PolicyLossConfig, kl_old_coef: float = 0.0) -> LossOutput:
    """sum_t weight_t (importance_t surrogate_t + kl_old_coef kl_old_t + kl_coef kl_t - entropy_coef entropy_t +
    distill.coef divergence_t) - observation_coef sum_u log pi_u / U, over the U tokens u that it did not sample.

    The surrogate is the objective's (`PolicyLossConfig.objective`). `likelihood` has no ratio and no importance weight:
    it is sum_t weight_t (-advantage_t log pi_t) and what is added to it. `kl_old_coef` is beta of PPO's KL penalty, on
    the k3 estimate of KL(old || new) from tokens of the old policy. Raises ValueError if `kl_coef` is set, but there
    are no `ref_logprobs`.
    """
    observed = _masked(tokens.logprobs, ~tokens.loss_mask).sum() / max(tokens.total_observation_tokens, 1)
    tokens = tokens.masked()
    if config.has_ratio:
        part = _of_ratio(tokens, config, kl_old_coef)
    else:  # of a likelihood, who sampled a token does not matter
        part = _LossTerms({"policy_loss": -(tokens.weights * tokens.advantages * tokens.logprobs).sum()}, {}, {})
    terms, sums = dict(part.terms), {"tokens": tokens.loss_mask.float(), **part.sums, "entropy": tokens.entropy}
    if config.entropy_coef:
        terms["entropy_loss"] = -config.entropy_coef * (tokens.weights * tokens.entropy).sum()
    # A likelihood trains on chosen samples and on those of others: over them KL(pi || pi_ref) is not estimated.
    if tokens.ref_logprobs is not None and (config.has_ratio or config.kl_coef):
        sums["kl_ref"] = kl_penalty(tokens.logprobs, tokens.ref_logprobs, config.kl_estimator)
        if config.kl_coef:
            terms["kl_loss"] = config.kl_coef * (tokens.weights * sums["kl_ref"]).sum()
    elif config.kl_coef:
        raise ValueError("kl_coef is set, but the batch has no ref_logprobs")
    if tokens.divergences is not None:
        sums["teacher_divergence"] = tokens.divergences
        terms["distill_loss"] = config.distill.coef * (tokens.weights * tokens.divergences).sum()
    if config.observation_coef:
        terms["observation_loss"] = -config.observation_coef * observed
    loss = torch.stack(list(terms.values())).sum()
    return LossOutput(
        loss=loss,
        terms=_totals(terms | {"loss": loss}),
        sums=_totals(sums),
        maxima={name: _maximum(values) for name, values in part.maxima.items()},
    )


def loss_by_source(
    losses: Mapping[str, PolicyLossConfig],
    table: TokenTable,
    micro_batch: TokenBatch,
    tokens: Callable[[PolicyLossConfig], PolicyTokens],
    kl_old_coef: float = 0.0,
) -> LossOutput:
    """`policy_loss` of a micro-batch whose rows have different losses: the sum over `losses`, by source, of the loss of
    the source's rows, with weights from the totals of the whole update. The loss of the run has an empty name.
    `tokens`: inputs of a loss for the whole micro-batch."""
    # Also those without a row here: ranks and micro-batches have the same metrics.
    parts = [
        policy_loss(tokens(config).taken(table.with_loss_of(micro_batch, source)), config, kl_old_coef)
        for source, config in losses.items()
    ]
    return LossOutput(
        loss=torch.stack([part.loss for part in parts]).sum(),
        terms=_joined([part.terms for part in parts], torch.add),
        sums=_joined([part.sums for part in parts], torch.add),
        maxima=_joined([part.maxima for part in parts], torch.maximum),
    )


def _joined(
    parts: Sequence[Mapping[str, torch.Tensor]], join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        found |= {name: join(found[name], value) if name in found else value for name, value in part.items()}
    return found


def _of_ratio(tokens: PolicyTokens, config: PolicyLossConfig, kl_old_coef: float) -> _LossTerms:
    """The part that compares the policy with the sampling one."""
    mask, weights, logprobs = tokens.loss_mask, tokens.weights, tokens.logprobs
    old_logprobs = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    ratio = bounded_exp(policy_log_ratio(logprobs, old_logprobs, mask.float(), tokens.sequence, config.ratio))
    token_log_ratio = logprobs - old_logprobs
    kl_old = bounded_expm1(token_log_ratio) - token_log_ratio
    # The mean that is subtracted has the weights of the policy that is trained, so the sampled token's has, too.
    centering = tokens.centering if config.recorded_top_k else None
    weighed = old_logprobs if centering is None else logprobs
    importance, cut = importance_weights(weighed, tokens.rollout_logprobs, tokens.sequence, config.importance)
    sums = {}
    if (most := config.importance.max_divergence) is not None:
        own = sampler_divergence(logprobs.detach(), tokens.rollout_logprobs, "kl")[0]
        sums["sampler_divergence"] = sequence_means(own, mask.float(), tokens.sequence) * mask
        left_out = sums["sampler_divergence"] > most
        importance, cut = importance.masked_fill(left_out, 0.0), cut | left_out
    surrogate = SURROGATES[config.objective](ratio, old_logprobs, tokens, config)
    loss = surrogate.loss if tokens.penalties is None else surrogate.loss + tokens.penalties * token_log_ratio.abs()
    loss = importance * loss if centering is None else importance * loss + tokens.advantages * centering
    terms = {"policy_loss": (weights * loss).sum()}
    if kl_old_coef:
        terms["kl_old_loss"] = kl_old_coef * (weights * kl_old).sum()
    gap = (old_logprobs - tokens.rollout_logprobs).abs()
    sums |= {
        **{name: _masked(values.float(), mask) for name, values in surrogate.metrics.items()},
        "kl_old": kl_old,
        "importance_weight": _masked(importance, mask),
        "importance_cut_fraction": (cut & mask).float(),
        "rollout_logprob_gap": gap,
    }
    return _LossTerms(terms, sums, {"rollout_logprob_gap_max": gap, "ratio_max": _masked(ratio, mask)})


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    loss_mask: torch.Tensor,
    config: CriticLossConfig,
) -> LossOutput:
    """sum_t weight_t * max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, with c = `value_clip`; all 1-D [T].
    Without `value_clip` it is half the squared error (PPO's value loss as in TRL and the original code)."""
    values, old_values, returns, weights = (_masked(item, loss_mask) for item in (values, old_values, returns, weights))
    error = (values - returns).square()
    worst, clipped = error, torch.zeros_like(loss_mask)
    if config.value_clip is not None:
        near = torch.maximum(torch.minimum(values, old_values + config.value_clip), old_values - config.value_clip)
        bounded = (near - returns).square()
        worst, clipped = torch.maximum(error, bounded), bounded > error
    loss = 0.5 * (weights * worst).sum()
    sums = {"tokens": loss_mask.float(), "value_clip_fraction": clipped.float(), "value_error": error, "value": values}
    return LossOutput(
        loss=loss, terms=_totals({"loss": loss}), sums=_totals(sums), maxima={"value_abs_max": _maximum(values.abs())}
    )


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` with 0 where the mask is False; the gradient there is 0 too, even if the value is not finite."""
    return torch.where(mask, values, 0.0)


def _totals(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.detach().double().sum() for name, part in parts.items()}


def _maximum(values: torch.Tensor) -> torch.Tensor:
    """Largest of non-negative values; 0 if there are none."""
    return torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.double)]).max()
