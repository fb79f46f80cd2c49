"""Pure loss functions for training on given examples: likelihood, reward models, preferences.

Per-token tensors are 1-D over the response tokens of one micro-batch, as in `workers.losses`; per-response tensors are
1-D over its B rows; what is compared is laid out as [G, K]: G examples with up to K responses each, best first. Every
function returns one loss per example, and what averages them is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from workers.messages_offline import CALIBRATION_BINS, calibration_bin

_ABSENT = -1e30
"""Score of a response that is not there: finite, so that its gradient is 0 and not NaN."""
_ALMOST_SURE = -1e-6
"""Average log-probs are kept below this where odds are formed: the odds of a certainty are infinite."""


@dataclass(frozen=True)
class Groups:
    """Which example each row of a micro-batch belongs to, and its place in it."""

    group: torch.Tensor
    """int64 [B], from 0 without gaps."""
    member: torch.Tensor
    """int64 [B], from 0 without gaps in every group."""

    @property
    def count(self) -> int:
        """G, the number of examples."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    @property
    def width(self) -> int:
        """K, the most responses an example has; at least 2, so that pairs can always be taken apart."""
        return max(2, int(self.member.max()) + 1) if len(self.member) else 2

    def grid(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[G, K] of per-row values [B]; `fill` where an example has fewer responses."""
        out = values.new_full((self.count, self.width), fill)
        return out.index_put((self.group, self.member), values)

    def present(self) -> torch.Tensor:
        """bool [G, K]: where there is a response."""
        return self.grid(torch.ones_like(self.group)).bool()


def sequence_logprobs(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, sequence: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, counts), float [B]: log-prob of every row's loss tokens, and how many they are.

    What stands at a masked token, NaN included, reaches neither a value nor a gradient.
    """
    kept = torch.where(loss_mask, logprobs, 0.0)
    sums = kept.new_zeros(rows).index_add(0, sequence, kept)
    counts = kept.new_zeros(rows).index_add(0, sequence, loss_mask.to(kept.dtype))
    return sums, counts


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float = 0.0) -> torch.Tensor:
    """[G]: -log sigmoid(chosen - rejected - margin).

    InstructGPT, arXiv 2203.02155, eq. 1 (K = 2); the margin is Llama 2's, arXiv 2307.09288, eq. 2.
    """
    return -F.logsigmoid(chosen - rejected - margin)


def plackett_luce(scores: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[G] of scores and presence [G, K]: -sum_i log(exp(s_i) / sum_{j >= i} exp(s_j)) over responses ranked best first.

    Plackett 1975, Luce 1959; as a preference model: DPO, arXiv 2305.18290, eq. 18. Two responses give Bradley-Terry.
    """
    scores = torch.where(present, scores, _ABSENT)
    rest = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return torch.where(present, rest - scores, 0.0).sum(-1)


def dpo(
    chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float, label_smoothing: float = 0.0
) -> torch.Tensor:
    """[G] of log-ratios to the reference: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), h their difference.

    DPO, arXiv 2305.18290, eq. 7; label smoothing e: Mitchell 2023, "A note on DPO with noisy preferences", eq. 3.
    """
    logits = beta * (chosen_ratio - rejected_ratio)
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo(chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float) -> torch.Tensor:
    """[G] of log-ratios to the reference per token: (h - 1 / (2 beta))^2, h their difference.

    IPO, arXiv 2310.12036, eq. 17, with tau = beta; averaged over tokens as its authors do in their experiments.
    """
    return (chosen_ratio - rejected_ratio - 1.0 / (2.0 * beta)).square()


def log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(mean log-prob): ORPO, arXiv 2403.07691, eq. 4."""
    clear = mean_logprobs.clamp(max=_ALMOST_SURE)
    return clear - torch.log(-torch.expm1(clear))


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """[G] of mean log-probs: -log sigmoid(log_odds(chosen) - log_odds(rejected)). ORPO, arXiv 2403.07691, eq. 7."""
    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    ratio: torch.Tensor,
    desirable: torch.Tensor,
    reference_point: torch.Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """[B] of log-ratios to the reference: w_D (1 - sigmoid(beta (r - z0))) for a desirable response,
    w_U (1 - sigmoid(beta (z0 - r))) for an undesirable one. KTO, arXiv 2402.01306, eq. 7 and 8.
    """
    gain = beta * (ratio - reference_point)
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


def kto_reference_point(mismatched_ratio_sum: float, count: float) -> float:
    """z0 = max(0, mean of the mismatched responses' log-ratios): KTO, arXiv 2402.01306, section 4.1; no gradient."""
    return max(0.0, mismatched_ratio_sum / count) if count else 0.0


def rrhf_ranking(mean_logprobs: torch.Tensor, scores: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[G] of [G, K]: sum over pairs with score_i < score_j of max(0, p_i - p_j), p the mean log-prob.

    RRHF, arXiv 2304.05302, eq. 2 and 3.
    """
    worse = scores[:, :, None] < scores[:, None, :]
    both = present[:, :, None] & present[:, None, :]
    excess = F.relu(mean_logprobs[:, :, None] - mean_logprobs[:, None, :])
    return torch.where(worse & both, excess, 0.0).sum((1, 2))


def accuracy(margins: torch.Tensor) -> torch.Tensor:
    """1 where the margin is above 0, 0 below; a tie is half right, so that knowing nothing is 0.5."""
    return 0.5 * (margins.sign() + 1.0)


def calibration(margins: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tally entries for the expected calibration error of sigmoid(|margin|) as confidence in the higher score."""
    confidence = torch.sigmoid(margins.abs())
    correct = accuracy(margins)
    bins = ((confidence - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    entries = {}
    for number in range(CALIBRATION_BINS):
        inside = (bins == number).to(margins.dtype)
        for what, values in (("confidence", confidence), ("correct", correct)):
            entries[calibration_bin(number, what)] = ((inside * values).sum(), inside.sum())
    return entries


def divergence_mask(chosen: list[int], rejected: list[int]) -> tuple[list[bool], list[bool]]:
    """Loss masks of two responses: True from the first token on that differs.

    Tokens before it have the same log-prob in both, so that sums over a response (DPO) keep their difference and
    means (IPO) lose what says nothing of the preference.
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected))
    )
    first, second = ([position >= shared for position in range(len(ids))] for ids in (chosen, rejected))
    return first, second
