"""Offline objectives: from a scored micro-batch to its share of the update's loss, one pure function each.

A loss is a sum over examples (or tokens) divided by the totals of the whole update, so that the sum over micro-batches
and ranks is the update's loss however it is split. They are computed in float64: their inputs have one number per
token or response, and cost nothing next to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from troupe.workers.algorithms.policy_loss import kl_penalty
from troupe.workers.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    Groups,
    accuracy,
    align,
    calibration,
    centering,
    differences,
    diverged,
    ipo,
    kto,
    odds_ratio,
    rrhf_ranking,
    sequence_logprobs,
)
from troupe.workers.contract.offline_config import (
    DpoLossConfig,
    IpoLossConfig,
    KdLossConfig,
    KtoLossConfig,
    OrpoLossConfig,
    ProcessLossConfig,
    RewardLevel,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)

Entries = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Totals:
    """Totals of the whole update over all ranks."""

    examples: int
    tokens: int
    """Tokens of the responses whose likelihood the loss uses."""


@dataclass(frozen=True)
class Scored:
    """A micro-batch with the models' outputs. T: response tokens, B: rows."""

    groups: Groups
    sequence: torch.Tensor
    """int64 [T]."""
    loss_mask: torch.Tensor
    """bool [T]."""
    score: torch.Tensor
    """float [B]: score of each response in the data; of two responses to a prompt the higher one is better, and equal
    ones are tied."""
    margin: torch.Tensor
    """float [B]: margin of the row's pair in the data."""
    desirable: torch.Tensor
    """bool [B]."""
    targets: torch.Tensor | None = None
    """int64 [T]: the response tokens."""
    logprobs: torch.Tensor | None = None
    """float [T], from the policy being trained."""
    ref_logprobs: torch.Tensor | None = None
    """float [T]."""
    divergences: torch.Tensor | None = None
    """float [T]: divergence from a teacher (`distillation.divergence`), with gradient."""
    rewards: torch.Tensor | None = None
    """float [B], from the reward model being trained: its scores at the last tokens."""
    token_rewards: torch.Tensor | None = None
    """float [T], from the reward model being trained: its scores at the response tokens; of a process reward model
    [N], at the ends of steps."""
    step_labels: torch.Tensor | None = None
    """float [N]: whether each step is right, from 0 to 1."""
    reference_point: float = 0.0
    """z0 of KTO."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.groups.group)

    @property
    def best(self) -> torch.Tensor:
        """bool [B]: True for the best responses of every example; several if they are tied."""
        return self.groups.best(self.score)

    @property
    def better(self) -> torch.Tensor:
        """bool [G, K, K]: True where response i is better than response j."""
        return self.groups.better(self.score)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, loss tokens) of every row, [B]."""
        if self.logprobs is None:
            raise ValueError("this objective needs log-probs")
        return sequence_logprobs(self.logprobs, self.loss_mask, self.sequence, self.rows)

    def scores(self) -> torch.Tensor:
        """The reward model's scores at the last tokens, float64 [B]."""
        if self.rewards is None:
            raise ValueError("a reward model's loss needs its scores")
        return self.rewards.double()

    def means(self) -> torch.Tensor:
        """Mean log-prob of every row's loss tokens, [B]."""
        sums, counts = self.sums()
        return sums / counts.clamp(min=1.0)

    def ratios(self, per_token: bool) -> torch.Tensor:
        """Log-ratio to the reference of every row, [B]."""
        if self.ref_logprobs is None:
            raise ValueError("this objective needs the reference's log-probs")
        sums, counts = self.sums()
        reference, _ = sequence_logprobs(self.ref_logprobs, self.loss_mask, self.sequence, self.rows)
        return (sums - reference) / (counts.clamp(min=1.0) if per_token else 1.0)


