"""Pure functions from rewards to advantages. Everything is float64 on the CPU and vectorised over samples."""

from __future__ import annotations

import torch

STD_EPS = 1e-4
"""Added to a group's standard deviation, as TRL does: rewards equal up to noise do not become +-1."""
WHITEN_EPS = 1e-8


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, normalize_by_std: bool) -> torch.Tensor:
    """float64 [n]: reward minus the mean of its group, divided by the group's standard deviation if asked for.

    `rewards`: [n]; `groups`: int64 [n], the group number of each sample; groups may differ in size. GRPO
    (arXiv 2402.03300) says "std" and leaves the estimator open; as in TRL it is the unbiased one (n - 1), plus
    `STD_EPS`. A group of equal rewards, and so a group of one, gets exactly 0: it carries no signal.
    """
    rewards = rewards.double()
    if not len(rewards):
        return rewards
    count, total, squares = (torch.zeros(int(groups.max()) + 1, dtype=torch.double) for _ in range(3))
    count.index_add_(0, groups, torch.ones_like(rewards))
    total.index_add_(0, groups, rewards)
    centred = rewards - (total / count.clamp(min=1.0))[groups]
    if normalize_by_std:
        squares.index_add_(0, groups, centred.square())
        centred = centred / ((squares / (count - 1).clamp(min=1.0)).sqrt() + STD_EPS)[groups]
    # The mean of equal numbers may be off by a rounding error; their spread is not.
    return centred.masked_fill(uniform_groups(rewards, groups)[groups], 0.0)


def uniform_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """bool [number of groups]: whether all rewards of a group are equal. Arguments as in `group_advantages`."""
    rewards = rewards.double()
    size = int(groups.max()) + 1 if len(groups) else 0
    lowest = torch.full((size,), torch.inf).double().scatter_reduce(0, groups, rewards, "amin")
    highest = torch.full((size,), -torch.inf).double().scatter_reduce(0, groups, rewards, "amax")
    return lowest == highest


def shaped_rewards(
    rewards: torch.Tensor,
    lengths: torch.Tensor,
    kl: torch.Tensor | None,
    kl_coef: float,
    reward_clip: float | None,
) -> torch.Tensor:
    """float64 [sum(lengths)]: token_rewards of sequences laid end to end.

    Every token gets -kl_coef * kl, and a sequence's last token its reward (clipped to +-reward_clip) on top
    (InstructGPT, arXiv 2203.02155). `rewards`: [n]; `lengths`: int64 [n]; `kl`: [sum(lengths)], an estimate of the
    KL divergence per token, None for none. A sequence without tokens has nowhere to put its reward.
    """
    rewards = rewards.double()
    if reward_clip is not None:
        rewards = rewards.clamp(-reward_clip, reward_clip)
    token_rewards = torch.zeros(int(lengths.sum()), dtype=torch.double)
    if kl is not None and kl_coef:
        token_rewards -= kl_coef * kl.double()
    filled = lengths > 0
    last = (lengths.cumsum(0) - 1)[filled]
    token_rewards[last] += rewards[filled]
    return token_rewards


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """float64 [sum(lengths)]: generalised advantage estimates (arXiv 1506.02438) of sequences laid end to end.

    delta_t = reward_t + gamma * value_{t+1} - value_t, A_t = delta_t + gamma * lambda * A_{t+1}, with value and
    advantage 0 after the last token. Returns are A_t + value_t.
    """
    width = int(lengths.max()) if len(lengths) else 0
    inside = torch.arange(width)[None, :] < lengths[:, None]
    reward, value = (torch.zeros(len(lengths), width + 1, dtype=torch.double) for _ in range(2))
    reward[:, :-1][inside] = token_rewards.double()
    value[:, :-1][inside] = values.double()
    advantages = torch.zeros_like(reward)
    # One pass over time for all sequences at once; beyond a sequence's end everything is 0 and stays so.
    for t in range(width - 1, -1, -1):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        advantages[:, t] = delta + gamma * gae_lambda * advantages[:, t + 1]
    return advantages[:, :-1][inside]


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` shifted and scaled to mean 0 and (unbiased) variance 1 over `mask`, and 0 outside it; both [T]."""
    chosen = values[mask].double()
    result = torch.zeros_like(values, dtype=torch.double)
    if len(chosen) > 1:
        result[mask] = (chosen - chosen.mean()) * torch.rsqrt(chosen.var() + WHITEN_EPS)
    return result


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 no better than a constant.

    0 where the returns do not vary. Both [T].
    """
    variance = float(returns.double().var(correction=0)) if len(returns) else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((returns.double() - values.double()).var(correction=0)) / variance
