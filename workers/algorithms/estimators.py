"""Advantage estimators: from the rewards of one batch to an advantage for every token that the policy sampled.

Every function works on the tokens that the policy sampled (`loss_mask`), concatenated. Text that it did not sample is
part of the next state, not an action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from troupe.workers.algorithms.advantages import (
    STD_EPS,
    SampledTokens,
    best_of_group,
    best_of_subsets_advantages,
    covariant_tokens,
    explained_variance,
    gae,
    group_advantages,
    leave_one_out_advantages,
    max_likelihood_advantages,
    mixture_win_rates,
    n_step_advantages,
    optimal_token_baselines,
    player_average_advantages,
    preference_pair_advantages,
    process_advantages,
    reference_pair_advantages,
    returns_to_go,
    shaped_rewards,
    smoothed_advantages,
    step_rewards,
    turn_advantages,
    whiten,
)
from troupe.workers.algorithms.custom import custom_advantages
from troupe.workers.contract.advantage_state import AdvantageState, Moments, PromptHistory, SourceMoments, adapted_coef
from troupe.workers.contract.algorithm_config import STEP_ESTIMATORS, AdvantageConfig

SCALE_EPS = 1e-4
"""Added to the standard deviation that scales rewards, so that equal rewards scale to 0 and not to noise."""
MAX_KL_ERROR = 0.2
"""Bound of the proportional error of the adaptive KL coefficient (arXiv 1909.08593, sec. 2.2)."""


@dataclass(frozen=True)
class Estimate:
    """Advantages of one batch."""

    advantages: torch.Tensor
    """float64 [T]."""
    state: AdvantageState
    returns: torch.Tensor | None = None
    """float64 [T]: targets of the critic."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    penalties: torch.Tensor | None = None
    """float64 [T]: coefficients of |log pi - log pi_old|, or None without any."""


Estimator = Callable[[AdvantageConfig, SampledTokens, AdvantageState], Estimate]


