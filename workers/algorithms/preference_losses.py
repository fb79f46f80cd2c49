"""Pure loss functions of offline training: likelihood, reward models, preferences.

Per-token tensors are 1-D over the response tokens of one micro-batch, as in `troupe.workers.algorithms.policy_loss`;
per-response tensors are 1-D over its B rows; responses that are compared have the shape [G, K]: G examples with up to K
responses each. Every function returns one loss per example; the caller averages them.

Preferences are two tensors [..., K, K]: `leads`, how far the model puts response i ahead of response j, and `better`,
whether the data do. Nothing else carries an order, so tied responses cannot be told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from troupe.workers.contract.offline_config import Preference
from troupe.workers.contract.offline_messages import CALIBRATION_BINS, calibration_bin

_NOTHING = -1e30
"""Logarithm of the weight of a response that is not compared: finite, so that its gradient is 0 and not NaN."""
_TINY = torch.finfo(torch.float32).tiny
_ROUNDED = 2.0**-25
"""Largest 1 - p that float32 rounds to p = 1."""


@dataclass(frozen=True)
class Groups:
    """Example of each row of a micro-batch, and the row's place in it."""

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
        """K, the maximum number of responses of an example, at least 2, so that pairs can always be split."""
        return max(2, int(self.member.max()) + 1) if len(self.member) else 2

    def grid(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """[G, K] from per-row values [B]; `fill` if an example has fewer responses."""
        out = values.new_full((self.count, self.width), fill)
        return out.index_put((self.group, self.member), values)

    def present(self) -> torch.Tensor:
        """bool [G, K]: True where there is a response."""
        return self.grid(torch.ones_like(self.group)).bool()

    def better(self, score: torch.Tensor) -> torch.Tensor:
        """bool [G, K, K] of scores [B]: True where the example has responses i and j, and i has the higher score."""
        present = self.present()
        return (differences(self.grid(score)) > 0) & present[:, :, None] & present[:, None, :]

    def best(self, score: torch.Tensor) -> torch.Tensor:
        """bool [B] of scores [B]: True where no response of the example has a higher score."""
        return score == self.grid(score, -math.inf).amax(1)[self.group]


def differences(grid: torch.Tensor) -> torch.Tensor:
    """[G, K, K] of [G, K]: value of response i minus value of response j."""
    return grid[:, :, None] - grid[:, None, :]


def sequence_logprobs(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, sequence: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums, counts), float64 [B]: log-prob and number of every row's loss tokens.

    In float64, because losses compare sums that are much larger than their difference. The value at a masked token,
    NaN included, reaches neither a result nor a gradient.
    """
    kept = torch.where(loss_mask, logprobs, 0.0).double()
    sums = kept.new_zeros(rows).index_add(0, sequence, kept)
    counts = kept.new_zeros(rows).index_add(0, sequence, loss_mask.to(kept.dtype))
    return sums, counts


def plackett_luce(leads: torch.Tensor, better: torch.Tensor) -> torch.Tensor:
    """[...] of [..., K, K]: -sum_i log(exp(s_i) / (exp(s_i) + sum of exp(s_j) over j worse than i)).

    Plackett 1975, Luce 1959; as a preference model: DPO, arXiv 2305.18290, eq. 18. Two responses give Bradley-Terry
    (InstructGPT, arXiv 2203.02155, eq. 1), with a margin if `leads` are less it (Llama 2, arXiv 2307.09288, eq. 2).

    Tied responses are absent from each other's denominators. By Luce's choice axiom every factor is still the model's
    probability of what was observed: that i is chosen first among itself and all worse responses. Their product is the
    likelihood if no two responses or only the worst ones are tied, and otherwise a composite likelihood (Lindsay 1988)
    instead of the sum over all orders of the tied ones (Kalbfleisch and Prentice 1973), which takes exponential time.
    Unlike Breslow's and Efron's approximations of that sum it does not pull the scores of tied responses together: an
    example in which all are tied has loss and gradient 0.
    """
    behind = torch.where(better, -leads, _NOTHING).logsumexp(-1)
    return -F.logsigmoid(-behind).sum(-1)


def logistic(leads: torch.Tensor, better: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """[...] of [..., K, K]: (1 - e) times the Plackett-Luce loss plus e times the reversed ranking's.

    Two responses give -(1 - e) log sigmoid(h) - e log sigmoid(-h), h the lead of the better one: Mitchell 2023, "A note
    on DPO with noisy preferences", eq. 3; label smoothing of reward models: arXiv 2401.06080.
    """
    loss = plackett_luce(leads, better)
    if not label_smoothing:
        return loss
    return (1.0 - label_smoothing) * loss + label_smoothing * plackett_luce(-leads.mT, better.mT)


def fidelity(leads: torch.Tensor, better: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """[...] of [..., K, K]: mean over pairs of 1 - sqrt((1 - e) p) - sqrt(e (1 - p)), p = sigmoid(lead of the better).

    Tsai et al. 2007, "FRank: a ranking method with fidelity loss", SIGIR, with the target 1 - e. It is between 0 and 1,
    and its gradient vanishes for pairs that are far in the wrong order.
    """
    # 1 - u v = |u - v|^2 / 2 for unit vectors; this form does not cancel near 0.
    hit = math.sqrt(1.0 - label_smoothing) - (0.5 * F.logsigmoid(leads)).exp()
    miss = math.sqrt(label_smoothing) - (0.5 * F.logsigmoid(-leads)).exp()
    losses = torch.where(better, 0.5 * (hit.square() + miss.square()), 0.0)
    return losses.sum((-2, -1)) / better.sum((-2, -1)).clamp(min=1)


PreferenceLoss = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

PREFERENCE_LOSSES: Mapping[Preference, PreferenceLoss] = {"logistic": logistic, "fidelity": fidelity}
"""Loss [...] of (leads, better, label smoothing), by its name in a spec."""


def centering(scores: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """[G] of scores [G, K]: the square of twice the example's mean score. (r_chosen + r_rejected)^2 on pairs: arXiv
    2312.09244; TRL's `center_rewards_coefficient`."""
    mean = torch.where(present, scores, 0.0).sum(-1) / present.sum(-1).clamp(min=1)
    return (2.0 * mean).square()


@dataclass(frozen=True)
class Aligned:
    """Values of response tokens by place in the response: L places, the longest response of the micro-batch."""

    values: torch.Tensor
    """[B, L]; after its end a response keeps its last value."""
    inside: torch.Tensor
    """bool [B, L]: True up to the end of the response."""

    def rows(self, index: torch.Tensor) -> Aligned:
        """The responses with these numbers."""
        return Aligned(self.values[index], self.inside[index])


def align(values: torch.Tensor, sequence: torch.Tensor, rows: int) -> Aligned:
    """The flat values [T] of `rows` responses, all with tokens, in the order of `sequence`."""
    lengths = torch.bincount(sequence, minlength=rows)[:, None]
    place = torch.arange(int(lengths.max()) if rows else 0, device=values.device)
    starts = lengths.cumsum(0) - lengths
    return Aligned(values[starts + torch.minimum(place, lengths - 1)], place < lengths)


def diverged(first: Aligned, second: Aligned) -> torch.Tensor:
    """bool [G, L] of token ids: True from the first differing token to the end of the longer response. The positions of
    DeepSpeed-Chat's loss of a reward model, arXiv 2308.01320."""
    differs = (first.values != second.values) | (first.inside != second.inside)
    return (differs.cumsum(1) > 0) & (first.inside | second.inside)


def ipo(chosen_ratio: torch.Tensor, rejected_ratio: torch.Tensor, beta: float) -> torch.Tensor:
    """[G] of log-ratios to the reference per token: (h - 1 / (2 beta))^2, h their difference. IPO, arXiv 2310.12036,
    eq. 17, with tau = beta; averaged over tokens as its authors do in their experiments."""
    return (chosen_ratio - rejected_ratio - 1.0 / (2.0 * beta)).square()


def log_odds(mean_logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p)) of p = exp(mean log-prob): ORPO, arXiv 2403.07691, eq. 4. A log-prob of 0 stands for a
    probability that float32 cannot tell from 1: it has the odds and the gradient of the lowest such probability."""
    certain = mean_logprobs - mean_logprobs.detach() - _ROUNDED
    clear = torch.where(mean_logprobs < -_TINY, mean_logprobs, certain)
    return clear - torch.log(-torch.expm1(clear))


def odds_ratio(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """[G] of mean log-probs: -log sigmoid(log_odds(chosen) - log_odds(rejected)). ORPO, arXiv 2403.07691, eq. 7."""
    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    ratio: torch.Tensor,
    desirable: torch.Tensor,
    reference_point: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """[B] of log-ratios to the reference: w_D (1 - sigmoid(beta (r - z0))) for a desirable response, w_U (1 -
    sigmoid(beta (z0 - r))) for an undesirable one. KTO, arXiv 2402.01306, eq. 7 and 8."""
    gain = beta * (ratio - reference_point)
    return torch.where(desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain))


def kto_reference_point(mismatched_ratio_sum: float, count: float) -> float:
    """z0 = max(0, mean of the mismatched responses' log-ratios): KTO, arXiv 2402.01306, section 4.1; no gradient."""
    return max(0.0, mismatched_ratio_sum / count) if count else 0.0


def rrhf_ranking(leads: torch.Tensor, better: torch.Tensor) -> torch.Tensor:
    """[G] of [G, K, K]: sum over pairs of how far the mean log-prob of the worse response is ahead. RRHF, arXiv
    2304.05302, eq. 2 and 3."""
    return torch.where(better, F.relu(-leads), 0.0).sum((-2, -1))


def accuracy(margins: torch.Tensor) -> torch.Tensor:
    """1 for a margin above 0, 0 below, 0.5 for a tie."""
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


def divergence_masks(responses: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Loss masks of the responses of an example: True from the first place on where not all have the same token.

    Earlier tokens have the same log-prob in all responses: differences of sums (DPO) do not change, and means (IPO)
    leave out tokens that carry no preference.
    """
    shortest = min(map(len, responses))
    shared = next((place for place in range(shortest) if len({ids[place] for ids in responses}) > 1), shortest)
    return [[place >= shared for place in range(len(ids))] for ids in responses]
