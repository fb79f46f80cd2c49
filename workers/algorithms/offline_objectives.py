"""From a scored micro-batch to its share of the update's loss: one pure function per objective.

A loss is a sum over examples (or tokens) divided by the totals of the whole update, so that adding up micro-batches and
ranks gives the update's loss however it is split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.config_offline import (
    DpoLossConfig,
    IpoLossConfig,
    KtoLossConfig,
    OrpoLossConfig,
    RewardLossConfig,
    RrhfLossConfig,
    SftLossConfig,
)
from workers.preference_losses import (
    Groups,
    accuracy,
    bradley_terry,
    calibration,
    dpo,
    ipo,
    kto,
    odds_ratio,
    plackett_luce,
    rrhf_ranking,
    sequence_logprobs,
)

Entries = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Totals:
    """Of the whole update, over all ranks."""

    examples: int
    tokens: int
    """Of the responses whose likelihood counts."""


@dataclass(frozen=True)
class Scored:
    """A micro-batch and what the models say of it. T: response tokens, B: rows."""

    groups: Groups
    sequence: torch.Tensor
    """int64 [T]."""
    loss_mask: torch.Tensor
    """bool [T]."""
    score: torch.Tensor
    """float [B]: what the data say of each response."""
    margin: torch.Tensor
    """float [B]: of its pair."""
    desirable: torch.Tensor
    """bool [B]."""
    logprobs: torch.Tensor | None = None
    """float [T], of the policy being trained."""
    ref_logprobs: torch.Tensor | None = None
    """float [T]."""
    rewards: torch.Tensor | None = None
    """float [B], of the reward model being trained."""
    reference_point: float = 0.0
    """z0 of KTO."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.groups.group)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, loss tokens) of every row, [B]."""
        if self.logprobs is None:
            raise ValueError("this objective needs log-probs")
        return sequence_logprobs(self.logprobs, self.loss_mask, self.sequence, self.rows)

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
    """A micro-batch's share of the loss, with what there is to report of it."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    terms: Mapping[str, torch.Tensor]
    """The loss and its parts: they add up over micro-batches and ranks."""
    tally: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """name -> (total, weight): they add up, and divided they are means."""

    def statistics(self) -> ObjectiveOutput:
        """The same without the graph of the loss, which may hold on to activations long after its backward pass."""
        return replace(self, loss=self.loss.detach())


def sft(scored: Scored, config: SftLossConfig, totals: Totals) -> ObjectiveOutput:
    """Mean negative log-likelihood over all response tokens of the update."""
    sums, counts = scored.sums()
    return _output({"nll": _likelihood(scored, totals)}, {"token_logprob": (sums.sum(), counts.sum())})


def reward(scored: Scored, config: RewardLossConfig, totals: Totals) -> ObjectiveOutput:
    """Bradley-Terry where every example is a pair, with its margin; Plackett-Luce of ranked answers; and, weighted by
    `lm_coef`, the best answer's likelihood, which keeps the backbone a language model (arXiv 2406.10216, eq. 9)."""
    if scored.rewards is None:
        raise ValueError("a reward model's loss needs its scores")
    grid, present = scored.groups.grid(scored.rewards), scored.groups.present()
    if present.shape[1] == 2:
        losses = bradley_terry(grid[:, 0], grid[:, 1], scored.groups.grid(scored.margin)[:, 0])
    else:
        losses = plackett_luce(grid, present)
    terms = {"preference_loss": losses.sum() / max(totals.examples, 1)}
    if config.lm_coef:
        terms["lm_loss"] = config.lm_coef * _likelihood(scored, totals)
    ahead = torch.ones(present.shape[1], present.shape[1], dtype=torch.bool, device=grid.device).triu(1)
    margins = _differences(grid)[ahead & _both(present)]
    tally = _means({"accuracy": accuracy(margins), "margin": margins, "score": scored.rewards})
    return _output(terms, tally | calibration(margins.detach()))