def estimate(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    """Advantages of a batch by the configured estimator. Raises ValueError if the batch lacks inputs of the estimator,
    or has process rewards that it does not support."""
    batch, state = _with_normalized(batch, state)
    if batch.steps is not None and config.estimator not in STEP_ESTIMATORS:
        raise ValueError(f"process rewards (reward_spans) are not supported by the {config.estimator} estimator")
    estimated = ESTIMATORS[config.estimator](config, batch, state)
    advantages = estimated.advantages
    metrics = {**estimated.metrics, **statistics("advantage", advantages)}
    if config.whiten:
        parts = [whiten(advantages, batch.with_loss & members[batch.sequence]) for _, members in batch.parts()]
        advantages = torch.stack(parts).sum(0)  # each is 0 outside its part
    if config.advantage_clip is not None:
        advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    if config.covariance != "keep":
        chosen = _covariant(config, batch, advantages)
        metrics["covariant_fraction"] = float(chosen.double().mean()) if len(chosen) else 0.0
        if config.covariance == "drop":
            advantages = advantages.masked_fill(chosen, 0.0)
        else:
            estimated = replace(estimated, penalties=config.cov_penalty * chosen.double())
    return replace(estimated, advantages=advantages, metrics=metrics)


def estimate_by_source(
    configs: Mapping[str, AdvantageConfig], batch: SampledTokens, state: AdvantageState, sources: Sequence[str]
) -> Estimate:
    """Advantages of a batch by the estimator of each sample's source. `sources`: [N]; one that is not in `configs` has
    the run's, under an empty name. What is computed over a batch is computed over the samples of one estimator."""
    advantages, metrics = torch.zeros(len(batch.rollout_logprobs), dtype=torch.double), dict[str, float]()
    named = [source if source in configs else "" for source in sources]
    for name, config in configs.items():
        members = torch.tensor([source == name for source in named])
        if members.any():
            part = estimate(config, batch.taken(members), state)
            advantages[members[batch.sequence]] = part.advantages
            state, metrics = state.after(part.state), {**part.metrics, **metrics}
    return Estimate(advantages, state, metrics=metrics | statistics("advantage", advantages))


def _with_normalized(batch: SampledTokens, state: AdvantageState) -> tuple[SampledTokens, AdvantageState]:
    """The batch with its normalized components in the rewards, and the state with the statistics of their values, those
    of this batch included, within each source. Raises ValueError if the rewards are of steps."""
    if not batch.normalized:
        return batch, state
    if batch.steps is not None:
        raise ValueError("process rewards (reward_spans) have no normalized components")
    rewards, following = batch.rewards.clone(), dict[str, SourceMoments]()
    for source, members in batch.parts():
        before = state.moments(source)
        components = dict(before.components)
        for name, chosen in batch.normalized.items():
            if len(own := (chosen & members).nonzero().flatten()):
                values, weights = batch.components[name][:, own]
                seen = components[name] = components.get(name, Moments()).seen(values.tolist())
                rewards[own] += weights * ((values - seen.mean) / (seen.std + SCALE_EPS) - values)
        following[source] = before.model_copy(update={"components": components})
    return replace(batch, rewards=rewards), state.with_moments(following)


def _covariant(config: AdvantageConfig, batch: SampledTokens, advantages: torch.Tensor) -> torch.Tensor:
    """The tokens whose covariance is controlled: by the log-probs before the update, over the whole batch."""
    if batch.old_logprobs is None:
        raise ValueError("the covariance of tokens needs old_logprobs, but the batch lacks them")
    bounds = (config.cov_low, config.cov_high) if config.covariance == "drop" else (-math.inf, math.inf)
    return covariant_tokens(advantages, batch.old_logprobs, batch.with_loss, config.cov_share, bounds)


def _group(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    if batch.steps is not None:
        how = (batch.groups, batch.lengths, config.normalize_by_std)
        return Estimate(process_advantages(*batch.steps, *how), state)
    return Estimate(group_advantages(batch.rewards, batch.groups, config.normalize_by_std)[batch.sequence], state)


def _turn_group(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    """GiGPO, arXiv 2505.10978, eq. 3 and 8: samples within their group, and turns within their state."""
    filled = batch.lengths > 0
    whole = (batch.lengths[filled], filled.nonzero().flatten())
    rewards, turns = batch.steps or (batch.rewards[filled], *whole), batch.turns or (*whole, batch.groups[filled])
    normal = config.normalize_by_std
    of_turns = turn_advantages(rewards, turns, batch.lengths, config.turn_gamma, normal)
    of_samples = group_advantages(batch.rewards, batch.groups, normal)[batch.sequence]
    return Estimate(of_samples + config.turn_coef * of_turns, state)


def _smooth_group(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    if len(batch.prompt_rows) <= int(batch.groups.max()):
        raise ValueError("the smooth_group estimator needs the prompts' rows in the pool, but prompt_rows is empty")
    # A prompt that is in the batch twice counts as one visit: the order of groups does not matter.
    earned: dict[int, list[float]] = {}
    for group, reward in zip(batch.groups.tolist(), batch.rewards.tolist(), strict=True):
        earned.setdefault(batch.prompt_rows[group], []).append(reward)
    after = {}
    for row, rewards in earned.items():
        before = state.prompts.get(row) or PromptHistory()
        after[row] = PromptHistory(visits=before.visits + 1, rewards=before.rewards.seen(rewards))
    advantages = torch.zeros(len(batch.rewards), dtype=torch.double)
    for group, row in enumerate(batch.prompt_rows):
        members, total = batch.groups == group, after[row].rewards
        now = Moments().seen(batch.rewards[members].tolist())
        statistics_of = ((now.mean, now.std), (total.mean, total.std))
        advantages[members] = smoothed_advantages(batch.rewards[members], *statistics_of, after[row].visits)
    return Estimate(advantages[batch.sequence], state.model_copy(update={"prompts": after}))


def _decoupled_group(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    """GDPO (arXiv 2601.05242): the components of the reward are normalised in the group one by one, weighted, summed,
    and the sums scaled to variance 1 over the batch."""
    if not batch.components:
        raise ValueError("the decoupled_group estimator needs the components of the rewards, but the batch lacks them")
    apart = [weights * group_advantages(values, batch.groups, True) for values, weights in batch.components.values()]
    advantages = torch.stack(apart).sum(0)
    for _, members in batch.parts():
        # Their mean is 0 up to rounding, as in every group. Subtracted, it would be an error where there is no signal.
        advantages[members] /= advantages[members].std(correction=0) + STD_EPS
    return Estimate(advantages[batch.sequence], state)


def _distill(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    """log teacher - log policy, of several teachers the weighted sum; its mean is minus the reverse KL divergence."""
    if batch.taught is None:
        raise ValueError("distillation needs a teacher's log-probs (role reference or teacher), and none were given")
    policy = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    logprobs, weights = batch.taught
    return Estimate(logprobs - weights * policy.double(), state)


def _sequence_ratios(batch: SampledTokens) -> torch.Tensor:
    """float64 [N] log-ratios of whole responses to the reference."""
    return torch.zeros(len(batch.lengths), dtype=torch.double).index_add(0, batch.sequence, _log_ratios(batch))


def _preference_pair(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    pairs = preference_pair_advantages(batch.rewards, batch.groups, _sequence_ratios(batch), config.dpo_beta)
    return Estimate(pairs[batch.sequence], state)


def _reference_pair(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    if batch.partners is None:
        raise ValueError("the reference_pair estimator needs the reference's responses, but the batch lacks them")
    how = config.dpo_beta, config.exploration_coef
    pairs = reference_pair_advantages(batch.rewards, batch.partners, _sequence_ratios(batch), *how)
    return Estimate(pairs[batch.sequence], state)


def _returns(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    shaped = _shape(config, batch, state)
    totals = torch.zeros(len(batch.lengths), dtype=torch.double).index_add(0, batch.sequence, shaped.token_rewards)
    # A sample without tokens has no token for its reward, but other samples are compared with it.
    totals = torch.where(batch.lengths == 0, shaped.rewards, totals)
    credited = totals[batch.sequence]
    if config.reward_to_go:
        credited = returns_to_go(shaped.token_rewards, batch.lengths, config.gamma)
    following, metrics = shaped.state, dict(shaped.metrics)
    if config.baseline == "optimal_token":
        credited = credited - optimal_token_baselines(credited, _norms(batch), batch.groups, batch.lengths)
        above = totals
    elif config.baseline == "player_average":
        above, following = _above_players(config, totals, batch, following)
    elif config.baseline == "mixture":
        wins, opponents = mixture_win_rates(shaped.rewards, batch.groups, _sequence_ratios(batch), config.mixture_coef)
        above = totals - shaped.rewards + wins - 0.5
        metrics["effective_opponents"] = opponents
    else:
        above = _above_baseline(config, totals, shaped, batch, state)
    # In this order, a whole return credited to every token leaves `above` bitwise unchanged.
    advantages = (credited - totals[batch.sequence]) + above[batch.sequence]
    if shaped.own_rewards is not None:
        advantages = advantages + shaped.own_rewards
    seen = {
        name: shaped.state.moments(name).model_copy(
            update={"returns": state.moments(name).returns.seen(totals[members].tolist())}
        )
        for name, members in batch.parts()
    }
    return Estimate(advantages, following.with_moments(seen), metrics=metrics)


def _norms(batch: SampledTokens) -> torch.Tensor:
    """float64 [T]: |e - pi|^2 = 1 - 2 pi(token) + sum_v pi(v)^2, e the one-hot vector of the sampled token: the squared
    norm of the gradient of its log-prob by the logits."""
    if batch.old_logprobs is None or batch.square_sums is None:
        raise ValueError("the optimal_token baseline needs old_logprobs and square_sums, but the batch lacks them")
    return (1.0 - 2.0 * batch.old_logprobs.double().exp() + batch.square_sums.double()).clamp(min=0.0)


def _above_players(
    config: AdvantageConfig, returns: torch.Tensor, batch: SampledTokens, state: AdvantageState
) -> tuple[torch.Tensor, AdvantageState]:
    """float64 [N]: the returns minus the moving average of each player's, within each source; and the next state."""
    above, averages = torch.zeros_like(returns), dict(state.players)
    of_samples = batch.players or ("",) * len(returns)
    for name, members in batch.parts():
        players = [player for player, inside in zip(of_samples, members.tolist(), strict=True) if inside]
        before = averages.get(name, {})
        above[members], averages[name] = player_average_advantages(
            returns[members], players, before, config.baseline_decay
        )
    return above, state.model_copy(update={"players": averages})


def _of_critic(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    """Temporal differences of the critic's values, over all later tokens or the next ones."""
    if batch.values is None:
        raise ValueError("the estimator needs values, but there is no table from the critic")
    values, shaped = batch.values.double(), _shape(config, batch, state)
    given = (shaped.token_rewards, values, batch.lengths, config.gamma)
    by_steps = config.estimator == "n_step"
    advantages = n_step_advantages(*given, config.n_steps) if by_steps else gae(*given, config.gae_lambda)
    metrics = {**shaped.metrics, **_critic_metrics(values, advantages + values)}
    return Estimate(advantages, shaped.state, advantages + values, metrics)


def _custom(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> Estimate:
    if config.custom is None:
        raise ValueError("the custom estimator needs the name of the user's algorithm")
    advantages = custom_advantages(config.custom, batch)
    if batch.values is None:
        return Estimate(advantages, state)
    values = batch.values.double()
    return Estimate(advantages, state, advantages + values, _critic_metrics(values, advantages + values))


def _by_sample(compute: Callable[[SampledTokens, AdvantageConfig], torch.Tensor]) -> Estimator:
    """The estimator that gives every token the advantage of its sample."""
    return lambda config, batch, state: Estimate(compute(batch, config)[batch.sequence], state)


ESTIMATORS: dict[str, Estimator] = {
    "group": _group,
    "turn_group": _turn_group,
    "smooth_group": _smooth_group,
    "decoupled_group": _decoupled_group,
    "max_likelihood": _by_sample(lambda batch, _: max_likelihood_advantages(batch.rewards, batch.groups)),
    "best_of_subsets": _by_sample(
        lambda batch, config: best_of_subsets_advantages(batch.rewards, batch.groups, config.pass_k)
    ),
    "best_of_group": _by_sample(lambda batch, _: best_of_group(batch.rewards, batch.groups)),
    "preference_pair": _preference_pair,
    "reference_pair": _reference_pair,
    "distill": _distill,
    "none": _by_sample(lambda batch, _: torch.zeros(len(batch.lengths), dtype=torch.double)),
    "returns": _returns,
    "gae": _of_critic,
    "n_step": _of_critic,
    "custom": _custom,
}


@dataclass(frozen=True)
class _Shaped:
    token_rewards: torch.Tensor
    rewards: torch.Tensor
    """float64 [N]: sequence rewards, scaled and clipped."""
    greedy_rewards: torch.Tensor | None
    """float64 [N], scaled and clipped in the same way."""
    own_rewards: torch.Tensor | None
    """float64 [T]: what a token alone is credited with (the KL penalty without `kl_to_go`), or None."""
    state: AdvantageState
    metrics: Mapping[str, float]


def _above_baseline(
    config: AdvantageConfig, returns: torch.Tensor, shaped: _Shaped, batch: SampledTokens, state: AdvantageState
) -> torch.Tensor:
    """float64 [N]: the returns of the samples minus the baseline."""
    match config.baseline:
        case "none":
            return returns
        case "group_mean":
            return group_advantages(returns, batch.groups, normalize_by_std=False)
        case "leave_one_out":
            return leave_one_out_advantages(returns, batch.groups)
        case "running_mean":
            # Earlier batches only: a baseline that includes the sample itself would bias the gradient.
            above = torch.zeros_like(returns)
            for name, members in batch.parts():
                above[members] = returns[members] - state.moments(name).returns.mean
            return above
        case "batch_mean":
            above = torch.zeros_like(returns)
            for _, members in batch.parts():
                above[members] = returns[members] - returns[members].mean()
            return above
        case "greedy" if shaped.greedy_rewards is not None:
            return returns - shaped.greedy_rewards
    raise ValueError("the greedy baseline needs the rewards of greedy responses, but greedy_rewards is empty")


def _shape(config: AdvantageConfig, batch: SampledTokens, state: AdvantageState) -> _Shaped:
    """Token rewards (the scaled and clipped reward at the end, the KL penalty on every token) and the next state."""
    parts = list(batch.parts())
    seen = {name: state.moments(name).rewards.seen(batch.rewards[members].tolist()) for name, members in parts}

    def shaped(rewards: torch.Tensor) -> torch.Tensor:
        rewards = rewards.double()
        for name, members in parts if config.reward_scale != "none" else ():
            fresh = Moments().seen(batch.rewards[members].tolist())
            scale = fresh if config.reward_scale == "batch" else seen[name]
            scaled = (rewards - scale.mean) / (scale.std + SCALE_EPS)
            rewards = torch.where(members, scaled, rewards)
        return rewards if config.reward_clip is None else rewards.clamp(-config.reward_clip, config.reward_clip)

    adaptive = config.kl_target is not None
    coef = state.kl_coef_from(config.kl_coef) if adaptive else config.kl_coef
    kl, metrics, steered = None, {}, {"kl_coef": None, "kl_start": None}
    if config.kl_coef:
        kl = _log_ratios(batch)
        if adaptive:
            metrics["kl_coef"] = coef
            next_coef = steered_kl_coef(coef, float(kl.sum()) / len(batch.lengths), config, len(batch.lengths))
            steered = {"kl_coef": next_coef, "kl_start": config.kl_coef}
    following = state.with_moments(
        {name: state.moments(name).model_copy(update={"rewards": rewards}) for name, rewards in seen.items()}
    ).model_copy(update=steered)
    rewards, own_rewards = shaped(batch.rewards), None
    if kl is not None and not config.kl_to_go:
        own_rewards, kl = -coef * kl, None
    if batch.steps is None:
        token_rewards = shaped_rewards(rewards, batch.lengths, kl, coef)
    else:
        if config.reward_scale != "none" or config.reward_clip is not None:
            raise ValueError("process rewards cannot be scaled or clipped: they are rewards of steps, not of samples")
        token_rewards = step_rewards(*batch.steps, batch.lengths, kl, coef)
    return _Shaped(
        token_rewards=token_rewards,
        rewards=rewards,
        own_rewards=own_rewards,
        greedy_rewards=None if batch.greedy_rewards is None else shaped(batch.greedy_rewards),
        state=following,
        metrics=metrics,
    )


def steered_kl_coef(coef: float, kl: float, config: AdvantageConfig, samples: int) -> float:
    """The next coefficient after `samples` responses with a mean KL divergence of `kl` nats (arXiv 1909.08593, eq. 3).

    e = clip(kl / target - 1, -0.2, 0.2); coef * (1 + e * samples / horizon). Unchanged without a target. The formula is
    meant for a horizon of many batches: more samples than the horizon count as the horizon. Otherwise the factor would
    fall to 0 and below at 5 horizons, and with it the coefficient for good.
    """
    if config.kl_target is None:
        return coef
    error = min(max(kl / config.kl_target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return adapted_coef(coef * (1.0 + error * min(1.0, samples / config.kl_horizon)), config.kl_coef)


def _log_ratios(batch: SampledTokens) -> torch.Tensor:
    """float64 [T]: log-prob before the update minus the reference's."""
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        raise ValueError("the log-ratio to the reference needs old_logprobs and ref_logprobs, but the batch lacks them")
    return batch.old_logprobs.double() - batch.ref_logprobs.double()


def _critic_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    metrics = statistics("value", values) | statistics("return", returns)
    return metrics | {"explained_variance": explained_variance(values, returns)}


def statistics(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean and (population) standard deviation of `values`; 0 if it is empty."""
    if not len(values):
        return {f"{name}_mean": 0.0, f"{name}_std": 0.0}
    return {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(correction=0))}
