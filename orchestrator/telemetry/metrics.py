"""Metrics of a run: phase timers, peak memory and aggregation. Where they go: `orchestrator/telemetry/sinks.py`."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean

import numpy as np
import yaml

from troupe.orchestrator.roles import table
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.spec.derived.sampling import COMPARISONS
from troupe.workers.contract.config import BUDGETS
from troupe.workers.contract.messages import Answer, Peak, UpdateMetrics
from troupe.workers.contract.units import GIB
from troupe.workers.telemetry.peak_memory import resident_peak


class PhaseTimers:
    """Seconds spent in named phases since construction. Phases may overlap; each counts its own time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`record`: records the block of a phase of this name in the run's timeline."""
        self._clock = clock
        self._record = record
        self._started = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.failed = ""
        """Phase that has raised; empty if none has."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, also if it raises."""
        started = self._clock()
        try:
            with self._record(name):
                yield
        except BaseException:
            self.failed = name
            raise
        finally:
            self._seconds[name] += self._clock() - started

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; an open phase is added when it ends."""
        return dict(self._seconds)

    def total(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._started

    def shares(self) -> dict[str, float]:
        """Fraction of the total time by phase (its utilisation); empty if no time has passed."""
        total = self.total()
        return {name: seconds / total for name, seconds in self._seconds.items()} if total > 0 else {}


def std(values: Sequence[float]) -> float:
    """Population standard deviation; nan for no values."""
    return float(np.std(values)) if len(values) else math.nan


def merge_update_metrics(ranks: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Combine one update's metrics of all ranks: `sums` add up, `values` are equal on all. Raises ValueError without
    ranks, for a name of both, or if ranks disagree: they no longer hold the same model."""
    if not ranks:
        raise ValueError("an update has at least one rank")
    first = ranks[0]
    sums: defaultdict[str, float] = defaultdict(float)
    for rank, metrics in enumerate(ranks):
        if metrics.skipped != first.skipped or metrics.values.keys() != first.values.keys():
            raise ValueError(f"ranks 0 and {rank} disagree on whether the update was skipped, or on what to report")
        for name, value in metrics.values.items():
            if not _equal(value, first.values[name]):
                raise ValueError(f"ranks 0 and {rank} disagree on {name}: {first.values[name]} and {value}")
        for name, value in metrics.sums.items():
            sums[name] += value
    if both := sums.keys() & first.values.keys():
        raise ValueError(f"{min(both)} is both a sum and a value")
    return {**sums, **first.values}


def _equal(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-12)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of `k` samples is correct: 1 - C(samples - correct, k) /
    C(samples, k), equation 1 of Chen et al. 2021 (arXiv 2107.03374). Raises ValueError outside 0 <= correct <=
    samples, 1 <= k."""
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} is not defined for {correct} correct of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the best reward of `k` samples: the mean of the maximum over all subsets of this size, as
    `pass_at_k` of rewards of 0 and 1. The i-th smallest is the best of C(i - 1, k - 1) subsets. Raises ValueError
    outside 1 <= k <= the number of rewards."""
    if not 1 <= k <= len(rewards):
        raise ValueError(f"best@{k} is not defined for {len(rewards)} samples")
    subsets = math.comb(len(rewards), k)
    return sum(reward * (math.comb(i, k - 1) / subsets) for i, reward in enumerate(sorted(rewards)))


def merge_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over a step's updates that have a metric, and the largest of `_max`. A non-finite gradient norm (of a
    skipped update) counts only if none is finite."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    return {name: _merged(name, [metrics[name] for metrics in updates if name in metrics]) for name in names}


def _merged(name: str, values: Sequence[float]) -> float:
    if name.endswith("_max"):
        return math.nan if any(map(math.isnan, values)) else max(values)
    if name.endswith("/grad_norm"):
        values = [*filter(math.isfinite, values)] or values
    return fmean(values)


