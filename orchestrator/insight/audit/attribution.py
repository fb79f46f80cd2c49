"""Attributes the gap between sampler, trainer and scorer to causes. Pure functions of log-probs.

Two tests, on the same hypotheses:

- The numbers. A hypothesis predicts the log-prob of every token. It explains a side's gap as far as it brings the
  scorer nearer to the side's numbers: share = 1 - mean|side - hypothesis| / mean|side - scorer|. Rounding is not
  correlated with what a wrong temperature, head, layer or position does. Another error may be: many make a distribution
  flatter, as a temperature does. So a cause is named only if it explains nearly all of the gap, or all but rounding.
- The samples. If the sampler's numbers are right, its tokens may still be drawn from something else (top-p that the
  log-probs do not show). The likelihood ratio of a hypothesis to the scorer, over all sampled tokens, exceeds e^x with
  a probability of at most e^-x if the scorer is right (Markov's inequality), whatever the hypothesis. That it is
  likelier than the scorer does not make it true: a cause is named only if the tokens are distributed as it says. The
  probability of all tokens more probable than the sampled one, which is uniform then, shows it.

How large a gap rounding explains is measured, not assumed: the scorer itself runs in the run's data type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from troupe.workers.contract.audit import TIED_EMBEDDING, WHOLE_MODEL, Floats, TokenScores

Side = Literal["sampler", "trainer"]

ROUNDING_RATIO = 3.0
"""Largest ratio of a gap to the scorer's own rounding that rounding explains: kernels round in different places."""
NEGLIGIBLE = 1e-4
"""Mean gap in nats that needs no explanation: it changes an importance weight by 0.01%."""
_NAMED = 0.85
"""Least share of the gap that names a cause whose residual rounding does not explain: many errors make a distribution
flatter, and the best temperature takes a good part of their gap."""
_NEAR_ROUNDING = 1.5
"""Largest ratio of a residual to the scorer's own rounding that leaves nothing to explain."""
_LEAST_SHARE = 0.25
"""Least share of a gap that names a cause whose residual is near rounding."""
_CANDIDATE = 0.05
"""Share of the gap below which a cause is no candidate."""
_CANDIDATES = 3
"""Number of causes listed if none is named."""
_AS_GOOD = 0.02
"""Causes whose shares differ by less cannot be told apart."""
_LOG_RATIO = 7.4
"""Smallest log of the likelihood ratio, divided by the number of hypotheses, that counts as evidence: a false alarm in
1600 audits."""
_AS_LIKELY = 3.0
"""Ways to draw the tokens whose log-likelihood ratios differ by less cannot be told apart."""
_MOST = 20.0
"""Largest gap of one token that counts: one impossible token must not decide."""
_STRAY = 0.01
"""Share of tokens that may be drawn as the scorer says although a hypothesis holds: rounding moves a token across the
border of a truncated distribution."""
_TRIED_BY_SAMPLES = 65
"""Temperatures under which the samples are tried."""
_MISFIT = 2.2
"""Kuiper's statistic, times the root of the number of tokens, above which the tokens are not distributed as a
hypothesis says: by chance in one of 400 tests."""
_FITTED = ("top_p", "top_k", "min_p")
"""Kinds with a fine grid of values: only the best value is a cause, not its neighbours."""
_TEMPERATURE_STEP = 0.02
"""Relative difference of temperatures that counts as one."""
_PRESENT = 0.5
"""Smallest coefficient of a group of older weights that is part of a combination; rounding leaves them near 0 or 1."""


@dataclass(frozen=True)
class Cause:
    """A cause of a gap."""

    kind: str
    """`temperature`, `prefix cache`, `template`, `unexplained`, or the kind of a hypothesis."""
    about: str
    """What of it: a temperature, a type, a shift, a group of weights."""
    share: float
    """Share of the gap that it explains."""
    samples_only: bool = False
    """The log-probs are right, but the tokens were drawn in another way."""


@dataclass(frozen=True)
class Gap:
    """The gap of one side to the scorer."""

    side: Side
    worker: str
    """The engine, or `trainer`."""
    tokens: int
    mean: float
    """Mean |side - scorer| in nats."""
    p99: float
    rounding: float
    """Mean gap of the scorer in the run's data type."""
    causes: tuple[Cause, ...]
    """The likeliest first; indistinguishable ones follow each other. Empty if rounding explains the gap."""

    @property
    def passed(self) -> bool:
        return not self.causes