def preference_dpo(scored: Scored, config: DpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """DPO on pairs."""
    ratios = scored.groups.grid(scored.ratios(per_token=False))
    losses = dpo(ratios[:, 0], ratios[:, 1], config.beta, config.label_smoothing)
    return _preference(losses, config.beta * ratios, totals)


def preference_ipo(scored: Scored, config: IpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """IPO on pairs."""
    ratios = scored.groups.grid(scored.ratios(per_token=True))
    return _preference(ipo(ratios[:, 0], ratios[:, 1], config.beta), config.beta * ratios, totals)


def preference_orpo(scored: Scored, config: OrpoLossConfig, totals: Totals) -> ObjectiveOutput:
    """ORPO on pairs: the chosen answer's likelihood and, weighted, the odds ratio. arXiv 2403.07691, eq. 6."""
    means = scored.groups.grid(scored.means())
    losses = config.beta * odds_ratio(means[:, 0], means[:, 1])
    return _preference(losses, config.beta * means, totals, nll=_likelihood(scored, totals))


def labelled_kto(scored: Scored, config: KtoLossConfig, totals: Totals) -> ObjectiveOutput:
    """KTO on single labelled answers."""
    ratios = scored.ratios(per_token=False)
    desirable, point = scored.desirable, torch.tensor(scored.reference_point, device=ratios.device)
    weights = (config.desirable_weight, config.undesirable_weight)
    losses = kto(ratios, desirable, point, config.beta, *weights)
    gain = config.beta * ratios
    right = torch.where(desirable, accuracy(gain - config.beta * point), accuracy(config.beta * point - gain))
    tally = _means({"accuracy": right, "reward_desirable": gain[desirable], "reward_undesirable": gain[~desirable]})
    tally["reference_point"] = (point * len(ratios), torch.tensor(float(len(ratios))))
    return _output({"preference_loss": losses.sum() / max(totals.examples, 1)}, tally)


def ranked_rrhf(scored: Scored, config: RrhfLossConfig, totals: Totals) -> ObjectiveOutput:
    """RRHF on scored answers: ranking, and the likelihood of the best one (arXiv 2304.05302, eq. 5)."""
    groups = scored.groups
    means, scores, present = groups.grid(scored.means()), groups.grid(scored.score), groups.present()
    terms = {"preference_loss": rrhf_ranking(means, scores, present).sum() / max(totals.examples, 1)}
    if config.lm_coef:
        terms["lm_loss"] = config.lm_coef * _likelihood(scored, totals)
    margins = _differences(means)[(_differences(scores) > 0) & _both(present)]
    return _output(terms, _means({"accuracy": accuracy(margins), "margin": margins}))


Objective = Callable[[Scored, Any, Totals], ObjectiveOutput]

OBJECTIVES: Mapping[type, Objective] = {
    SftLossConfig: sft,
    RewardLossConfig: reward,
    DpoLossConfig: preference_dpo,
    IpoLossConfig: preference_ipo,
    OrpoLossConfig: preference_orpo,
    KtoLossConfig: labelled_kto,
    RrhfLossConfig: ranked_rrhf,
}
"""The objective of each loss configuration."""


def _likelihood(scored: Scored, totals: Totals) -> torch.Tensor:
    """Negative log-likelihood of every example's first response, a mean over the update's tokens of such responses."""
    sums, _ = scored.sums()
    return -sums[scored.groups.member == 0].sum() / max(totals.tokens, 1)


def _preference(losses: torch.Tensor, rewards: torch.Tensor, totals: Totals, **terms: torch.Tensor) -> ObjectiveOutput:
    """The output for pairs: losses [G], implicit rewards [G, 2]."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margins = chosen - rejected
    shown = {"accuracy": accuracy(margins), "margin": margins, "reward_chosen": chosen, "reward_rejected": rejected}
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


def _differences(grid: torch.Tensor) -> torch.Tensor:
    """[G, K, K]: response i's value less response j's."""
    return grid[:, :, None] - grid[:, None, :]


def _both(present: torch.Tensor) -> torch.Tensor:
    """bool [G, K, K]: where both responses are there."""
    return present[:, :, None] & present[:, None, :]
