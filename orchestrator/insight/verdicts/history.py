"""The record of a run, as the rules read it: metrics as series over the steps, and the fields of its spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.live.run_state import RunState, state_of
from troupe.orchestrator.telemetry.run_folder import RunFolder

SHORTEST = 3
"""Fewest values in a row that show something: one or two may be chance."""
EQUAL = 1e-9
"""Spread of rewards up to which they are equal."""
FEW_MIXED = 0.1
"""Share of groups with different rewards below which most of a batch is wasted."""


@dataclass(frozen=True)
class Stretch:
    """Steps in a row at which something holds."""

    start: int
    end: int
    ongoing: bool
    """Whether it reaches to the last value."""

    @property
    def until(self) -> int | None:
        """The last step if it has ended, else None."""
        return None if self.ongoing else self.end


@dataclass(frozen=True)
class Series:
    """A metric over the steps that have it."""

    name: str
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(zip(self.steps, self.values, strict=True))

    @property
    def window(self) -> int:
        """Values that stand for the start or the end of the run: a tenth of them, at least three."""
        return max(SHORTEST, len(self) // 10)

    @property
    def first(self) -> float:
        """Median at the start; nan for no values."""
        return _median(self.values[: self.window])

    @property
    def last(self) -> float:
        """Median at the end; nan for no values."""
        return _median(self.values[-self.window :])

    @property
    def median(self) -> float:
        """Median of all values; nan for none."""
        return _median(self.values)

    @property
    def highest(self) -> float:
        """Largest value; nan for none."""
        return max(self.values, default=math.nan)

    @property
    def smooth(self) -> Series:
        """Median of each value and its neighbours: single outliers are gone."""
        parts = (self.values[max(0, i - 1) : i + 2] for i in range(len(self)))
        return Series(self.name, self.steps, tuple(map(_median, parts)))

    def after(self, step: int) -> Series:
        return self.where(lambda at, _: at > step)

    def during(self, found: Stretch) -> Series:
        """The part within a stretch."""
        return self.where(lambda at, _: found.start <= at <= found.end)

    def typical(self, found: Stretch) -> float:
        """Median of the smoothed values within a stretch: of the last ones if it is ongoing, of all if it is over. For
        a stretch of this series that is a value for which its condition holds."""
        part = self.smooth.during(found)
        return part.last if found.ongoing else part.median

    def map(self, function: Callable[[float], float]) -> Series:
        """The series of a function of the values."""
        return Series(self.name, self.steps, tuple(map(function, self.values)))

    def stretch(self, holds: Callable[[float], bool], at_least: int = SHORTEST) -> Stretch | None:
        """The longest stretch of smoothed values for which `holds` is true; the one that reaches the end wins. None if
        no stretch has `at_least` values."""
        found = [part for part in self._stretches(holds) if part[1] - part[0] + 1 >= at_least]
        if not found:
            return None
        final = found[-1][1] == len(self) - 1
        start, end = found[-1] if final else max(found, key=lambda part: part[1] - part[0])
        return Stretch(self.steps[start], self.steps[end], final)

    def _stretches(self, holds: Callable[[float], bool]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for i, value in enumerate(self.smooth.values):
            if not holds(value):
                continue
            if found and found[-1][1] == i - 1:
                found[-1] = (found[-1][0], i)
            else:
                found.append((i, i))
        return found

    def trend(self) -> Trend:
        """How the end differs from the start, and the noise."""
        size = max(SHORTEST, len(self) // 4)
        head, tail = self.values[:size], self.values[-size:]
        if len(self) < 2 * SHORTEST:
            return Trend(0.0, math.inf)
        jumps = [abs(b - a) for a, b in zip(self.values, self.values[1:], strict=False)]
        # Differences of neighbours hold no trend: for independent noise their mean is 1.13 standard deviations.
        noise = fmean(jumps) / 1.13 * math.sqrt(2 / size)
        return Trend(fmean(tail) - fmean(head), noise)

    def where(self, keep: Callable[[int, float], bool]) -> Series:
        """The part for whose steps and values `keep` is true."""
        kept = [(step, value) for step, value in self if keep(step, value)]
        return Series(self.name, tuple(step for step, _ in kept), tuple(value for _, value in kept))


@dataclass(frozen=True)
class Trend:
    """Change from the first to the last quarter of a series."""

    change: float
    noise: float
    """Standard error of the change if the values only fluctuate."""

    @property
    def rises(self) -> bool:
        """Whether the rise is more than noise."""
        return self.change > 3 * self.noise

    @property
    def falls(self) -> bool:
        """Whether the fall is more than noise."""
        return -self.change > 3 * self.noise


@dataclass(frozen=True)
class History:
    """One run."""

    metrics: Mapping[str, Series]
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The resolved spec as plain data; the rules bear fields that are missing."""
    events: Sequence[Mapping[str, Any]] = ()
    nulls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Steps at which a metric was not finite."""
    state: RunState = field(default_factory=RunState)

    @classmethod
    def read(cls, run: RunFolder, lines: Sequence[Mapping[str, Any]]) -> History:
        """The history in a run's folder, with its state; `lines`: its metrics."""
        found = cls.of(lines, run.spec, run.events())
        total = int(found.get("schedule.steps", 0))
        return replace(found, state=state_of(found.events, LockHolder.of(run.path), found.last_step, total))

    @classmethod
    def of(
        cls,
        lines: Sequence[Mapping[str, Any]],
        spec: Mapping[str, Any] | None = None,
        events: Sequence[Mapping[str, Any]] = (),
    ) -> History:
        """The history in the lines of `metrics.jsonl`. A later line of the same step wins, as after a resumption."""
        rows = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
        steps: dict[str, list[int]] = {}
        values: dict[str, list[float]] = {}
        nulls: dict[str, list[int]] = {}
        for step, row in sorted(rows.items()):
            for name, value in row.items():
                if name in {"step", "time"} or isinstance(value, bool | str):
                    continue
                if isinstance(value, int | float) and math.isfinite(value):
                    steps.setdefault(name, []).append(step)
                    values.setdefault(name, []).append(float(value))
                elif value is None or isinstance(value, float):
                    nulls.setdefault(name, []).append(step)
        series = {name: Series(name, tuple(at), tuple(values[name])) for name, at in steps.items()}
        return cls(series, spec or {}, events, {name: tuple(at) for name, at in nulls.items()})

    def without(self, names: tuple[str, ...], steps: Set[int]) -> History:
        """The record without the metrics whose names begin so, at these steps."""
        if not steps:
            return self
        metrics = {
            name: series.where(lambda step, _: step not in steps) if name.startswith(names) else series
            for name, series in self.metrics.items()
        }
        return replace(self, metrics={name: series for name, series in metrics.items() if series})

    def __getitem__(self, name: str) -> Series:
        """A metric, or an empty series if the run does not have it."""
        return self.metrics.get(name, Series(name))

    def named(self, prefix: str) -> list[Series]:
        return [series for name, series in self.metrics.items() if name.startswith(prefix)]

    def get(self, path: str, default: Any = None) -> Any:
        """A field of the spec by its dotted path; `default` if it is missing or null."""
        node: Any = self.spec
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        return default if node is None else node

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 for none."""
        return max((series.steps[-1] for series in self.metrics.values()), default=0)

    @property
    def capacity(self) -> Mapping[str, float]:
        """`CPU` and `GPU` of the cluster when the run started last; empty if they are not recorded."""
        started = [event.get("capacity") for event in self.events if event.get("event") == "run_started"]
        return started[-1] if started and isinstance(started[-1], Mapping) else {}

    def share_of_samples(self, counted: Series) -> Series:
        """Counts of samples as shares of those dispatched for the step, or of the spec's batch in older records."""
        dispatched = dict(self["dispatched_samples"])
        shares = [
            (step, count / size) for step, count in counted if (size := dispatched.get(step, self._samples_per_batch))
        ]
        return Series(counted.name, tuple(step for step, _ in shares), tuple(share for _, share in shares))

    @property
    def _samples_per_batch(self) -> int:
        """Samples of a step's batch, the most if sources differ; 0 if the spec does not set it."""
        return int(self.get("schedule.prompts_per_step", 0)) * max(self.group_sizes)

    @property
    def group_sizes(self) -> frozenset[int]:
        """Samples per prompt, of all sources; 1 if the spec does not set it."""
        usual = int(self.get("algorithm.group_size", 1))
        own = [one.get("group_size") for one in self.sources]
        return frozenset(size or usual for size in own or [usual])

    @property
    def sources(self) -> Sequence[Mapping[str, Any]]:
        """The sources of a mixture; empty if there is one source."""
        sources = self.get("data.train")
        return [one for one in sources if isinstance(one, Mapping)] if isinstance(sources, list) else []

    @property
    def alone(self) -> bool:
        """Whether groups have one sample: nothing is compared within them."""
        return self.get("algorithm.group_size") is not None and self.group_sizes == {1}

    @property
    def no_signal(self) -> bool:
        """Whether the samples of the last steps have equal rewards."""
        return self["reward/std"].last <= EQUAL or (not self.alone and self["groups/mixed"].last <= FEW_MIXED)

    @property
    def reward_rises(self) -> bool:
        """Whether the reward is better at the end than at the start."""
        return self["reward/mean"].trend().rises


def _median(values: Sequence[float]) -> float:
    return median(values) if values else math.nan