def attribute(side: Side, found: TokenScores, fresh: TokenScores | None = None) -> Gap:
    """The gap of a side and its causes. `fresh`: the same of samples with an empty prefix cache, if there are some."""
    numbers = _numbers(side, found)
    gap = distance(numbers, found.scorer)
    rounding = distance(found.rounded, found.scorer)
    causes: tuple[Cause, ...] = ()
    if side == "sampler" and fresh is not None and _cache_explains(found, fresh):
        return _gap(side, found, (Cause("prefix cache", "", 1.0 - _sampler_gap(fresh) / gap),))
    if gap > NEGLIGIBLE:
        shares = _shares(numbers, found)
        causes = tuple(_likeliest(shares, gap, rounding))
        if not causes and not explained_by_rounding(gap, rounding):
            causes = (Cause("unexplained", _nearest(shares), 0.0),)
    if not causes and side == "sampler":
        causes = tuple(_of_samples(found))
    return _gap(side, found, causes)


def of_engine(found: TokenScores, engine: str) -> TokenScores:
    kept = np.array([name == engine for name in found.engine], bool)
    return replace(
        found,
        sampler=found.sampler[kept],
        trainer=found.trainer[kept],
        scorer=found.scorer[kept],
        rounded=found.rounded[kept],
        hypotheses={key: column[kept] for key, column in found.hypotheses.items()},
        draws={key: columns[kept] for key, columns in found.draws.items()},
        tempered=found.tempered[kept],
        above=found.above[kept],
        engine=(engine,) * int(kept.sum()),
    )


def distance(one: Floats, other: Floats) -> float:
    """Mean absolute difference in nats, each token's at most `_MOST`."""
    return float(np.minimum(np.abs(one - other), _MOST).mean()) if len(one) else 0.0


def explained_by_rounding(gap: float, rounding: float) -> bool:
    """Whether a gap is one that the run's data type makes."""
    return gap <= ROUNDING_RATIO * rounding + NEGLIGIBLE


def fit_temperature(numbers: Floats, found: TokenScores) -> tuple[float, Floats]:
    """The temperature at which the scorer is nearest to the numbers, and its log-probs there."""
    errors = [distance(numbers, column) for column in found.tempered.T]
    best = min(max(int(np.argmin(errors)), 1), len(errors) - 2)
    fine = np.geomspace(found.temperatures[best - 1], found.temperatures[best + 1], 321)
    columns = [_at_temperature(found, float(temperature)) for temperature in fine]
    nearest = int(np.argmin([distance(numbers, column) for column in columns]))
    return float(fine[nearest]), columns[nearest]


def _at_temperature(found: TokenScores, temperature: float) -> Floats:
    return _interpolated(found, found.tempered, temperature)


def _interpolated(found: TokenScores, table: Floats, temperature: float) -> Floats:
    """The table's values at a temperature, from a cubic through the four nearest temperatures that the scorer tried."""
    logs, place = np.log(found.temperatures), np.log(temperature)
    first = min(max(int(np.searchsorted(logs, place)) - 2, 0), len(logs) - 4)
    points = logs[first : first + 4].tolist()
    weights = [math.prod((place - other) / (point - other) for other in points if other != point) for point in points]
    return table[:, first : first + 4] @ weights


def _numbers(side: Side, found: TokenScores) -> Floats:
    return found.sampler if side == "sampler" else found.trainer


def _gap(side: Side, found: TokenScores, causes: tuple[Cause, ...]) -> Gap:
    numbers = _numbers(side, found)
    apart = np.abs(numbers - found.scorer)
    return Gap(
        side,
        " and ".join(sorted(set(found.engine))) if side == "sampler" else side,
        len(numbers),
        distance(numbers, found.scorer),
        float(np.quantile(apart, 0.99)) if len(apart) else 0.0,
        distance(found.rounded, found.scorer),
        causes,
    )


def _sampler_gap(found: TokenScores) -> float:
    return distance(found.sampler, found.scorer)


