"""Results on one held-out set: estimates with confidence intervals, from the rewards of the samples of each prompt."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import TypeVar

import numpy as np

from troupe.orchestrator.spec.derived.sampling import COMPARISONS
from troupe.orchestrator.telemetry.metrics import best_of_k, pass_at_k
from troupe.workers.contract.rewards import CONSISTENCY, NO_ANSWER, is_solved

T = TypeVar("T")
REWARD = "reward"
CONFIDENCE = 0.95
_SHOWN = re.compile(r"reward|avg|win_rate|(?:pass|maj|best)@[0-9]+")
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""Quantiles of Student's t for `CONFIDENCE` with 1 to 10 degrees of freedom."""


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over the prompts of a set, with the bounds of its 95% confidence interval. The interval covers the choice
    of the prompts, and with it the sampling of each one's responses. None if nothing tells it: one prompt only, or a
    reward that is the same for all."""

    value: float
    low: float | None
    high: float | None
    prompts: int
    """Prompts that it is a mean over."""


@dataclass(frozen=True)
class PromptResult:
    """The samples of one prompt."""

    rewards: tuple[float | None, ...]
    """None for a sample without a reward."""
    lengths: tuple[int, ...]
    """Sampled tokens of each."""
    truncated: int
    """Samples that were cut at the longest response."""
    answers: tuple[int | None, ...] = ()
    """Number of each sample's answer, as in `RewardSummary.answers`."""
    level: str = ""
    """Level of the prompt, or empty if it has none."""
    comparisons: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Points of each sample against a baseline (`win_rate`), and agreement of both orders."""

    def of_player(self, number: int, players: int) -> PromptResult:
        """The samples of one of several players, whose samples of an episode follow each other."""
        own = slice(number, None, players)
        return replace(
            self,
            rewards=self.rewards[own],
            answers=self.answers[own],
            comparisons={name: values[own] for name, values in self.comparisons.items()},
        )


def comparisons(
    components: Mapping[str, Sequence[float | None]], compared: Sequence[str]
) -> dict[str, list[float | None]]:
    """`PromptResult.comparisons`: of several components that compare with a baseline, the mean of each sample."""
    found: dict[str, list[float | None]] = {}
    for name, suffix in zip(COMPARISONS, ("", f"_{CONSISTENCY}"), strict=True):
        columns = [components[f"{label}{suffix}"] for label in compared if f"{label}{suffix}" in components]
        means = [_mean_of(values) for values in zip(*columns, strict=True)]
        if any(one is not None for one in means):
            found[name] = means
    return found


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return fmean(known) if len(known) == len(values) else None


@dataclass(frozen=True)
class SetResult:
    """Results of one evaluation on one set."""

    prompts: int
    refused: int
    """Prompts that cannot be used."""
    samples: int
    """Samples per prompt, in a game of each player."""
    failed_samples: int
    """Samples without a reward: they are in no estimate."""
    estimates: dict[str, MeanEstimate] = field(default_factory=dict)
    """`reward`; if the reward defines what is solved, also the share of solved samples, `pass@K` and `maj@K`, else
    `best@K`; with a baseline `win_rate` and `position_consistency`. Players of a game have their own of K samples."""
    response_tokens: float | None = None
    """Mean length of the responses."""
    truncated: float | None = None
    """Share of samples that were cut at the longest response."""
    solved_at: float | None = None
    """Smallest reward of a solved sample."""
    levels: dict[str, dict[str, MeanEstimate]] = field(default_factory=dict)
    """Reward and share of solved samples by level."""
    players: dict[str, dict[str, MeanEstimate]] = field(default_factory=dict)
    """All estimates by player, in a game in which the policy plays several."""

    def metrics(self, prefix: str) -> dict[str, float]:
        """The result by name of the metric; bounds of the reward and of the share of solved samples only."""
        found: dict[str, float | None] = {
            "prompts": float(self.prompts),
            "refused": float(self.refused),
            "failed_samples": float(self.failed_samples),
        }
        for name, estimate in self.estimates.items():
            found[name] = estimate.value
            if "@" not in name:
                found |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        found |= {"response_tokens": self.response_tokens, "truncated": self.truncated, "solved_at": self.solved_at}
        for kind, parts in (("level", self.levels), ("players", self.players)):
            for part, estimates in parts.items():
                found |= {f"{kind}/{part}/{name}": estimate.value for name, estimate in estimates.items()}
        return {f"{prefix}{name}": value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class _Terms:
    """An estimate as a ratio of two sums over prompts, each [prompts]."""

    sums: Sequence[float]
    counts: Sequence[float]


def held_out_lines(first: Mapping[str, float], last: Mapping[str, float]) -> dict[str, str]:
    """Lines at the end of a run on its named sets, by label: before and after training, with intervals. `first`:
    metrics of the first evaluation of this process, or empty in a resumed run."""
    lines: dict[str, str] = {}
    for name, value in last.items():
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != "eval" or not _SHOWN.fullmatch(parts[2]):
            continue
        if parts[2] == "reward" and f"eval/{parts[1]}/avg" in last:
            continue
        low, high = last.get(f"{name}_low"), last.get(f"{name}_high")
        bounds = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        before = first.get(name)
        shown = (
            f"{before:.3f} before, {value:.3f} after" if before is not None and last is not first else f"{value:.3f}"
        )
        lines[f"{parts[1]} {parts[2]}"] = f"{shown}{bounds}"
    return lines


def summarize(
    results: Sequence[PromptResult],
    *,
    refused: int,
    samples: int,
    solved_at: float | None,
    average: str,
    pass_at: Sequence[int],
    players: Sequence[str] = (),
) -> SetResult:
    """The result of a set.

    Args:
        samples: Samples per prompt, in a game of each player.
        solved_at: Smallest reward of a solved sample, or None if undefined.
        average: Name of the share of solved samples: `avg` is the mean over prompts of each one's share, `accuracy`
            the share of all samples. They differ only if samples have failed.
        players: The players of a game that the policy plays, if they are several.
    """
    scored = _scored(results)
    lengths = [length for result in results for length in result.lengths]
    failed = sum(len(result.rewards) for result in results) - sum(map(len, scored))
    found = SetResult(len(results), refused, samples, failed)
    if not any(scored):
        return found
    terms = _terms(results, samples, solved_at, average, pass_at)
    if players:  # samples of different players are no attempts at the same thing
        terms = {name: term for name, term in terms.items() if "@" not in name}
    main = [name for name in terms if name in (REWARD, average)]
    levels = sorted({result.level for result in results if result.level}, key=_by_number)
    by_level: dict[str, dict[str, MeanEstimate]] = {}
    for level in levels:
        rows = [number for number, result in enumerate(results) if result.level == level and scored[number]]
        if rows:
            by_level[level] = estimates({name: _rows_of(terms[name], rows) for name in main}, samples)
    by_player: dict[str, dict[str, MeanEstimate]] = {}
    for number, player in enumerate(players):
        own = [result.of_player(number, len(players)) for result in results]
        if any(_scored(own)):
            by_player[player] = estimates(_terms(own, samples, solved_at, average, pass_at), samples)
    return SetResult(
        prompts=len(results),
        refused=refused,
        samples=samples,
        failed_samples=failed,
        estimates=estimates(terms, samples),
        response_tokens=fmean(lengths),
        truncated=sum(result.truncated for result in results) / len(lengths),
        solved_at=solved_at,
        levels=by_level,
        players=by_player,
    )


def _scored(results: Sequence[PromptResult]) -> list[list[float]]:
    """The rewards of each prompt's samples that have one."""
    return [[reward for reward in result.rewards if reward is not None] for result in results]