@dataclass(frozen=True)
class ObjectiveOutput:
    """A micro-batch's share of the loss, with its metrics."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    terms: Mapping[str, torch.Tensor]
    """The loss and its parts; they add up over micro-batches and ranks."""
    tally: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """name -> (total, weight). Both add up over micro-batches and ranks; their quotient is the mean."""


def sft(scored: Scored, config: SftLossConfig, totals: Totals) -> ObjectiveOutput:
    """Mean negative log-likelihood over all response tokens of the update."""
    sums, counts = scored.sums()
    return _output({"nll": _likelihood(scored, totals)}, {"token_logprob": (sums.sum(), counts.sum())})


def distilled(scored: Scored, config: KdLossConfig, totals: Totals) -> ObjectiveOutput:
    """Mean divergence from the teacher over all response tokens of the update, as `gkd` has it (GKD, arXiv 2306.13649,
    eq. 2).

    Of sampled tokens it is k2 of `policy_loss.kl_penalty`: on samples of the policy its gradient is on average that of
    KL(policy || teacher), and that of `distill` in a batch's first update.
    """
    sums, counts = scored.sums()
    divergences, coef = scored.divergences, config.distill.coef
    if config.compares == "sampled":
        if scored.logprobs is None or scored.ref_logprobs is None:
            raise ValueError("the teacher's log-probs of the sampled tokens are needed")
        divergences, coef = kl_penalty(scored.logprobs.double(), scored.ref_logprobs.double(), "k2"), 1.0
    if divergences is None:
        raise ValueError("the divergence from the teacher is needed")
    total, tokens = torch.where(scored.loss_mask, divergences, 0.0).double().sum(), counts.sum()
    terms = {"distill_loss": coef * total / max(totals.tokens, 1)}
    return _output(terms, {"teacher_divergence": (total, tokens), "token_logprob": (sums.sum(), tokens)})


def reward(scored: Scored, config: RewardLossConfig, totals: Totals) -> ObjectiveOutput:
    """Loss of a reward model: Bradley-Terry with margins on pairs, Plackett-Luce on more than two ranked responses.

    `center_coef` pulls the mean score to 0 (arXiv 2312.09244). `lm_coef` weighs the best response's likelihood, which
    keeps the backbone a language model (arXiv 2406.10216, eq. 9).
    """
    rewards, examples = scored.scores(), max(totals.examples, 1)
    grid = scored.groups.grid(rewards)
    terms = {"preference_loss": _LEVELS[config.level](scored, config).sum() / examples}
    if config.center_coef:
        terms["center_loss"] = config.center_coef * centering(grid, scored.groups.present()).sum() / examples
    if config.lm_coef:
        terms["lm_loss"] = config.lm_coef * _likelihood(scored, totals)
    margins = differences(grid)[scored.better]
    tally = _means({"accuracy": accuracy(margins), "margin": margins, "score": rewards})
    return _output(terms, tally | calibration(margins.detach()))


def _by_sequence(scored: Scored, config: RewardLossConfig) -> torch.Tensor:
    """[G]: the loss of the scores at the last tokens."""
    leads = differences(scored.groups.grid(scored.scores())) - _margin(scored)[:, None, None]
    return PREFERENCE_LOSSES[config.preference](leads, scored.better, config.label_smoothing)


def _by_token(scored: Scored, config: RewardLossConfig) -> torch.Tensor:
    """[G]: the loss of the pair's scores at the same place, averaged from the first differing token to the end of the
    longer response; the shorter one keeps its last score. DeepSpeed-Chat, arXiv 2308.01320."""
    if scored.token_rewards is None or scored.targets is None:
        raise ValueError("a loss by token needs the tokens and their scores")
    rows = scored.groups.grid(torch.arange(scored.rows, device=scored.sequence.device))
    ids = align(scored.targets, scored.sequence, scored.rows)
    rewards = align(scored.token_rewards.double(), scored.sequence, scored.rows).values
    chosen, rejected = (ids.rows(rows[:, member]) for member in (0, 1))
    compared = diverged(chosen, rejected) & scored.better[:, :1, 1]
    leads = rewards[rows[:, 0]] - rewards[rows[:, 1]] - _margin(scored)[:, None]
    # Every place is a separate comparison: the matrices hold its one entry (chosen, rejected).
    loss = PREFERENCE_LOSSES[config.preference]
    losses = loss(leads[..., None, None], compared[..., None, None], config.label_smoothing)
    return losses.sum(1) / compared.sum(1).clamp(min=1)


_LEVELS: Mapping[RewardLevel, Callable[[Scored, RewardLossConfig], torch.Tensor]] = {
    "sequence": _by_sequence,
    "token": _by_token,
}


def _margin(scored: Scored) -> torch.Tensor:
    """float [G]: margin of every example."""
    return scored.groups.grid(scored.margin)[:, 0]


def process(scored: Scored, config: ProcessLossConfig, totals: Totals) -> ObjectiveOutput:
    """Mean cross-entropy of the scores at the ends of steps with their labels (arXiv 2312.08935, eq. 3)."""
    if scored.token_rewards is None or scored.step_labels is None:
        raise ValueError("a process reward model's loss needs the scores and the labels of steps")
    rewards, labels = scored.token_rewards.double(), scored.step_labels
    losses = torch.nn.functional.binary_cross_entropy_with_logits(rewards, labels, reduction="sum")
    decided = labels != 0.5
    margins = (rewards * (2.0 * labels - 1.0).sign())[decided]
    tally = _means({"accuracy": accuracy(margins), "score": rewards})
    return _output({"loss": losses / max(totals.tokens, 1)}, tally | calibration(margins.detach()))


def preference_dpo(scored: Scored, config: DpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """DPO on pairs (arXiv 2305.18290, eq. 7) and rankings (eq. 20)."""
    ratios = scored.ratios(per_token=False)
    leads = config.beta * differences(scored.groups.grid(ratios))
    losses = PREFERENCE_LOSSES[config.preference](leads, scored.better, config.label_smoothing)
    return _preference(losses, scored, config.beta * ratios, totals)


def preference_ipo(scored: Scored, config: IpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """IPO on pairs."""
    ratios = scored.ratios(per_token=True)
    grid = scored.groups.grid(ratios)
    return _preference(ipo(grid[:, 0], grid[:, 1], config.beta), scored, config.beta * ratios, totals)


def preference_orpo(scored: Scored, config: OrpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """ORPO on pairs: the chosen response's likelihood plus the weighted odds ratio (arXiv 2403.07691, eq. 6)."""
    means = scored.means()
    grid = scored.groups.grid(means)
    losses = config.beta * odds_ratio(grid[:, 0], grid[:, 1])
    return _preference(losses, scored, config.beta * means, totals, nll=_likelihood(scored, totals))