def _cache_explains(found: TokenScores, fresh: TokenScores) -> bool:
    """Whether the gap is there with the warm cache only; False unless the engine also sampled with an empty one."""
    if not len(fresh.sampler):
        return False
    warm, cold = _sampler_gap(found), _sampler_gap(fresh)
    return (
        not explained_by_rounding(warm, distance(found.rounded, found.scorer))
        and explained_by_rounding(cold, distance(fresh.rounded, fresh.scorer))
        and cold < 0.5 * warm
    )


def _own_temperature(found: TokenScores) -> float:
    return float(found.temperatures[len(found.temperatures) // 2])


def _candidates(numbers: Floats, found: TokenScores) -> Iterator[tuple[Cause, Floats]]:
    """Every hypothesis with its log-probs; shares are not known yet."""
    temperature, column = fit_temperature(numbers, found)
    if abs(temperature / _own_temperature(found) - 1.0) > _TEMPERATURE_STEP:
        yield Cause("temperature", f"{temperature:.2g}", 0.0), column
    for key, hypothesis in found.hypotheses.items():
        kind, _, about = key.partition(":")
        yield Cause(kind, about, 0.0), hypothesis
    combined = _combined_weights(numbers, found)
    if combined is not None:
        yield combined


def _combined_weights(numbers: Floats, found: TokenScores) -> tuple[Cause, Floats] | None:
    """Several groups of older weights at once: effects of a small update add up, and a regression separates them."""
    older = {key.partition(":")[2]: value for key, value in found.hypotheses.items() if key.startswith("weights:")}
    groups = {name: value - found.scorer for name, value in older.items() if name not in (WHOLE_MODEL, TIED_EMBEDDING)}
    if len(groups) < 2 or len(groups) * 2 > len(numbers):
        return None
    effects = np.stack(list(groups.values()), -1)
    coefficients = np.linalg.lstsq(effects, np.clip(numbers - found.scorer, -_MOST, _MOST), rcond=None)[0]
    present = [place for place, value in enumerate(coefficients) if value > _PRESENT]
    if not 2 <= len(present) < len(groups):
        return None
    about = " and ".join(list(groups)[place] for place in present)
    return Cause("weights", about, 0.0), found.scorer + effects[:, present].sum(-1)


def _likeliest(shares: list[Cause], gap: float, rounding: float) -> list[Cause]:
    """The causes that explain the gap, as far as they cannot be told apart."""
    first = {cause.kind: cause for cause in reversed(shares)}
    causes = [cause for cause in shares if cause.kind not in _FITTED or cause is first[cause.kind]]
    best = causes[0].share if causes else 0.0
    enough = (gap - _NEAR_ROUNDING * rounding - NEGLIGIBLE) / gap
    least = min(_NAMED, max(enough, _LEAST_SHARE))
    return [cause for cause in causes if cause.share >= least and cause.share > best - _AS_GOOD]


def _shares(numbers: Floats, found: TokenScores) -> list[Cause]:
    """All hypotheses, the one that explains most of the gap first."""
    candidates = list(_candidates(numbers, found))
    if not candidates:
        return []
    shares = _explained(numbers, np.stack([column for _, column in candidates]), found.scorer)
    causes = [replace(cause, share=float(share)) for (cause, _), share in zip(candidates, shares, strict=True)]
    return sorted(causes, key=lambda cause: -cause.share)


def _explained(numbers: Floats, hypotheses: Floats, scorer: Floats) -> Floats:
    """Share of the gap that each of [hypotheses, tokens] explains, without the few tokens that it makes impossible."""
    residuals, gaps = (np.minimum(np.abs(numbers - other), _MOST) for other in (hypotheses, scorer))
    kept = np.argsort(residuals, -1, kind="stable")[:, : math.ceil((1.0 - _STRAY) * len(numbers))]
    left, gap = np.take_along_axis(residuals, kept, -1).mean(-1), gaps[kept].mean(-1)
    return 1.0 - np.divide(left, gap, out=np.ones_like(gap), where=gap > 0.0)


def _nearest(shares: list[Cause]) -> str:
    """The causes that explain most of the gap, though none explains enough of it; one of each kind."""
    first: dict[str, Cause] = {}
    for cause in shares:
        first.setdefault(cause.kind, cause)
    best = [cause for cause in first.values() if cause.share > _CANDIDATE][:_CANDIDATES]
    if not best:
        return "no hypothesis explains any of it"
    return "the best candidates: " + ", ".join(f"{cause.kind} {cause.about} {cause.share:.0%}" for cause in best)


@dataclass(frozen=True)
class _Draw:
    cause: Cause
    logprobs: Floats
    above: Floats
    """Probability of all tokens more probable than the sampled one."""


def _of_samples(found: TokenScores) -> list[Cause]:
    """The cause that only the choice of the tokens shows."""
    tried = [(_log_ratio(draw.logprobs, found.scorer), draw) for draw in _draws(found)]
    least = _LOG_RATIO + math.log(len(tried))
    likelier = sorted([one for one in tried if one[0] >= least], key=lambda one: -one[0])
    if not likelier:
        return []
    first: dict[str, tuple[float, _Draw]] = {}
    for ratio, draw in likelier:
        first.setdefault(draw.cause.kind, (ratio, draw))
    best = likelier[0]
    if _fits(best[1], found):
        near = [draw for ratio, draw in first.values() if ratio > best[0] - _AS_LIKELY and _fits(draw, found)]
        return [draw.cause for draw in near]
    about = [f"{draw.cause.kind} {draw.cause.about}" for _, draw in first.values()]
    return [Cause("unexplained", ", ".join(about[:_CANDIDATES]), 0.0, samples_only=True)]


def _draws(found: TokenScores) -> Iterator[_Draw]:
    """Truncations, no ends and temperatures: other causes would show in the log-probs."""
    own = _own_temperature(found)
    for key, columns in found.draws.items():
        kind, _, about = key.partition(":")
        yield _Draw(Cause(kind, about, 0.0, samples_only=True), *columns.T)
    coarse = np.geomspace(found.temperatures[0], found.temperatures[-1], _TRIED_BY_SAMPLES)
    ratios = [_log_ratio(_at_temperature(found, float(value)), found.scorer) for value in coarse]
    best = min(max(int(np.argmax(ratios)), 1), len(coarse) - 2)
    for value in map(float, np.geomspace(coarse[best - 1], coarse[best + 1], _TRIED_BY_SAMPLES)):
        if abs(value / own - 1.0) > _TEMPERATURE_STEP:
            cause = Cause("temperature", f"{value:.2g}", 0.0, samples_only=True)
            yield _Draw(cause, _at_temperature(found, value), _interpolated(found, found.above, value))


def _fits(draw: _Draw, found: TokenScores) -> bool:
    """Whether the tokens' places, from the most probable on, are uniform in narrow and wide distributions."""
    drawn = np.random.default_rng(0).uniform(size=len(draw.above))
    places = np.clip(draw.above + drawn * np.exp(draw.logprobs), 0.0, 1.0)
    spread = _spread(found)
    wide = spread > np.median(spread)
    return all(_misfit(part) <= _MISFIT for part in (places, places[wide], places[~wide]))


def _spread(found: TokenScores) -> Floats:
    """Variance of the scorer's logits: how concave log-probs are in 1 / temperature, whichever token was sampled."""
    middle = len(found.temperatures) // 2
    before, own, after = 1.0 / found.temperatures[middle - 1 : middle + 2]
    one, two, three = found.tempered[:, middle - 1 : middle + 2].T
    return ((two - one) / (own - before) - (three - two) / (after - own)) / (after - before)


def _misfit(places: Floats) -> float:
    """Kuiper's statistic of places, which are uniform on [0, 1] if they fit."""
    count = len(places)
    ordered, steps = np.sort(places), np.arange(count)
    over, under = (steps + 1) / count - ordered, ordered - steps / count
    return math.sqrt(count) * float(over.max() + under.max()) if count else 0.0


def _log_ratio(hypothesis: Floats, scorer: Floats) -> float:
    """Log of the likelihood ratio of a hypothesis, mixed with a little of the scorer's distribution, to the scorer."""
    return float(np.log((1.0 - _STRAY) * np.exp(hypothesis - scorer) + _STRAY).sum())
