"""How busy every role was, and what bounds a step: figures from the timeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from orchestrator.reporting.timeline import DRIVER

ENGINES = ("rollout",)
"""Roles whose time is R: they generate."""
TRAINERS = ("policy", "critic")
"""Roles whose time is T: they train."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class RoleTime:
    """Time of one role within a window."""

    role: str
    workers: int
    busy_s: float
    """Mean over its workers of the time in which at least one call was open."""
    longest_s: float
    """That of its busiest worker."""
    wall_s: float
    """Length of the window."""

    @property
    def share(self) -> float:
        """Fraction of the window in which a worker was busy."""
        return self.busy_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class StepBound:
    """What a step took, and what it would take at least."""

    step: int
    wall_s: float
    rollout_s: float
    """R: time of the busiest engine."""
    train_s: float
    """T: time of the busiest trainer."""

    @property
    def bound_s(self) -> float:
        """max(R, T): a step cannot be shorter while engines and trainers stay as they are."""
        return max(self.rollout_s, self.train_s)

    @property
    def limit(self) -> str:
        """Which of the two bounds the step."""
        return "engines" if self.rollout_s >= self.train_s else "trainers"


def step_windows(timeline: pa.Table) -> dict[int, Interval]:
    """Start and end of every step that has phases of the controller: from the end of the step before to its own end.

    Step 0, the start of a run, is left out.
    """
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    columns = (timeline[name].to_pylist() for name in ("step", "worker", "start", "end"))
    for step, worker, start, end in zip(*columns, strict=True):
        if worker == DRIVER and step > 0:
            ends[step] = max(ends.get(step, end), end)
            starts[step] = min(starts.get(step, start), start)
    return {step: (ends.get(step - 1, starts[step]), ends[step]) for step in sorted(ends)}


def busy_roles(timeline: pa.Table, window: Interval) -> list[RoleTime]:
    """Every role's time within the window, by role. Calls that are open at once count once."""
    start, end = window
    wall = end - start
    times: defaultdict[str, list[float]] = defaultdict(list)
    for (role, _), spans in sorted(_by_worker(timeline).items()):
        times[role].append(covered(spans, window))
    return [RoleTime(role, len(one), sum(one) / len(one), max(one), wall) for role, one in times.items()]


def step_bounds(timeline: pa.Table) -> list[StepBound]:
    """The bound of every step."""
    workers = _by_worker(timeline)

    def longest(roles: Sequence[str], window: Interval) -> float:
        return max((covered(spans, window) for (role, _), spans in workers.items() if role in roles), default=0.0)

    return [
        StepBound(step, window[1] - window[0], longest(ENGINES, window), longest(TRAINERS, window))
        for step, window in step_windows(timeline).items()
    ]


def covered(spans: Iterable[Interval], window: Interval) -> float:
    """Seconds of the window that are in at least one of the spans."""
    total, reached = 0.0, window[0]
    for start, end in sorted(spans):
        begin, stop = max(start, reached), min(end, window[1])
        if stop > begin:
            total, reached = total + stop - begin, stop
    return total


def _by_worker(timeline: pa.Table) -> Mapping[tuple[str, str], list[Interval]]:
    """The spans of every worker, by role and name."""
    found: defaultdict[tuple[str, str], list[Interval]] = defaultdict(list)
    columns = (timeline[name].to_pylist() for name in ("role", "worker", "start", "end"))
    for role, worker, start, end in zip(*columns, strict=True):
        found[role, worker].append((start, end))
    return found
