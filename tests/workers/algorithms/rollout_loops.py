"""The algorithms on rollouts as loops over groups, samples and tokens, in float64 and straight from the papers.

From the rewards and log-probs of a batch to the loss of a later update on it: one function for each row's advantages,
one for each row's loss. Nothing here is shared with the product; gradients are autograd's, through scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

Scalar = torch.Tensor
Advantages = list[list[float]]
"""By sample and by token that the policy sampled."""


@dataclass(frozen=True)
class Sample:
    """One response: the tokens that the policy sampled, in order."""

    prompt: int
    reward: float
    greedy: float
    """Reward of the greedy response to the prompt."""
    new: Sequence[Scalar]
    """Log-probs under the policy being trained."""
    old: Sequence[float]
    ref: Sequence[float]
    rollout: Sequence[float]
    values: Sequence[float]
    parts: Sequence[tuple[float, float]] = ()
    """(value, weight) of each component of the reward."""
    squares: Sequence[float] = ()
    """Sum of the squared probabilities of all tokens, at each token, under the policy before the update."""
    turns: Sequence[tuple[int, str]] = ()
    """(tokens up to the turn's end, state that it began in) of each turn."""
    others: Sequence[tuple[Sequence[Scalar], Sequence[float]]] = ()
    """Log-probs of other tokens under the policy being trained and under the sampler, at each token."""

    def __len__(self) -> int:
        return len(self.old)


@dataclass(frozen=True)
class Batch:
    """The samples of a step, and the rewards and returns of earlier steps."""

    samples: Sequence[Sample]
    max_tokens: int
    earlier: Sequence[Sample] = ()
    """Samples of earlier steps, every prompt visited once."""

    def mates(self, sample: Sample) -> list[Sample]:
        """The samples of the same prompt, itself included."""
        return [other for other in self.samples if other.prompt == sample.prompt]


def mean(numbers: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(numbers) / len(numbers)


def deviation(numbers: Sequence[float]) -> float:
    """Unbiased standard deviation."""
    middle = mean(numbers)
    return math.sqrt(sum((x - middle) ** 2 for x in numbers) / (len(numbers) - 1))


def whitened(advantages: Advantages) -> Advantages:
    """Mean 0 and variance 1 over the batch's tokens."""
    flat = [a for row in advantages for a in row]
    scale = math.sqrt(deviation(flat) ** 2 + 1e-8)
    return [[(a - mean(flat)) / scale for a in row] for row in advantages]


def token_rewards(sample: Sample, kl_coef: float, reward: float | None = None) -> list[float]:
    """-kl_coef (log pi_old - log pi_ref) at every token, the reward at the last (InstructGPT)."""
    rewards = [-kl_coef * (old - ref) for old, ref in zip(sample.old, sample.ref, strict=True)]
    rewards[-1] += sample.reward if reward is None else reward
    return rewards


def to_go(rewards: Sequence[float]) -> list[float]:
    """Undiscounted sums from each token on."""
    return [sum(rewards[t:]) for t in range(len(rewards))]


def gae(rewards: Sequence[float], values: Sequence[float], lambda_: float) -> list[float]:
    """Sum_l lambda^l delta_{t+l}, gamma = 1 (arXiv 1506.02438, eq. 16)."""
    after = [*values[1:], 0.0]
    deltas = [r + b - v for r, b, v in zip(rewards, after, values, strict=True)]
    return [sum(lambda_**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


def reinforce(batch: Batch) -> Advantages:
    """Returns minus the mean return of earlier batches."""
    baseline = mean([s.reward for s in batch.earlier])
    return [[g - baseline for g in to_go(token_rewards(s, 0.0))] for s in batch.samples]


def flash_reinforce(batch: Batch) -> Advantages:
    """FlashREINFORCE: the reward minus the batch's mean."""
    baseline = mean([s.reward for s in batch.samples])
    return [[s.reward - baseline] * len(s) for s in batch.samples]


def rae(batch: Batch) -> Advantages:
    """SPIRAL, arXiv 2506.24119, of one player: the average of the samples before each one, with its decay of 0.95."""
    average, result = 0.0, []
    for number, s in enumerate([*batch.earlier, *batch.samples]):
        if number >= len(batch.earlier):
            result.append([s.reward - average] * len(s))
        average = 0.95 * average + 0.05 * s.reward
    return result


def actor_critic(batch: Batch) -> Advantages:
    """A3C, arXiv 1602.01783, sec. 4, k = 8."""
    result = []
    for s in batch.samples:
        rewards, values = token_rewards(s, 0.0), [*s.values, *[0.0] * 8]
        result.append([sum(rewards[t : t + 8]) + values[t + 8] - values[t] for t in range(len(s))])
    return result


def actor_critic_gae(batch: Batch) -> Advantages:
    """GAE without a KL term."""
    return [gae(token_rewards(s, 0.0), s.values, 0.95) for s in batch.samples]


def ppo(batch: Batch) -> Advantages:
    """GAE on rewards with a KL term of 0.05, whitened."""
    return whitened([gae(token_rewards(s, 0.05), s.values, 0.95) for s in batch.samples])


def ppo_max(batch: Batch) -> Advantages:
    """PPO-max, arXiv 2307.04964, sec. 5: rewards scaled by all so far and clipped, advantages whitened and clipped."""
    seen = [s.reward for s in (*batch.earlier, *batch.samples)]
    scaled = [(s.reward - mean(seen)) / (deviation(seen) + 1e-4) for s in batch.samples]
    clipped = [min(max(r, -10.0), 10.0) for r in scaled]
    rows = [gae(token_rewards(s, 0.02, r), s.values, 0.95) for s, r in zip(batch.samples, clipped, strict=True)]
    return [[min(max(a, -0.5), 0.5) for a in row] for row in whitened(rows)]


def grpo(batch: Batch) -> Advantages:
    """DeepSeekMath, arXiv 2402.03300, sec. 4.1.2."""
    result = []
    for s in batch.samples:
        rewards = [other.reward for other in batch.mates(s)]
        result.append([(s.reward - mean(rewards)) / (deviation(rewards) + 1e-4)] * len(s))
    return result


def dr_grpo(batch: Batch) -> Advantages:
    """Dr. GRPO, arXiv 2503.20783: the reward minus the group's mean."""
    return [[s.reward - mean([other.reward for other in batch.mates(s)])] * len(s) for s in batch.samples]


def gigpo(batch: Batch) -> Advantages:
    """GiGPO, arXiv 2505.10978, sec. 4, with one reward at the end: eq. 3 plus eq. 7 of the turn that a token is in."""

    def returns(s: Sample) -> list[tuple[str, float]]:
        return [(state, 0.95 ** (len(s.turns) - 1 - k) * s.reward) for k, (_, state) in enumerate(s.turns)]

    result = []
    for s, own in zip(batch.samples, grpo(batch), strict=True):
        row = list(own)
        for k, (state, value) in enumerate(returns(s)):
            alike = [other for mate in batch.mates(s) for where, other in returns(mate) if where == state]
            step = (value - mean(alike)) / (deviation(alike) + 1e-4) if len(alike) > 1 else 0.0
            for t in range(s.turns[k - 1][0] if k else 0, s.turns[k][0]):
                row[t] += step
        result.append(row)
    return result


def gdpo(batch: Batch) -> Advantages:
    """GDPO, arXiv 2601.05242: each component in its group, weighted and summed; over the batch's deviation."""
    sums = []
    for s in batch.samples:
        total = 0.0
        for number, (value, weight) in enumerate(s.parts):
            values = [other.parts[number][0] for other in batch.mates(s)]
            total += weight * (value - mean(values)) / (deviation(values) + 1e-4)
        sums.append(total)
    spread = math.sqrt(mean([(one - mean(sums)) ** 2 for one in sums]))
    return [[one / (spread + 1e-4)] * len(s) for one, s in zip(sums, batch.samples, strict=True)]


def maxrl(batch: Batch) -> Advantages:
    """MaxRL, arXiv 2602.02710: the reward minus the group's mean, over that mean."""
    means = [mean([other.reward for other in batch.mates(s)]) for s in batch.samples]
    return [[(s.reward - middle) / middle] * len(s) for s, middle in zip(batch.samples, means, strict=True)]


def pass_at_k(batch: Batch, k: int = 4) -> Advantages:
    """Pass@k training, arXiv 2508.10751, over every subset of k samples, one by one."""
    result = []
    for s in batch.samples:
        subsets = list(combinations(batch.mates(s), k))
        best = [max(one.reward for one in subset) for subset in subsets]
        own = [reward for reward, subset in zip(best, subsets, strict=True) if any(one is s for one in subset)]
        spread = math.sqrt(mean([(reward - mean(best)) ** 2 for reward in best]))
        result.append([(mean(own) - mean(best)) / (spread + 1e-4)] * len(s))
    return result


def covariances(batch: Batch) -> list[tuple[float, int, int]]:
    """(covariance, sample, token), the highest first (arXiv 2505.22617)."""
    tokens = [
        (n, t, a, s.old[t])
        for n, (s, row) in enumerate(zip(batch.samples, grpo(batch), strict=True))
        for t, a in enumerate(row)
    ]
    advantage, logprob = mean([a for *_, a, _ in tokens]), mean([own for *_, own in tokens])
    return sorted((((own - logprob) * (a - advantage), n, t) for n, t, a, own in tokens), reverse=True)


def clip_cov(batch: Batch) -> Advantages:
    """Clip-Cov: one token of these few has no gradient, the first between 1 and 5."""
    rows = grpo(batch)
    for _, n, t in [one for one in covariances(batch) if 1.0 < one[0] < 5.0][:1]:
        rows[n] = [0.0 if place == t else a for place, a in enumerate(rows[n])]
    return rows


def kl_cov(batch: Batch) -> list[list[float]]:
    """KL-Cov: the penalty of each token, 1 at the first."""
    ((_, sample, token), *_) = covariances(batch)
    return [[float((n, t) == (sample, token)) for t in range(len(s))] for n, s in enumerate(batch.samples)]


def rloo(batch: Batch) -> Advantages:
    """RLOO, arXiv 2402.14740, eq. 6, on returns with a KL term of 0.05."""
    result = []
    for s in batch.samples:
        others = [sum(token_rewards(other, 0.05)) for other in batch.mates(s) if other is not s]
        result.append([sum(token_rewards(s, 0.05)) - mean(others)] * len(s))
    return result


def otb(batch: Batch) -> Advantages:
    """OTB, arXiv 2602.07078: the group's rewards weighted by each sample's sum of squared norms up to the token."""

    def energy(s: Sample, t: int) -> float:
        return sum(1.0 - 2.0 * math.exp(s.old[j]) + s.squares[j] for j in range(t + 1))

    def baseline(s: Sample, t: int) -> float:
        there = [mate for mate in batch.mates(s) if len(mate) > t]
        total = sum(energy(mate, t) for mate in there) + 1e-8
        return sum(energy(mate, t) * mate.reward for mate in there) / total if len(there) > 1 else 0.0

    return [[s.reward - baseline(s, t) for t in range(len(s))] for s in batch.samples]


def remax(batch: Batch) -> Advantages:
    """ReMax, arXiv 2310.10505, eq. 5, and each token's own KL term of 0.05."""
    return [
        [s.reward - s.greedy - 0.05 * (old - ref) for old, ref in zip(s.old, s.ref, strict=True)] for s in batch.samples
    ]


def reinforce_pp(batch: Batch) -> Advantages:
    """REINFORCE++, arXiv 2501.03262: returns with a KL term of 0.01, whitened over the batch."""
    return whitened([to_go(token_rewards(s, 0.01)) for s in batch.samples])


def reinforce_pp_baseline(batch: Batch) -> Advantages:
    """Its baseline variant: the reward minus the group's mean, whitened over the batch."""
    return whitened(dr_grpo(batch))


def dcpo(batch: Batch) -> Advantages:
    """DCPO, arXiv 2509.02333, sec. 3.2, at the second visit of every prompt."""
    result = []
    for s in batch.samples:
        now = [other.reward for other in batch.mates(s)]
        total = [other.reward for other in batch.earlier if other.prompt == s.prompt] + now
        fresh, old = ((s.reward - mean(seen)) / (deviation(seen) + 1e-4) for seen in (now, total))
        nearer = min((0.5 * fresh + 0.5 * old, 0.5 * old + 0.5 * fresh), key=abs)
        result.append([nearer] * len(s))
    return result


def raft(batch: Batch) -> Advantages:
    """RAFT, arXiv 2304.06767: 1 for the best of its group, 0 for the others."""
    return [[float(s is max(batch.mates(s), key=lambda o: o.reward))] * len(s) for s in batch.samples]


def online_dpo(batch: Batch) -> Advantages:
    """Online DPO, arXiv 2402.04792: the weight of the pair's gradient for the best, minus it for the worst."""

    def ratio(s: Sample) -> float:
        return sum(old - ref for old, ref in zip(s.old, s.ref, strict=True))

    found = []
    for s in batch.samples:
        mates = batch.mates(s)
        best, worst = max(mates, key=lambda o: o.reward), min(mates, key=lambda o: o.reward)
        weight = len(mates) * 0.1 / (1.0 + math.exp(0.1 * (ratio(best) - ratio(worst))))
        found.append([weight * ((s is best) - (s is worst))] * len(s))
    return found


def xpo(batch: Batch) -> Advantages:
    """XPO, arXiv 2405.21046, alg. 1: the first two of a prompt are the policy's, the last two the reference's."""

    def ratio(s: Sample) -> float:
        return sum(old - ref for old, ref in zip(s.old, s.ref, strict=True))

    found = {id(s): [0.0] * len(s) for s in batch.samples}
    groups = [batch.mates(s) for s in {s.prompt: s for s in batch.samples}.values()]
    pairs = [(mates[n], mates[-2 + n]) for mates in groups for n in range(2)]
    share = len(batch.samples) / len(pairs)
    for own, other in pairs:
        better, worse = (own, other) if own.reward > other.reward else (other, own)
        weight = 0.1 / (1.0 + math.exp(0.1 * (ratio(better) - ratio(worse))))
        found[id(better)] = [share * weight] * len(better)
        found[id(worse)] = [-share * weight] * len(worse)
        found[id(other)] = [a - share * 1e-5 for a in found[id(other)]]
    return [found[id(s)] for s in batch.samples]


def nash_md(batch: Batch) -> Advantages:
    """Nash-MD-PG, arXiv 2312.00886: wins against the others of the group, each as likely as a mixture with an eighth of
    the reference makes it, minus a half and a KL term of 0.05."""
    found = []
    for s in batch.samples:
        others = [o for o in batch.mates(s) if o is not s]
        weights = [math.exp(sum(o.ref) / 8 - sum(o.old) / 8) for o in others]
        won = sum(
            w * (1.0 if s.reward > o.reward else 0.5 if s.reward == o.reward else 0.0)
            for w, o in zip(weights, others, strict=True)
        )
        found.append([won / sum(weights) - 0.5 - 0.05 * (sum(s.old) - sum(s.ref))] * len(s))
    return found


def distill(batch: Batch) -> Advantages:
    """log pi_teacher - log pi_old."""
    return [[ref - old for ref, old in zip(s.ref, s.old, strict=True)] for s in batch.samples]


def nothing(batch: Batch) -> Advantages:
    """No advantage: the loss has another term."""
    return [[0.0] * len(s) for s in batch.samples]


# --- Losses: of one token, given the advantage ---


def weight(sample: Sample, t: int) -> float:
    """Truncated importance weight of the sampler, min(pi_old / pi_rollout, 2)."""
    return min(math.exp(sample.old[t] - sample.rollout[t]), 2.0)


def ratio(sample: Sample, t: int) -> Scalar:
    """pi / pi_old of a token."""
    return torch.exp(sample.new[t] - sample.old[t])


def clip(r: Scalar, advantage: float, low: float, high: float) -> Scalar:
    """-min(r A, clip(r) A) (PPO, arXiv 1707.06347, eq. 7)."""
    bounded = torch.clamp(r, low, high)
    return -torch.minimum(r * advantage, bounded * advantage)


def clipped(low: float, high: float) -> Callable[[Sample, int, float], Scalar]:
    """The clipped ratio of a token."""
    return lambda s, t, a: weight(s, t) * clip(ratio(s, t), a, 1 - low, 1 + high)


def gradient(s: Sample, t: int, advantage: float) -> Scalar:
    """-A r (PPO, eq. 6)."""
    return -weight(s, t) * advantage * ratio(s, t)


def unweighed(s: Sample, t: int, advantage: float) -> Scalar:
    """-A r, without a weight for the sampler."""
    return -advantage * ratio(s, t)


def penalised(s: Sample, t: int, advantage: float) -> Scalar:
    """-A r + KL(old || new) by r - 1 - log r (PPO, eq. 8, beta = 1)."""
    r = ratio(s, t)
    return -weight(s, t) * advantage * r + (r - 1 - torch.log(r))


def with_k2(s: Sample, t: int, advantage: float) -> Scalar:
    """The clipped ratio plus 0.01 (log pi - log pi_ref)^2 / 2."""
    return clipped(0.2, 0.2)(s, t, advantage) + 0.01 * (s.new[t] - s.ref[t]) ** 2 / 2


def mean_log_ratio(s: Sample) -> Scalar:
    """Mean over the response's tokens of log pi - log pi_old (GSPO, arXiv 2507.18071, eq. 7)."""
    return sum(((s.new[t] - s.old[t]) for t in range(len(s))), torch.zeros((), dtype=torch.double)) / len(s)


def gspo(s: Sample, t: int, advantage: float) -> Scalar:
    """GSPO, eq. 5."""
    return weight(s, t) * clip(torch.exp(mean_log_ratio(s)), advantage, 1 - 3e-4, 1 + 4e-4)


def gspo_token(s: Sample, t: int, advantage: float) -> Scalar:
    """GSPO, eq. 13: sg[sequence ratio] pi / sg[pi]."""
    own = torch.exp(s.new[t])
    return weight(s, t) * clip(
        torch.exp(mean_log_ratio(s)).detach() * own / own.detach(), advantage, 1 - 3e-4, 1 + 4e-4
    )


def gmpo(s: Sample, t: int, advantage: float) -> Scalar:
    """GMPO, arXiv 2507.20673: the product of the clipped ratios to the power 1 / |o|."""
    product = torch.ones((), dtype=torch.double)
    for k in range(len(s)):
        r = ratio(s, k)
        product = product * (torch.clamp(r, max=math.exp(0.4)) if advantage > 0 else torch.clamp(r, min=math.exp(-0.4)))
    return -weight(s, t) * advantage * product ** (1.0 / len(s))


def dppo(bound: float, divergence: Callable[[float, float], float]) -> Callable[[Sample, int, float], Scalar]:
    """DPPO, arXiv 2602.04879, eq. 12: -M r A, M = 0 beyond the bound in the direction of the advantage."""

    def token(s: Sample, t: int, advantage: float) -> Scalar:
        p, q = math.exp(float(s.new[t].detach())), math.exp(s.rollout[t])
        left = divergence(p, q) > bound and (p - q) * advantage > 0
        return 0.0 * s.new[t] if left else -weight(s, t) * advantage * ratio(s, t)

    return token


def binary_kl(p: float, q: float) -> float:
    """KL of two coins (eq. 14)."""
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def trusted(s: Sample, t: int, advantage: float) -> Scalar:
    """FlashREINFORCE: -A pi / pi_rollout, nothing in a sample whose mean divergence from the sampler is above 3e-3."""
    coins = [(math.exp(float(p.detach())), math.exp(q)) for p, q in zip(s.new, s.rollout, strict=True)]
    far = mean([binary_kl(p, q) for p, q in coins]) > 3e-3
    return 0.0 * s.new[t] if far else -advantage * torch.exp(s.new[t] - s.rollout[t])


def sapo(s: Sample, t: int, advantage: float) -> Scalar:
    """SAPO, arXiv 2511.20347: 4 / tau over 1 + exp(-tau (r - 1))."""
    tau = 1.0 if advantage > 0 else 1.05
    return -weight(s, t) * advantage * 4.0 / tau / (1.0 + torch.exp(-tau * (ratio(s, t) - 1.0)))


def dcpo_loss(s: Sample, t: int, advantage: float) -> Scalar:
    """DCPO, arXiv 2509.02333, eq. 7, with a cap of 10 on the ratio and on the loss of negative advantages."""
    q = math.exp(s.old[t])
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / q, 0.0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / q), 10.0)
    loss = clip(ratio(s, t), advantage, low, high)
    return weight(s, t) * (torch.clamp(loss, max=-10.0 * advantage) if advantage < 0 else loss)


def cispo(s: Sample, t: int, advantage: float) -> Scalar:
    """CISPO, arXiv 2506.13585, eq. 4: -sg[min(r, 5)] A log pi."""
    return -weight(s, t) * torch.clamp(ratio(s, t), max=5.0).detach() * advantage * s.new[t]


def score_centering(s: Sample, t: int, advantage: float) -> Scalar:
    """Score centering, arXiv 2609.20807: minus the mean over the sampler's tokens; in the tail q = rho p."""
    new, rollout = s.others[t]
    p, q = [math.exp(float(x.detach())) for x in new], [math.exp(x) for x in rollout]
    rho = (1 - sum(q)) / (1 - sum(p))
    tail = rho * min(1 / rho, 2.0)
    mean_score = sum((b * min(a / b, 2.0) - tail * a) * x for a, b, x in zip(p, q, new, strict=True))
    own = min(math.exp(float(s.new[t].detach()) - s.rollout[t]), 2.0)
    return -advantage * (own * s.new[t] - mean_score)


def likelihood(s: Sample, t: int, advantage: float) -> Scalar:
    """Supervised fine-tuning on the samples that were chosen."""
    return -advantage * s.new[t]


def from_teacher(s: Sample, t: int, advantage: float) -> Scalar:
    """KL(teacher || pi) of a choice between the sampled token and all others (GKD, arXiv 2306.13649)."""
    p, q = torch.exp(s.new[t]), math.exp(s.ref[t])
    return q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))


