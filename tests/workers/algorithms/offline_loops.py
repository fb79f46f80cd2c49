"""The offline losses as loops over examples, answers and tokens, in float64 and straight from the papers.

Nothing here is shared with the product: scalars, `exp` and `log` as the formulas have them, and autograd for gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Scalar = torch.Tensor
ZERO = torch.zeros((), dtype=torch.double)


@dataclass(frozen=True)
class Answer:
    """One answer; the scalars are float64 and may require gradients."""

    ids: Sequence[int]
    score: float
    logprobs: Sequence[Scalar] = ()
    """Of every token under the policy."""
    ref_logprobs: Sequence[Scalar] = ()
    rewards: Sequence[Scalar] = ()
    """Of the reward model at every token; the last one is the answer's."""


@dataclass(frozen=True)
class Example:
    """A prompt's answers, the better ones first; what the data say besides."""

    answers: Sequence[Answer]
    margin: float = 0.0
    desirable: bool = True


def sigmoid(x: Scalar) -> Scalar:
    """The logistic function."""
    return 1.0 / (1.0 + torch.exp(-x))


def add(values: Sequence[Scalar]) -> Scalar:
    """Sum, one after the other."""
    total = ZERO
    for value in values:
        total = total + value
    return total


def mean(values: Sequence[Scalar]) -> Scalar:
    """Arithmetic mean; 0 of nothing."""
    return add(values) / len(values) if values else ZERO


def best(example: Example) -> list[Answer]:
    """The answers that no other one beats."""
    return [a for a in example.answers if all(b.score <= a.score for b in example.answers)]


def likelihood(examples: Sequence[Example]) -> Scalar:
    """Mean negative log-prob of the tokens of the best answers."""
    return -mean([logprob for example in examples for answer in best(example) for logprob in answer.logprobs])


def kd(examples: Sequence[Example]) -> Scalar:
    """Mean of half the squared log-ratio to the teacher of every token."""
    answers = [answer for example in examples for answer in example.answers]
    pairs = (pair for answer in answers for pair in zip(answer.logprobs, answer.ref_logprobs, strict=True))
    return mean([(own - its) ** 2 / 2 for own, its in pairs])


# Preferences of values, one for each answer


def cross_entropy(lead: Scalar, smoothing: float) -> Scalar:
    """-(1 - e) log p - e log(1 - p), p = sigmoid(lead)."""
    p = sigmoid(lead)
    return -(1.0 - smoothing) * torch.log(p) - smoothing * torch.log(1.0 - p)


def fidelity(lead: Scalar, smoothing: float) -> Scalar:
    """1 - sqrt(P* P) - sqrt((1 - P*) (1 - P)), with P* = 1 - e and P = sigmoid(lead)."""
    p = sigmoid(lead)
    swapped = torch.sqrt(smoothing * (1.0 - p)) if smoothing else ZERO
    return 1.0 - torch.sqrt((1.0 - smoothing) * p) - swapped


def plackett_luce(values: Sequence[Scalar], scores: Sequence[float], sign: float = 1.0) -> Scalar:
    """-sum_i log of the chance that i is chosen among itself and the answers with a score below its own."""
    losses = []
    for value, score in zip(values, scores, strict=True):
        worse = [torch.exp(v) for v, s in zip(values, scores, strict=True) if sign * s < sign * score]
        losses.append(-torch.log(torch.exp(value) / (torch.exp(value) + add(worse))))
    return add(losses)


def pairwise_fidelity(values: Sequence[Scalar], scores: Sequence[float], smoothing: float) -> Scalar:
    """Mean over pairs with different scores."""
    pairs = [
        fidelity(v - w, smoothing)
        for v, s in zip(values, scores, strict=True)
        for w, r in zip(values, scores, strict=True)
        if s > r
    ]
    return mean(pairs)


def ranking(values: Sequence[Scalar], scores: Sequence[float], preference: str, smoothing: float) -> Scalar:
    """Loss of an example's values; with chance `smoothing` the logistic one takes the ranking for reversed."""
    if preference == "fidelity":
        return pairwise_fidelity(values, scores, smoothing)
    loss = plackett_luce(values, scores)
    return (1.0 - smoothing) * loss + smoothing * plackett_luce(values, scores, sign=-1.0) if smoothing else loss


# Algorithms: the loss of a whole update


def sft(examples: Sequence[Example]) -> Scalar:
    """Mean negative log-prob over all tokens."""
    return likelihood(examples)


@dataclass(frozen=True)
class RewardOptions:
    """Settings of the reward model's loss."""

    preference: str = "logistic"
    smoothing: float = 0.0
    by_token: bool = False
    center_coef: float = 0.0
    lm_coef: float = 0.0