def _terms(
    results: Sequence[PromptResult], samples: int, solved_at: float | None, average: str, pass_at: Sequence[int]
) -> dict[str, _Terms]:
    scored = _scored(results)
    terms = {REWARD: _Terms([sum(group) for group in scored], [len(group) for group in scored])}
    for name in dict.fromkeys(name for result in results for name in result.comparisons):
        known = [[one for one in result.comparisons.get(name, ()) if one is not None] for result in results]
        terms[name] = _Terms([sum(group) for group in known], [len(group) for group in known])
    if solved_at is None:
        return terms | _of_k("best", scored, pass_at, best_of_k)
    solved = [[is_solved(reward, solved_at) for reward in group] for group in scored]
    if average == "avg":
        terms[average] = _Terms([_mean(group) for group in solved], [float(bool(group)) for group in solved])
    else:
        terms[average] = _Terms([sum(group) for group in solved], [len(group) for group in solved])
    terms |= _of_k("pass", solved, pass_at, lambda group, k: pass_at_k(len(group), sum(group), k))
    votes = [_vote_of(result, solved_at) for result in results]
    if any(vote is not None for vote in votes):
        terms[f"maj@{samples}"] = _Terms([vote or 0.0 for vote in votes], [float(vote is not None) for vote in votes])
    return terms


def _of_k(
    name: str, groups: Sequence[Sequence[T]], pass_at: Sequence[int], value: Callable[[Sequence[T], int], float]
) -> dict[str, _Terms]:
    """`name@k` for every k that a group has samples for, as the mean over these groups."""
    terms: dict[str, _Terms] = {}
    for k in pass_at:
        wide = [len(group) >= k for group in groups]
        if any(wide):
            values = [value(group, k) if w else 0.0 for group, w in zip(groups, wide, strict=True)]
            terms[f"{name}@{k}"] = _Terms(values, [float(w) for w in wide])
    return terms


