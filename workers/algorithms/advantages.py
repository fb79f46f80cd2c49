"""What advantage estimators see of a batch, and pure functions from rewards to advantages.

They compute in float64 on the CPU, vectorized over samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch

STD_EPS = 1e-4
"""Added to a group's standard deviation, as in TRL, so that rewards equal up to noise do not become +-1."""
WHITEN_EPS = 1e-8
OTB_EPS = 1e-8
"""Added to a sum of weights, which is 0 where no sample of the group was uncertain; as in verl."""


@dataclass(frozen=True)
class SampledTokens:
    """One batch of N samples with T tokens sampled by the policy in total."""

    rewards: torch.Tensor
    """float64 [N]."""
    groups: torch.Tensor
    """int64 [N]: number of the sample's group, from 0."""
    lengths: torch.Tensor
    """int64 [N]: tokens of each sample."""
    rollout_logprobs: torch.Tensor
    """[T]."""
    old_logprobs: torch.Tensor | None
    ref_logprobs: torch.Tensor | None
    values: torch.Tensor | None
    square_sums: torch.Tensor | None = None
    """[T]: sum of the squared probabilities of all tokens, under the policy of `old_logprobs` (optimal_token)."""
    taught: tuple[torch.Tensor, torch.Tensor] | None = None
    """`teachers.targets` of the tokens, or None if the samples have no teacher."""
    prompt_rows: tuple[int, ...] = ()
    """Row of the prompt pool of each group (smooth_group)."""
    greedy_rewards: torch.Tensor | None = None
    """float64 [N]: reward of the greedy response to the sample's prompt (greedy baseline)."""
    steps: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Process rewards: (rewards float64 [M], tokens up to the step's end int64 [M], sample number int64 [M])."""
    turns: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """The policy's turns in order: (tokens of the sample up to the turn's end int64 [M], sample number int64 [M],
    number of the state that the turn began in, within the group, int64 [M]), or None if a sample is one turn."""
    masked: torch.Tensor | None = None
    """bool [N]: samples without loss. Other samples are compared with them, but whitening leaves their tokens out."""

    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float64 [2, N] by name: the values of a component of the reward, and its weights, 0 if a sample has no such
    component."""
    normalized: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """bool [N] by name of a component: samples that are trained on its values normalized over all batches."""
    sources: tuple[str, ...] = ()
    """[N] name of the source of each sample's prompt, within which batch-wide statistics are computed; if empty, they
    are computed over all samples."""
    players: tuple[str, ...] = ()
    """[N] player of a game whose part each sample is, or empty; groups are of one prompt and one player."""
    partners: torch.Tensor | None = None
    """int64 [N]: number of the reference's response that a sample of the policy is compared with, or -1 if it has none
    (reference_pair)."""

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of the source, bool [N]: its samples) for each part with separate statistics; one without a name if
        they are computed over all samples."""
        if not self.sources:
            yield "", torch.ones(len(self.rewards), dtype=torch.bool)
        for name in dict.fromkeys(self.sources):
            yield name, torch.tensor([own == name for own in self.sources])

    def taken(self, members: torch.Tensor) -> SampledTokens:
        """The samples where `members`, bool [N], is True, with their tokens, for an estimator that reads no teacher and
        no turns. They are whole groups."""
        tokens, inside, known = members[self.sequence], members.tolist(), self.groups[members].unique()
        number = members.long().cumsum(0) - 1
        chosen = {"rewards": members, "lengths": members, "greedy_rewards": members, "masked": members}
        chosen |= dict.fromkeys(("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "square_sums"), tokens)
        found = {name: value[where] for name, where in chosen.items() if (value := vars(self)[name]) is not None}
        steps = self.steps
        if steps is not None:
            rewards, ends, samples = (part[members[steps[2]]] for part in steps)
            steps = rewards, ends, number[samples]
        return replace(
            self,
            **found,
            groups=torch.searchsorted(known, self.groups[members]),
            steps=steps,
            taught=None,
            turns=None,
            partners=None,
            prompt_rows=tuple(self.prompt_rows[group] for group in known.tolist()) if self.prompt_rows else (),
            components={name: values[:, members] for name, values in self.components.items()},
            normalized={name: those[members] for name, those in self.normalized.items()},
            sources=tuple(compress(self.sources, inside)),
            players=tuple(compress(self.players, inside)),
        )

    @property
    def sequence(self) -> torch.Tensor:
        """int64 [T]: the sample each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @property
    def with_loss(self) -> torch.Tensor:
        """bool [T]: tokens of the samples that are not masked."""
        masked = torch.zeros(len(self.lengths), dtype=torch.bool) if self.masked is None else self.masked
        return ~masked[self.sequence]


def group_advantages(rewards: torch.Tensor, groups: torch.Tensor, normalize_by_std: bool) -> torch.Tensor:
    """float64 [n]: reward minus the mean of its group, optionally divided by the group's standard deviation.

    `rewards`: [n]; `groups`: int64 [n], the group number of each sample; groups may differ in size. GRPO
    (arXiv 2402.03300) does not specify the estimator of the standard deviation; as in TRL it is the unbiased one
    (n - 1), plus `STD_EPS`. A group of equal rewards, and so a group of one, gets exactly 0: it carries no signal.
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
    # The mean of equal numbers may have a rounding error; their minimum and maximum do not.
    return centred.masked_fill(uniform_groups(rewards, groups)[groups], 0.0)


def optimal_token_baselines(
    returns: torch.Tensor, norms: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """float64 [T]: the mean of the returns from the t-th token on over the samples of a group, each weighted by its
    `norms` up to that token (OTB, arXiv 2602.07078): the baseline of token t with the least variance of the gradient.

    `returns`, `norms`: [T], of each token the return from it on and the squared norm of the gradient of its log-prob by
    the logits. As in the code in verl, tokens that one sample of the group alone reaches have a baseline of 0: their
    own return would leave no gradient.
    """
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    first = (lengths.cumsum(0) - lengths)[sequence]
    sums = norms.double().cumsum(0)
    weights = sums - (sums - norms.double())[first]
    width = int(lengths.max())
    at = groups[sequence] * width + torch.arange(len(sequence)) - first
    count, weight, total = torch.zeros(3, int(groups.max() + 1) * width, dtype=torch.double)
    count.index_add_(0, at, torch.ones_like(weights))
    weight.index_add_(0, at, weights)
    total.index_add_(0, at, weights * returns.double())
    return torch.where(count > 1, total / (weight + OTB_EPS), 0.0)[at]


def player_average_advantages(
    returns: torch.Tensor, players: Sequence[str], averages: Mapping[str, float], decay: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns minus the moving average of each player's returns (RAE: SPIRAL, arXiv 2506.24119), and the averages
    afterwards.

    For each sample in order advantage = return - b, then b = decay b + (1 - decay) return: the order of the published
    code, in which no baseline includes the sample itself. `returns` and the result: float64 [n]. A new player's average
    starts at 0.
    """
    after, advantages = dict(averages), list[float]()
    for player, value in zip(players, returns.tolist(), strict=True):
        average = after.get(player, 0.0)
        advantages.append(value - average)
        after[player] = decay * average + (1.0 - decay) * value
    return torch.tensor(advantages, dtype=torch.double), after


def uniform_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """bool [number of groups]: whether all rewards of a group are equal. Arguments as in `group_advantages`."""
    rewards = rewards.double()
    size = int(groups.max()) + 1 if len(groups) else 0
    lowest = torch.full((size,), torch.inf).double().scatter_reduce(0, groups, rewards, "amin")
    highest = torch.full((size,), -torch.inf).double().scatter_reduce(0, groups, rewards, "amax")
    return lowest == highest


def leave_one_out_advantages(returns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """float64 [n]: return minus the mean return of the other samples of its group (RLOO, arXiv 2402.14740, eq. 6).

    Arguments as in `group_advantages`. R_i - sum_{j != i} R_j / (n - 1) = n / (n - 1) * (R_i - mean). A sample that is
    alone in its group gets 0.
    """
    centred = group_advantages(returns, groups, normalize_by_std=False)
    count = torch.bincount(groups, minlength=1).double()[groups] if len(groups) else centred
    return centred * count / (count - 1).clamp(min=1.0)


def max_likelihood_advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """float64 [n]: (reward - mean) / mean of the group (MaxRL, arXiv 2602.02710), 0 if all rewards are equal.

    For rewards of 0 and 1 the expected gradient is that of the first terms of the log-likelihood of a right answer, as
    many as the group has samples. Arguments as in `group_advantages`. Raises ValueError if a reward is negative: a mean
    below 0 would reverse the gradient. A mean of 0 is then that of rewards that are all 0.
    """
    lowest = float(rewards.min()) if len(rewards) else 0.0
    if lowest < 0.0:
        raise ValueError(f"maxrl divides by a group's mean reward and needs rewards of 0 or more, got {lowest}")
    centred = group_advantages(rewards, groups, normalize_by_std=False)
    return torch.where(centred == 0.0, 0.0, centred / (rewards.double() - centred))


def best_of_subsets_advantages(rewards: torch.Tensor, groups: torch.Tensor, k: int) -> torch.Tensor:
    """float64 [n]: the mean best reward of the subsets of k samples that a sample is in, standardised over all subsets.

    Pass@k training by its analytical derivation (arXiv 2508.10751), for any rewards, negative ones included, instead of
    0 and 1: a constant that is added to all changes nothing. With rewards in
    ascending order, the j-th of n, counted from 0, is the best of C(j, k-1) subsets, and of C(j-1, k-2) of those with a
    given sample below it. A group of k samples or fewer has no two subsets to compare and gets 0. Arguments as in
    `group_advantages`.
    """
    result = torch.zeros(len(rewards), dtype=torch.double)
    for group in groups.unique().tolist():
        members = (groups == group).nonzero().flatten()
        n, values = len(members), rewards[members].double()
        if n <= k or bool((values == values[0]).all()):
            continue
        ascending, order = values.sort()
        own = torch.tensor([math.comb(j, k - 1) for j in range(n)], dtype=torch.double)
        with_lower = torch.tensor([math.comb(j - 1, k - 2) if j else 0 for j in range(n)], dtype=torch.double)
        share = own / math.comb(n, k)
        mean = (share * ascending).sum()
        deviation = (share * (ascending - mean).square()).sum().sqrt()
        above = (with_lower * ascending).flip(0).cumsum(0).flip(0) - with_lower * ascending
        best = (own * ascending + above) / math.comb(n - 1, k - 1)
        result[members[order]] = (best - mean) / (deviation + STD_EPS)
    return result


def preference_pair_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, ratios: torch.Tensor, beta: float
) -> torch.Tensor:
    """float64 [n]: w for the best sample of every group and -w for the worst (the first of equals), 0 for the others.

    Online DPO (arXiv 2402.04792, alg. 1) takes DPO's step (arXiv 2305.18290, eq. 7) on a pair that the policy samples.
    With h = beta (`ratios`(best) - `ratios`(worst)), the samples' log-ratios to the reference, and n / (number of
    groups) for the mean over pairs, w = n / (number of groups) beta sigmoid(-h): -w (log pi(best) - log pi(worst)) has
    the gradient of -log sigmoid(h). A group of equal rewards has no pair. Arguments as in `group_advantages`.
    """
    result = torch.zeros(len(rewards), dtype=torch.double)
    same = uniform_groups(rewards, groups)
    for group in range(len(same)):
        members = (groups == group).nonzero().flatten()
        best, worst = members[rewards[members].argmax()], members[rewards[members].argmin()]
        lead = beta * (ratios[best] - ratios[worst])
        weight = 0.0 if same[group] else len(rewards) / len(same) * beta * torch.sigmoid(-lead)
        result[best], result[worst] = weight, -weight
    return result


def reference_pair_advantages(
    rewards: torch.Tensor, partners: torch.Tensor, ratios: torch.Tensor, beta: float, exploration: float
) -> torch.Tensor:
    """float64 [n]: the weights of XPO's gradient for samples of the policy and the reference's responses; 0 for one
    without a partner.

    XPO (arXiv 2405.21046, alg. 1) adds alpha log pi(y') to DPO's loss -log sigmoid(h) (arXiv 2305.18290, eq. 7) on a
    pair of the policy's y and the reference's y', ranked by reward: h = beta (`ratios`(better) - `ratios`(worse)), the
    log-ratios to the reference. With w = beta sigmoid(-h) the better one gets w and the other -w, y' also -alpha
    (`exploration`), each times n / (number of pairs) for the mean over pairs: the sum of -A log pi has the gradient
    of the loss. A pair of equal rewards has no preference, and alpha alone. `rewards`, `ratios`: [n]; `partners`: as
    `SampledTokens.partners`.
    """
    result = torch.zeros(len(rewards), dtype=torch.double)
    own = (partners >= 0).nonzero().flatten()
    other = partners[own]
    order = (rewards[own] - rewards[other]).double().sign()
    preferred = order * beta * torch.sigmoid(-order * beta * (ratios[own] - ratios[other]))
    scale = len(rewards) / max(1, len(own))
    result[own], result[other] = scale * preferred, -scale * (preferred + exploration)
    return result


def mixture_win_rates(
    rewards: torch.Tensor, groups: torch.Tensor, ratios: torch.Tensor, mixture_coef: float
) -> tuple[torch.Tensor, float]:
    """(float64 [n], the share of comparisons that a sample wins against a mixture of policy and reference; the mean
    number of samples that count as its opponents).

    Nash-MD (arXiv 2312.00886) compares a sample with one of the mixture, which is proportional to policy^(1 - beta)
    reference^beta, beta = `mixture_coef`. Here the other samples of its group are the opponents, each with the weight
    exp(-beta ratio), which is the mixture's probability over the policy's up to a factor; divided by the sum of the
    weights, the mean has a bias that falls with the size of the group, and none for beta = 0. The number is
    (sum w)^2 / sum w^2. Equal rewards are half a win; a sample that is alone has a half. `ratios`: [n], log-ratios of
    whole responses to the reference. Arguments as in `group_advantages`.
    """
    wins, opponents = torch.full((len(rewards),), 0.5, dtype=torch.double), list[torch.Tensor]()
    for group in groups.unique().tolist():
        members = (groups == group).nonzero().flatten()
        if len(members) == 1:
            continue
        own = rewards[members].double()
        won = 0.5 + 0.5 * (own[:, None] - own).sign()
        scores = (-mixture_coef * ratios[members].double()).expand(len(members), -1).clone()
        weights = scores.fill_diagonal_(-torch.inf).softmax(1)
        wins[members] = (weights * won).sum(1)
        opponents.append(1.0 / weights.square().sum(1))
    return wins, float(torch.cat(opponents).mean()) if opponents else 0.0


def covariant_tokens(
    advantages: torch.Tensor, logprobs: torch.Tensor, among: torch.Tensor, share: float, bounds: tuple[float, float]
) -> torch.Tensor:
    """bool [T]: the `share` of the tokens (at least one) with the highest covariance of log-prob and advantage.

    The covariance of a token is the product of both, each minus its mean over the tokens in `among` (bool [T]); one
    outside `bounds` is not chosen (arXiv 2505.22617). The published code draws the tokens of Clip-Cov at random
    within the bounds. The highest are the same when a step is repeated.
    """
    own, advantage = logprobs.double()[among], advantages.double()[among]
    covariance = (own - own.mean()) * (advantage - advantage.mean())
    covariance = covariance.masked_fill((covariance <= bounds[0]) | (covariance >= bounds[1]), -torch.inf)
    count = min(max(int(share * len(own)), 1), int(covariance.isfinite().sum()))
    chosen = torch.zeros_like(among)
    chosen[among.nonzero().flatten()[covariance.topk(count).indices]] = True
    return chosen


def best_of_group(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """float64 [n]: n / (number of groups) for the best sample of every group (the first of equals), 0 for the others.

    RAFT (arXiv 2304.06767) fine-tunes on the best of K; with this weight, the mean over all samples of the negative
    log-likelihood is the mean over the best ones, also if groups differ in size. Arguments as in `group_advantages`.
    """
    result = torch.zeros(len(rewards), dtype=torch.double)
    present = groups.unique()
    for group in present.tolist():
        members = (groups == group).nonzero().flatten()
        result[members[rewards[members].argmax()]] = len(rewards) / len(present)
    return result


def process_advantages(
    step_rewards: torch.Tensor,
    step_ends: torch.Tensor,
    step_samples: torch.Tensor,
    groups: torch.Tensor,
    lengths: torch.Tensor,
    normalize_by_std: bool,
) -> torch.Tensor:
    """float64 [sum(lengths)]: process supervision (GRPO, arXiv 2402.03300, sec. 4.1.3).

    The rewards of all steps of all samples of a group are normalised together; a token's advantage is the sum of the
    normalised rewards of the steps that end after it. `step_rewards`: [m]; `step_ends`: int64 [m], the number of
    tokens of the sample up to the end of the step; `step_samples`: int64 [m]; `groups`, `lengths`: int64 [n].
    """
    normal = group_advantages(step_rewards, groups[step_samples], normalize_by_std)
    first = lengths.cumsum(0) - lengths
    at_end = torch.zeros(int(lengths.sum()), dtype=torch.double)
    at_end.index_add_(0, (first[step_samples] + step_ends - 1), normal)
    return returns_to_go(at_end, lengths, gamma=1.0)


def turn_advantages(
    rewards: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    turns: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: torch.Tensor,
    gamma: float,
    normalize_by_std: bool,
) -> torch.Tensor:
    """float64 [sum(lengths)]: the return of each token's turn relative to turns in the same state (GiGPO, arXiv
    2505.10978, eq. 7).

    The return of turn k is the sum over j >= k of gamma^(j-k) times the rewards in turn j. A turn in a state that no
    other turn of the group was in gets 0. `rewards`, `turns`: as `SampledTokens.steps` and `.turns`; `lengths`: int64
    [n].
    """
    first = lengths.cumsum(0) - lengths
    (values, at, earned_by), (ends, samples, states) = rewards, turns
    last_tokens = first[samples] + ends
    earned = torch.zeros(len(ends), dtype=torch.double)
    earned.index_add_(0, torch.searchsorted(last_tokens, first[earned_by] + at), values.double())
    returns = returns_to_go(earned, torch.bincount(samples, minlength=len(lengths)), gamma)
    of_tokens = torch.searchsorted(last_tokens, torch.arange(1, int(lengths.sum()) + 1))
    return group_advantages(returns, states, normalize_by_std)[of_tokens]


def smoothed_advantages(
    rewards: torch.Tensor, now: tuple[float, float], total: tuple[float, float], visits: int
) -> torch.Tensor:
    """float64 [n]: smooth advantage standardization of one prompt's samples (DCPO, arXiv 2509.02333, sec. 3.2).

    `now`, `total`: (mean, standard deviation) of the rewards of this visit and of all visits up to and including this
    one, the `visits`-th, i. With A_now and A_total the two standardized rewards, the result is the one nearer to 0 of
    (i-1)/i A_now + 1/i A_total and 1/i A_now + (i-1)/i A_total. A deviation of 0 gives an A of 0.
    """
    fresh, old = (_standardised(rewards.double(), *statistics) for statistics in (now, total))
    share = 1.0 / visits
    towards_now, towards_total = (1 - share) * fresh + share * old, share * fresh + (1 - share) * old
    return torch.where(towards_now.abs() < towards_total.abs(), towards_now, towards_total)


def _standardised(rewards: torch.Tensor, mean: float, std: float) -> torch.Tensor:
    return (rewards - mean) / (std + STD_EPS) if std > 0 else torch.zeros_like(rewards)


def shaped_rewards(
    rewards: torch.Tensor, lengths: torch.Tensor, kl: torch.Tensor | None, kl_coef: float
) -> torch.Tensor:
    """float64 [sum(lengths)]: token rewards of concatenated sequences.

    Every token gets -kl_coef * kl, and the last token of a sequence also its (scaled, clipped) reward
    (InstructGPT, arXiv 2203.02155). `rewards`: [n]; `lengths`: int64 [n]; `kl`: [sum(lengths)], an estimate of the
    KL divergence per token, None for none. The reward of a sequence without tokens is dropped.
    """
    rewards = rewards.double()
    token_rewards = torch.zeros(int(lengths.sum()), dtype=torch.double)
    if kl is not None and kl_coef:
        token_rewards -= kl_coef * kl.double()
    filled = lengths > 0
    last = (lengths.cumsum(0) - 1)[filled]
    token_rewards[last] += rewards[filled]
    return token_rewards


def step_rewards(
    rewards: torch.Tensor,
    ends: torch.Tensor,
    samples: torch.Tensor,
    lengths: torch.Tensor,
    kl: torch.Tensor | None,
    kl_coef: float,
) -> torch.Tensor:
    """float64 [sum(lengths)]: as `shaped_rewards`, with the reward of every step at its last token.

    `rewards`: [m]; `ends`: int64 [m], the number of tokens of the sample up to the end of the step; `samples`: int64
    [m]; `lengths`: int64 [n].
    """
    token_rewards = shaped_rewards(torch.zeros(len(lengths)), lengths, kl, kl_coef)
    first = lengths.cumsum(0) - lengths
    return token_rewards.index_add(0, first[samples] + ends - 1, rewards.double())


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """float64 [sum(lengths)]: generalised advantage estimates (arXiv 1506.02438) of concatenated sequences.

    delta_t = reward_t + gamma * value_{t+1} - value_t, A_t = delta_t + gamma * lambda * A_{t+1}, with value and
    advantage 0 after the last token. Returns are A_t + value_t.
    """
    width = int(lengths.max()) if len(lengths) else 0
    inside = torch.arange(width)[None, :] < lengths[:, None]
    reward, value = (torch.zeros(len(lengths), width + 1, dtype=torch.double) for _ in range(2))
    reward[:, :-1][inside] = token_rewards.double()
    value[:, :-1][inside] = values.double()
    advantages = torch.zeros_like(reward)
    # One pass over time for all sequences; beyond the end of a sequence everything stays 0.
    for t in range(width - 1, -1, -1):
        delta = reward[:, t] + gamma * value[:, t + 1] - value[:, t]
        advantages[:, t] = delta + gamma * gae_lambda * advantages[:, t + 1]
    return advantages[:, :-1][inside]


def returns_to_go(token_rewards: torch.Tensor, lengths: torch.Tensor, gamma: float) -> torch.Tensor:
    """float64 [sum(lengths)]: G_t = sum over t' >= t of gamma^(t'-t) reward_t', for concatenated sequences."""
    return gae(token_rewards, torch.zeros_like(token_rewards), lengths, gamma, gae_lambda=1.0)


def n_step_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, gamma: float, n_steps: int
) -> torch.Tensor:
    """float64 [sum(lengths)]: A_t = sum_{l<k} gamma^l reward_{t+l} + gamma^k value_{t+k} - value_t, with k = `n_steps`.
    After the last token rewards and values are 0 (A3C, arXiv 1602.01783, sec. 4). Arguments as in `gae`."""
    to_go = returns_to_go(token_rewards, lengths, gamma)
    index = torch.arange(len(to_go))
    end = torch.repeat_interleave(lengths.cumsum(0), lengths)
    later = index + n_steps
    inside = later < end
    # G_t - gamma^k G_{t+k} are the next k rewards; the critic's value replaces the rest.
    rest = torch.zeros_like(to_go)
    rest[inside] = (values.double() - to_go)[later[inside]] * gamma**n_steps
    return to_go + rest - values.double()


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` shifted and scaled to mean 0 and (unbiased) variance 1 over `mask`, and 0 outside it; both [T]."""
    chosen = values[mask].double()
    result = torch.zeros_like(values, dtype=torch.double)
    if len(chosen) > 1:
        result[mask] = (chosen - chosen.mean()) * torch.rsqrt(chosen.var() + WHITEN_EPS)
    return result


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant. 0 if the returns do not vary.
    Both [T]."""
    variance = float(returns.double().var(correction=0)) if len(returns) else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((returns.double() - values.double()).var(correction=0)) / variance