class PeakMemory:
    """Peak memory of the largest worker of each role, ended workers included, and of the driver process."""

    def __init__(self) -> None:
        self._roles: dict[str, Peak] = {}

    def note(self, worker: str, answer: object) -> None:
        """Record the peak that the answer of a worker (`rollout-0`) reports; an answer without one is ignored."""
        if isinstance(answer, Answer) and answer.peak is not None:
            role = role_of(worker)
            before = self.of(role)
            self._roles[role] = Peak(max(before.host, answer.peak.host), max(before.gpu, answer.peak.gpu))

    def of(self, role: str) -> Peak:
        """Peak of the largest worker of a role; 0 if none has reported."""
        return self._roles.get(role, Peak(0))

    def metrics(self) -> dict[str, float]:
        """`memory/ROLE`, `memory/driver` and, for roles with memory on GPUs, `memory/ROLE_gpu`, in GiB."""
        peaks = dict(sorted(self._roles.items())) | {"driver": Peak(resident_peak())}
        host = {f"memory/{role}": peak.host / GIB for role, peak in peaks.items()}
        return host | {f"memory/{role}_gpu": peak.gpu / GIB for role, peak in peaks.items() if peak.gpu}

    def summary(self) -> str:
        """One line: `policy 0.61, rollout 1.20, driver 0.31 GiB`."""
        parts = (f"{name.removeprefix('memory/')} {value:.2f}" for name, value in self.metrics().items())
        return f"{', '.join(parts)} GiB"


PHASES = ("generate", "prepare", "update", "sync", "evaluate", "checkpoint")
"""What `PHASE` in a pattern stands for: the phases of `seconds/PHASE` and `utilisation/PHASE`."""

_PLACEHOLDERS = {
    "TRAINER": "|".join(table.TRAINED),
    "ROLE": "|".join((*table.NAMES, r"(?:environment|teacher)\.[a-z0-9-]+")),
    "PHASE": "|".join(PHASES),
}
_PLACEHOLDERS |= {"COMPONENT": ".+", "LEVEL": ".+", "K": "[0-9]+", "SET": "[a-z0-9-]+", "SOURCE": "[a-z0-9-]+"}
_PLACEHOLDERS |= {"BUDGET": "|".join(BUDGETS), "ENVIRONMENT": "[a-z0-9-]+"}
_PLACEHOLDERS |= {"TEACHER": "[a-z0-9-]+", "MODEL": "[a-z0-9_-]+", "PLAYER": "[A-Za-z0-9._-]+"}
_OF_SETS = ("prompts", "refused", "failed_samples", "reward", "reward_low", "reward_high", "solved_at")
_OF_SETS += ("response_tokens", "truncated", "accuracy", "avg", "pass@[0-9]+", "maj@[0-9]+", "best@[0-9]+")
_OF_SETS += tuple(f"{name}{bound}" for name in COMPARISONS for bound in ("", "_low", "_high"))
_PLACEHOLDERS |= {"RESULT": "|".join(_OF_SETS), "COUNT": "rows|bad_rows|removed_rows|refused_rows"}
_PLACEHOLDER = re.compile(r"[A-Z]+")


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose names follow a pattern."""

    name: str
    """Name in `metrics.jsonl`. Words in capitals stand for a role, a phase, a reward component, a held-out set, a
    number, or another name."""
    meaning: str
    unit: str = "-"
    healthy: str = "-"
    """What to expect of a run that goes well; `-` if any value may be right."""

    def matches(self, name: str) -> bool:
        """Whether a metric of this name belongs to the row."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        pattern = "".join(f"(?:{_PLACEHOLDERS[part]})" if part in _PLACEHOLDERS else re.escape(part) for part in parts)
        return re.fullmatch(pattern, name) is not None


@cache
def metric_sections() -> dict[str, tuple[Metric, ...]]:
    """Every metric of `metrics.jsonl` (`metrics.yaml`), by section of the page."""
    text = files("troupe.orchestrator.telemetry").joinpath("metrics.yaml").read_text(encoding="utf-8")
    return {
        title: tuple(Metric(name, **fields) for name, fields in rows.items())
        for title, rows in yaml.safe_load(text).items()
    }


def metric_named(name: str) -> Metric | None:
    """The row that describes a metric, or None if the table has none."""
    rows = (row for section in metric_sections().values() for row in section)
    return next((row for row in rows if row.matches(name)), None)
