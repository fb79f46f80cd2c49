"""Summary of a run: whether it learns, how long it still takes, and its bottleneck."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median, pstdev

LEARNED = (
    ("reward", "reward/mean", 1.0),
    ("loss", "policy/nll", -1.0),
    ("loss", "policy/preference_loss", -1.0),
    ("loss", "reward_model/preference_loss", -1.0),
)
"""(what it is called, metric, whether it should rise or fall); a run has one of them."""

_RECENT = 8
"""Steps that speed and bound are taken from."""
_MOST = 4096
"""Number of steps whose learned value is kept."""
_CLEAR = 2.0
"""A difference of two means counts as a change from this many standard errors on."""
SLOW = 2.0
"""How many times as long as the median of the others a slow engine takes for a token."""
SCORING = 0.7
"""A reward worker that is busy for this share of the wait for samples is what a step waits for."""
_GENERATE, _TRAIN = "seconds/generate", ("seconds/prepare", "seconds/update")


class RunSummary:
    """Summary of the steps that a console has shown. May be read from a thread while a step is added."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._recent: deque[Mapping[str, object]] = deque(maxlen=_RECENT)
        self._learned: dict[tuple[str, float], deque[float]] = {}

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        self._done = step
        self._recent.append(metrics)
        for name, metric, sign in LEARNED:
            value = metrics.get(metric)
            if isinstance(value, int | float) and math.isfinite(value):
                self._learned.setdefault((name, sign), deque(maxlen=_MOST)).append(value)

    def left(self) -> str:
        """Time until the last step, at the median of the recent steps; empty if it is unknown or no step is left."""
        seconds = self._recent_values("seconds/step")
        remaining = self._total - self._done
        return f"{duration(remaining * median(seconds))} left" if seconds and remaining > 0 else ""

    def learns(self) -> str:
        """The learned value over the run: `reward 0.172 to 0.836: rises`."""
        for (name, sign), values in [*self._learned.items()]:
            if len(values) >= 2:
                first, last, change = trend([*values])
                return f"{name} {first:.3g} to {last:.3g}: {_rated(change, change * sign > 0)}"
        return ""

    def shares(self) -> tuple[float, float]:
        """Parts of a recent step in which the trainer waits for samples, and in which it trains."""
        steps = self._recent_mean("seconds/step")
        if steps <= 0:
            return 0.0, 0.0
        return self._recent_mean(_GENERATE) / steps, sum(map(self._recent_mean, _TRAIN)) / steps

    def bound(self) -> str:
        """Shares of a step: `58% waiting for samples, 36% training`; empty if unknown."""
        generate, train = self.shares()
        if not generate and not train:
            return ""
        if not generate:
            return f"{train:.0%} training"
        return f"{generate:.0%} waiting for samples, {train:.0%} training"

    def balance(self) -> str:
        """Of a run whose steps overlap: `engines idle 12%, samples 0.8 versions old`; else empty."""
        older, busy = self._recent_mean("staleness/mean"), self._recent_values("utilisation/rollout")
        return f"engines idle {1 - fmean(busy):.0%}, samples {older:.1f} versions old" if older and busy else ""

    def bottleneck(self) -> str:
        """What takes longest in a step: engines, environment, reward workers or trainer; empty if unknown."""
        generate, train = self.shares()
        if not generate:
            return ""  # offline, or no step yet
        if generate <= train:
            return "trainer"
        workers = max([1.0, *self._recent_values("workers/reward")])
        if self._recent_mean("seconds/reward") / workers >= SCORING * self._recent_mean(_GENERATE):
            return "reward workers"
        return "engines and environment" if self._recent_values("episodes/turns") else "engines"

    def _recent_mean(self, name: str) -> float:
        """Mean over the recent steps; 0 if none has the metric."""
        return fmean(self._recent_values(name) or [0.0])

    def _recent_values(self, name: str) -> list[float]:
        found = (metrics.get(name) for metrics in [*self._recent])
        return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _rated(change: int, wanted: bool) -> str:
    if not change:
        return "no clear change yet"
    name, other = ("rises", "fall") if change > 0 else ("falls", "rise")
    return name if wanted else f"{name}, and should {other}"


def trend(values: Sequence[float]) -> tuple[float, float, int]:
    """Mean of the first and of the last third, and whether the change exceeds two standard errors (1, -1, or 0)."""
    size = max(1, len(values) // 3)
    parts = values[:size], values[-size:]
    first, last = map(fmean, parts)
    spread = math.sqrt(sum(pstdev(part) ** 2 / size for part in parts))
    if size < 2 or abs(last - first) <= _CLEAR * spread:
        return first, last, 0
    return first, last, 1 if last > first else -1


def duration(seconds: float) -> str:
    """A time span for people: `45 s`, `3 min`, `1 h 20 min`, `2 d 3 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
