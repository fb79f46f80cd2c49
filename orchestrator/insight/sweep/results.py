"""What a sweep has shown: a value for each trial, a mean with its interval for each setting, and the best setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from troupe.orchestrator.rollouts.held_out import MeanEstimate, mean_estimate
from troupe.orchestrator.telemetry.run_summary import LEARNED

Status = Literal["waiting", "running", "complete", "stopped", "stopped early", "failed"]
KL, REWARD = "kl_ref", "reward/mean"
DEFAULTS = {"eval/accuracy": 1.0, "eval/reward": 1.0, "eval/loss": -1.0} | {name: sign for _, name, sign in LEARNED}
"""Metrics that settings are compared by, the first that all have, and whether the highest or the lowest is best."""

Lines = Sequence[Mapping[str, Any]]
"""Lines of a run's metrics."""


@dataclass(frozen=True)
class TrialResult:
    """What became of a trial."""

    name: str
    seed: int
    folder: str
    status: Status
    reason: str = ""
    """Why it failed or was stopped; otherwise empty."""
    step: int = 0
    """Its last step."""
    value: float | None = None
    kl: float | None = None
    reward: float | None = None


@dataclass(frozen=True)
class SettingResult:
    """A setting over its seeds."""

    label: str
    settings: Mapping[str, Any]
    trials: tuple[TrialResult, ...]

    @property
    def complete(self) -> bool:
        """Whether every trial is complete and has a value; otherwise its mean would be one of chosen seeds."""
        return len(self._values()) == len(self.trials)

    @property
    def estimate(self) -> MeanEstimate | None:
        """Mean of the values of the complete trials, or None without any."""
        values = self._values()
        return mean_estimate(values) if values else None

    @property
    def results(self) -> list[tuple[float | None, ...]]:
        """What each trial measured, by seed."""
        return [(trial.value, trial.kl, trial.reward) for trial in self.trials]

    def _values(self) -> list[float]:
        return [trial.value for trial in self.trials if trial.status == "complete" and trial.value is not None]

    def record(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        found = self.estimate or MeanEstimate(math.nan, None, None, 0)
        mean = found.value if found.prompts else None
        return asdict(self) | {"complete": self.complete, "mean": mean, "low": found.low, "high": found.high}


def metric_value(metric: str, lines: Lines) -> float | None:
    """A metric of a run up to a step: the last evaluation, or the mean over the last third of its steps; None without
    a finite value."""
    found = [line[metric] for line in lines if isinstance(line.get(metric), int | float)]
    values = [float(value) for value in found if math.isfinite(value)]
    if not values:
        return None
    return values[-1] if metric.startswith("eval/") else fmean(values[-max(1, len(values) // 3) :])


def default_metric(runs: Iterable[Lines]) -> str | None:
    """The first metric of `DEFAULTS` that all runs have, or None."""
    recorded = [{name for line in lines for name in line} for lines in runs]
    shared = set.intersection(*recorded) if recorded else set()
    return next((name for name in DEFAULTS if name in shared), None)


def best_of(settings: Sequence[SettingResult], sign: float) -> list[SettingResult]:
    """The complete setting with the best mean, then other complete ones whose intervals overlap with its own, or are
    not known; empty without a complete one. `sign`: 1 if the highest mean is best, else -1."""
    known = [(one, estimate) for one in settings if one.complete and (estimate := one.estimate) is not None]
    if not known:
        return []
    best, top = max(known, key=lambda pair: sign * pair[1].value)
    return [best, *(one for one, estimate in known if one is not best and _overlap(top, estimate))]


def _overlap(one: MeanEstimate, other: MeanEstimate) -> bool:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return True
    return one.low <= other.high and other.low <= one.high


def frontier(trials: Iterable[TrialResult]) -> list[tuple[float, float]]:
    """(KL, reward) of the trials that no other beats in both, by KL: the highest reward for at most so much KL."""
    known = {(trial.kl, trial.reward) for trial in trials if trial.kl is not None and trial.reward is not None}
    kept: list[tuple[float, float]] = []
    for kl, reward in sorted(known, key=lambda point: (point[0], -point[1])):
        if not kept or reward > kept[-1][1]:
            kept.append((kl, reward))
    return kept


def interval(low: float | None, high: float | None) -> str:
    """An interval as text, or empty if it is not known."""
    return "" if low is None else f"{low:.4g} to {high:.4g}"


def sentence(best: Sequence[SettingResult], metric: str) -> str:
    """The best setting with its interval, and which others cannot be told from it."""
    if not best or (found := best[0].estimate) is None:
        return "no setting is complete with all its seeds"
    seeds, bounds = len(best[0].trials), interval(found.low, found.high)
    said = f"best: {best[0].label}: {metric} {found.value:.4g}"
    said += f" ({bounds}, 95% interval over {seeds} seeds)" if bounds else ", without an interval"
    same = [one.label for one in best[1:] if one.results == best[0].results]
    others = [one.label for one in best[1:] if one.label not in same]
    said += f"; not separable from {_listed(others)}" if others else ""
    return f"{said}; the same to the last digit with {_listed(same)}: check that they differ" if same else said


def _listed(labels: Sequence[str], most: int = 4) -> str:
    return ", ".join(labels[:most]) + (f" and {len(labels) - most} more" if len(labels) > most else "")