def _mean(group: Sequence[bool]) -> float:
    return fmean(group) if group else 0.0


def _vote_of(result: PromptResult, solved_at: float) -> float | None:
    """Computes `vote`; None if a sample has no reward, or its answer is unknown: the vote needs all of them."""
    if len(result.answers) < 2 or len(result.answers) != len(result.rewards):
        return None
    pairs = [(a, r) for a, r in zip(result.answers, result.rewards, strict=True) if a is not None and r is not None]
    if len(pairs) < len(result.answers):
        return None
    return vote([answer for answer, _ in pairs], [is_solved(reward, solved_at) for _, reward in pairs])


def vote(answers: Sequence[int], solved: Sequence[bool]) -> float:
    """maj@k of one prompt with k samples: the probability that the answer they vote for is right.

    The answer with the most samples wins; of several, each with the same probability. Samples without an answer do not
    vote; if none votes, the answer is wrong. Whether the winner is right is read from a sample with this answer, drawn
    at random: samples with equal answers may be solved or not if the reward also looks at their form. `answers`: number
    of each sample's answer; `NO_ANSWER`: it states none.
    """
    counts = Counter(answer for answer in answers if answer != NO_ANSWER)
    most = max(counts.values(), default=0)
    # Answers that tie have the same number of samples, so that a random sample of theirs is one of a random answer.
    winners = [right for answer, right in zip(answers, solved, strict=True) if most and counts[answer] == most]
    return _mean(winners)


def estimates(terms: Mapping[str, _Terms], samples: int) -> dict[str, MeanEstimate]:
    """Estimates of ratios of sums over the same prompts, each with `samples` samples."""
    return {name: _estimate(term, samples, share=is_share(name)) for name, term in terms.items()}


def is_share(name: str) -> bool:
    """Whether an estimate is a share of samples or prompts, and no reward."""
    return name != REWARD and not name.startswith("best@")


def mean_estimate(values: Sequence[float]) -> MeanEstimate:
    """The mean of independent values, at least one, with its interval by Student's t; `prompts` is their number."""
    return _estimate(_Terms(list(values), [1.0] * len(values)), 1, share=False)


def _estimate(term: _Terms, samples: int, *, share: bool) -> MeanEstimate:
    """A ratio of sums over n prompts with its interval; `share`: the ratio is one of a whole, within 0 and 1.

    The variance is the linearized ratio's (Cochran 1977, sec. 6.4), with n - 1 degrees of freedom: Student's t,
    because of few prompts the normal interval covers too little. A share has Wilson's interval (1927) for as many
    independent trials as would have this variance (Korn and Graubard 1998), at most one for each sample, for prompts
    can have the same share by chance; n if all prompts have 0 or 1.
    """
    counts = np.array(term.counts, dtype=float)
    used = counts > 0
    sums, counts, prompts = np.array(term.sums, dtype=float)[used], counts[used], int(used.sum())
    value = float(sums.sum() / counts.sum())
    if prompts < 2:
        return MeanEstimate(value, None, None, prompts)
    residuals = sums - value * counts
    variance = float(residuals @ residuals) * prompts / (prompts - 1) / float(counts.sum()) ** 2
    t = _student(prompts - 1)
    if not share:
        half = t * math.sqrt(variance)
        bounds = (value - half, value + half) if half else (None, None)
        return MeanEstimate(value, *bounds, prompts)
    spread = value * (1.0 - value)
    narrowed = variance * (t / _Z) ** 2
    trials = prompts if not spread else spread / max(narrowed, spread / (prompts * samples))
    centre, half = value + _Z**2 / (2 * trials), _Z * math.sqrt(spread / trials + (_Z / (2 * trials)) ** 2)
    whole = 1.0 + _Z**2 / trials
    return MeanEstimate(value, max(0.0, (centre - half) / whole), min(1.0, (centre + half) / whole), prompts)


def _student(freedom: int) -> float:
    """The quantile of Student's t for `CONFIDENCE` on both sides, by degrees of freedom."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    # Cornish and Fisher's expansion (Abramowitz and Stegun 1964, 26.7.5), here within 0.1%.
    return _Z + (_Z**3 + _Z) / (4 * freedom) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * freedom**2)


def _rows_of(terms: _Terms, rows: Sequence[int]) -> _Terms:
    return _Terms([terms.sums[row] for row in rows], [terms.counts[row] for row in rows])


def _by_number(level: str) -> tuple[bool, float, str]:
    """Order of levels: numbers by their value, then other texts."""
    try:
        return False, float(level), level
    except ValueError:
        return True, 0.0, level