def labelled_kto(scored: Scored, config: KtoLossConfig, totals: Totals) -> ObjectiveOutput:
    """KTO on single labelled responses."""
    ratios = scored.ratios(per_token=False)
    desirable, point = scored.desirable, scored.reference_point
    weights = (config.desirable_weight, config.undesirable_weight)
    losses = kto(ratios, desirable, point, config.beta, *weights)
    gain = config.beta * ratios
    right = torch.where(desirable, accuracy(gain - config.beta * point), accuracy(config.beta * point - gain))
    tally = _means({"accuracy": right, "reward_desirable": gain[desirable], "reward_undesirable": gain[~desirable]})
    tally |= _means({"reference_point": torch.full_like(ratios, point)})
    return _output({"preference_loss": losses.sum() / max(totals.examples, 1)}, tally)


def ranked_rrhf(scored: Scored, config: RrhfLossConfig, totals: Totals) -> ObjectiveOutput:
    """RRHF on scored responses: ranking, and the likelihood of the best one (arXiv 2304.05302, eq. 5)."""
    leads, better = differences(scored.groups.grid(scored.means())), scored.better
    terms = {"preference_loss": rrhf_ranking(leads, better).sum() / max(totals.examples, 1)}
    if config.lm_coef:
        terms["lm_loss"] = config.lm_coef * _likelihood(scored, totals)
    margins = leads[better]
    return _output(terms, _means({"accuracy": accuracy(margins), "margin": margins}))


Objective = Callable[[Scored, Any, Totals], ObjectiveOutput]

OBJECTIVES: Mapping[type, Objective] = {
    SftLossConfig: sft,
    KdLossConfig: distilled,
    RewardLossConfig: reward,
    ProcessLossConfig: process,
    DpoLossConfig: preference_dpo,
    IpoLossConfig: preference_ipo,
    OrpoLossConfig: preference_orpo,
    KtoLossConfig: labelled_kto,
    RrhfLossConfig: ranked_rrhf,
}
"""The objective of each loss configuration."""


def _likelihood(scored: Scored, totals: Totals) -> torch.Tensor:
    """Negative log-likelihood of every example's best responses, per token of such responses in the update."""
    sums, _ = scored.sums()
    return -sums[scored.best].sum() / max(totals.tokens, 1)


def _preference(
    losses: torch.Tensor, scored: Scored, rewards: torch.Tensor, totals: Totals, **terms: torch.Tensor
) -> ObjectiveOutput:
    """The output for preferences of a policy: losses [G], implicit rewards [B]."""
    margins = differences(scored.groups.grid(rewards))[scored.better]
    best = scored.best
    shown = {
        "accuracy": accuracy(margins),
        "margin": margins,
        "reward_chosen": rewards[best],
        "reward_rejected": rewards[~best],
    }
    return _output({"preference_loss": losses.sum() / max(totals.examples, 1)} | terms, _means(shown))


def _output(terms: dict[str, torch.Tensor], tally: Entries) -> ObjectiveOutput:
    loss = torch.stack(list(terms.values())).sum()
    return ObjectiveOutput(
        loss=loss,
        terms={name: term.detach().double() for name, term in (terms | {"loss": loss}).items()},
        tally={name: (total.detach().double(), weight.double()) for name, (total, weight) in tally.items()},
    )


def _means(values: Mapping[str, torch.Tensor]) -> Entries:
    return {name: (value.sum(), value.new_tensor(float(value.numel()))) for name, value in values.items()}