# --- Reductions: of all tokens' losses ---


def token_mean(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """Every token counts the same."""
    return torch.stack([x for row in rows for x in row]).sum() / sum(map(len, rows))


def sequence_mean(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """Every response counts the same."""
    return torch.stack([torch.stack(list(row)).sum() / len(row) for row in rows]).sum() / len(rows)


def sequence_sum(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """The mean over responses of the sum over their tokens."""
    return torch.stack([x for row in rows for x in row]).sum() / len(rows)


def constant(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """Dr. GRPO: the sum over (responses times the longest possible)."""
    return torch.stack([x for row in rows for x in row]).sum() / (len(rows) * batch.max_tokens)


def only_token_mean(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """DCPO, sec. 3.3: the sum of the responses' means."""
    return torch.stack([torch.stack(list(row)).sum() / len(row) for row in rows]).sum()


def mean_of_chosen(rows: Sequence[Sequence[Scalar]], batch: Batch) -> Scalar:
    """RAFT: the mean over groups of the mean over the chosen response's tokens."""
    chosen = [row for row, a in zip(rows, raft(batch), strict=True) if a[0]]
    return torch.stack([torch.stack(list(row)).sum() / len(row) for row in chosen]).sum() / len(chosen)


@dataclass(frozen=True)
class Loop:
    """One algorithm."""

    advantages: Callable[[Batch], Advantages]
    token: Callable[[Sample, int, float], Scalar]
    reduce: Callable[[Sequence[Sequence[Scalar]], Batch], Scalar]
    penalties: Callable[[Batch], list[list[float]]] | None = None
    """Of |log pi - log pi_old|."""

    def loss(self, batch: Batch) -> Scalar:
        """The loss of an update on the batch after earlier ones."""
        rows = zip(batch.samples, self.advantages(batch), strict=True)
        losses = [[self.token(s, t, a) for t, a in enumerate(own)] for s, own in rows]
        for n, row in enumerate(self.penalties(batch) if self.penalties else ()):
            s = batch.samples[n]
            losses[n] = [
                x + p * weight(s, t) * abs(s.new[t] - s.old[t])
                for t, (x, p) in enumerate(zip(losses[n], row, strict=True))
            ]
        return self.reduce(losses, batch)


PPO_CLIP = clipped(0.2, 0.2)
LOOPS = {
    "reinforce": Loop(reinforce, gradient, token_mean),
    "flash_reinforce": Loop(flash_reinforce, trusted, sequence_mean),
    "rae": Loop(rae, gradient, token_mean),
    "actor_critic": Loop(actor_critic, gradient, token_mean),
    "actor_critic_gae": Loop(actor_critic_gae, gradient, token_mean),
    "ppo": Loop(ppo, PPO_CLIP, token_mean),
    "ppo_penalty": Loop(ppo, penalised, token_mean),
    "ppo_kl_limit": Loop(ppo, gradient, token_mean),
    "trpo": Loop(ppo, gradient, token_mean),
    "ppo_max": Loop(ppo_max, PPO_CLIP, token_mean),
    "grpo": Loop(grpo, PPO_CLIP, sequence_mean),
    "dr_grpo": Loop(dr_grpo, PPO_CLIP, constant),
    "rloo": Loop(rloo, PPO_CLIP, token_mean),
    "otb": Loop(otb, PPO_CLIP, token_mean),
    "remax": Loop(remax, gradient, token_mean),
    "reinforce_pp": Loop(reinforce_pp, PPO_CLIP, token_mean),
    "reinforce_pp_baseline": Loop(reinforce_pp_baseline, with_k2, token_mean),
    "gigpo": Loop(gigpo, PPO_CLIP, sequence_mean),
    "gdpo": Loop(gdpo, PPO_CLIP, sequence_mean),
    "dapo": Loop(grpo, clipped(0.2, 0.28), token_mean),
    "gspo": Loop(grpo, gspo, sequence_mean),
    "gspo_token": Loop(grpo, gspo_token, sequence_mean),
    "gmpo": Loop(grpo, gmpo, sequence_mean),
    "dppo_tv": Loop(dr_grpo, dppo(0.15, lambda p, q: abs(p - q)), constant),
    "dppo_kl": Loop(dr_grpo, dppo(0.05, binary_kl), constant),
    "maxrl": Loop(maxrl, PPO_CLIP, token_mean),
    "pass_at_k": Loop(pass_at_k, PPO_CLIP, token_mean),
    "clip_cov": Loop(clip_cov, PPO_CLIP, token_mean),
    "kl_cov": Loop(grpo, gradient, token_mean, kl_cov),
    "sapo": Loop(grpo, sapo, sequence_mean),
    "dcpo": Loop(dcpo, dcpo_loss, only_token_mean),
    "cispo": Loop(grpo, cispo, token_mean),
    "score_centering": Loop(dr_grpo, score_centering, token_mean),
    "raft": Loop(raft, likelihood, mean_of_chosen),
    "online_dpo": Loop(online_dpo, unweighed, sequence_sum),
    "xpo": Loop(xpo, likelihood, sequence_sum),
    "nash_md": Loop(nash_md, gradient, sequence_sum),
    "distill": Loop(distill, PPO_CLIP, token_mean),
    "gkd": Loop(nothing, from_teacher, token_mean),
}
"""By the name of the row."""