def reward_model(examples: Sequence[Example], options: RewardOptions) -> Scalar:
    """Preference of the scores, and the weighted other terms."""
    losses = []
    for example in examples:
        last = [answer.rewards[-1] for answer in example.answers]
        if options.by_token:
            losses.append(reward_by_token(example, options))
        elif example.margin:
            loss = fidelity if options.preference == "fidelity" else cross_entropy
            losses.append(loss(last[0] - last[1] - example.margin, options.smoothing))
        else:
            scores = [answer.score for answer in example.answers]
            losses.append(ranking(last, scores, options.preference, options.smoothing))
        losses[-1] = losses[-1] + options.center_coef * (2.0 * mean(last)) ** 2
    return mean(losses) + options.lm_coef * likelihood(examples)


def reward_by_token(example: Example, options: RewardOptions) -> Scalar:
    """DeepSpeed-Chat: the mean over the places from the first difference to the end of the longer answer."""
    chosen, rejected = example.answers
    loss = fidelity if options.preference == "fidelity" else cross_entropy
    losses: list[Scalar] = []
    for place in range(max(len(chosen.ids), len(rejected.ids))):
        if chosen.ids[: place + 1] != rejected.ids[: place + 1]:
            above = chosen.rewards[min(place, len(chosen.rewards) - 1)]
            below = rejected.rewards[min(place, len(rejected.rewards) - 1)]
            losses.append(loss(above - below - example.margin, options.smoothing))
    return mean(losses)


def log_ratio(answer: Answer) -> Scalar:
    """Log of the chance of the answer under the policy over that under the reference."""
    return add(answer.logprobs) - add(answer.ref_logprobs)


def dpo(examples: Sequence[Example], beta: float, preference: str = "logistic", smoothing: float = 0.0) -> Scalar:
    """Preference of the implicit rewards."""
    losses = []
    for example in examples:
        rewards = [beta * log_ratio(answer) for answer in example.answers]
        losses.append(ranking(rewards, [answer.score for answer in example.answers], preference, smoothing))
    return mean(losses)


def ipo(examples: Sequence[Example], beta: float) -> Scalar:
    """Squared distance of the difference of mean log-ratios from 1 / (2 beta)."""
    losses = []
    for example in examples:
        chosen, rejected = (log_ratio(answer) / len(answer.ids) for answer in example.answers)
        losses.append((chosen - rejected - 1.0 / (2.0 * beta)) ** 2)
    return mean(losses)


def orpo(examples: Sequence[Example], beta: float) -> Scalar:
    """Likelihood of the chosen answers plus beta times the loss of the odds ratio."""
    losses = []
    for example in examples:
        chosen, rejected = (
            torch.exp(logprob) / -torch.expm1(logprob)  # p / (1 - p)
            for logprob in (mean(answer.logprobs) for answer in example.answers)
        )
        ratio = chosen / rejected
        losses.append(-torch.log(sigmoid(torch.log(ratio))))
    return likelihood(examples) + beta * mean(losses)


def kto(examples: Sequence[Example], mismatched: Sequence[Answer], beta: float, weights: tuple[float, float]) -> Scalar:
    """Good answers above the reference point and bad ones below it; the point has no gradient."""
    point = float(mean([log_ratio(answer) for answer in mismatched]).detach())
    losses = []
    for example in examples:
        above = beta * (log_ratio(example.answers[0]) - max(0.0, point))
        losses.append(
            weights[0] * (1.0 - sigmoid(above)) if example.desirable else weights[1] * (1.0 - sigmoid(-above))
        )
    return mean(losses)


def rrhf(examples: Sequence[Example], lm_coef: float) -> Scalar:
    """Every worse answer that is likelier by its mean log-prob, and the likelihood of the best."""
    losses = []
    for example in examples:
        worse_ahead = [
            torch.clamp(mean(worse.logprobs) - mean(better.logprobs), min=0.0)
            for better in example.answers
            for worse in example.answers
            if worse.score < better.score
        ]
        losses.append(add(worse_ahead))
    return mean(losses) + lm_coef * likelihood(examples)


# Steps


def step_labels(answer: Answer) -> dict[int, float]:
    """Label of each step by the place of the token that ends it: here every second token and the last one."""
    ends = [place for place in range(len(answer.ids)) if place % 2 or place == len(answer.ids) - 1]
    return {place: (0.0, 1.0, 0.25, 0.5)[answer.ids[place] % 4] for place in ends}


def process(examples: Sequence[Example]) -> Scalar:
    """Mean over the steps of all answers of -y log p - (1 - y) log(1 - p), p = sigmoid(score at the step's end)."""
    losses = []
    for answer in (answer for example in examples for answer in example.answers):
        for place, label in step_labels(answer).items():
            p = sigmoid(answer.rewards[place])
            losses.append(-label * torch.log(p) - (1.0 - label) * torch.log(1.0 - p))
    return mean(losses)
