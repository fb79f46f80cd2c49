"""How busy every role was, and the bottleneck of each step, from the timeline."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from troupe.orchestrator.roles.table import SAMPLERS, TRAINERS
from troupe.orchestrator.telemetry.timeline import DRIVER

Interval = tuple[float, float]


@dataclass(frozen=True)
class RoleTime:
    """Time of one role within windows."""

    role: str
    workers: int
    busy_s: float
    """Mean over its workers of the time in which at least one call was open."""
    wall_s: float
    """Length of the windows."""

    @property
    def idle_s(self) -> float:
        """Mean time in which none was."""
        return max(0.0, self.wall_s - self.busy_s)

    @property
    def share(self) -> float:
        """Fraction of the windows in which a worker was busy."""
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
    """Start and end of every step, from the controller's phases.

    Step 0, the start of a run, is left out. A checkpoint is recorded with the next step, which begins after it. What
    lies between two steps, such as the hours until a run was resumed, belongs to none.
    """
    found: dict[int, Interval] = {}
    columns = (timeline[name].to_pylist() for name in ("step", "worker", "phase", "start", "end"))
    for step, worker, phase, start, end in zip(*columns, strict=True):
        if worker == DRIVER and step > 0 and phase != "checkpoint":
            first, last = found.get(step, (start, end))
            found[step] = min(first, start), max(last, end)
    return dict(sorted(found.items()))


def busy_roles(timeline: pa.Table, windows: Sequence[Interval]) -> list[RoleTime]:
    """Every role's time within the windows, by role. Calls that are open at once count once."""
    wall = sum(end - start for start, end in windows)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for (role, _), busy in sorted(_by_worker(timeline).items()):
        times[role].append(sum(_seconds(busy, window) for window in windows))
    return [RoleTime(role, len(one), sum(one) / len(one), wall) for role, one in times.items()]


def step_bounds(timeline: pa.Table) -> list[StepBound]:
    """The bound of every step."""
    workers = _by_worker(timeline)

    def longest(roles: Sequence[str], window: Interval) -> float:
        return max((_seconds(busy, window) for (role, _), busy in workers.items() if role in roles), default=0.0)

    return [
        StepBound(step, window[1] - window[0], longest(SAMPLERS, window), longest(TRAINERS, window))
        for step, window in step_windows(timeline).items()
    ]


def covered(spans: Iterable[Interval], window: Interval) -> float:
    """Seconds of the window that are in at least one of the spans."""
    return _seconds(_joined(spans), window)


def _joined(spans: Iterable[Interval]) -> list[Interval]:
    """The time that is in at least one of the spans: intervals in order that do not overlap."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _seconds(busy: Sequence[Interval], window: Interval) -> float:
    """Seconds of the window that are in one of these intervals, which are in order and do not overlap."""
    total = 0.0
    for i in range(bisect_right(busy, window[0], key=lambda one: one[1]), len(busy)):
        start, end = busy[i]
        if start >= window[1]:
            break
        total += min(end, window[1]) - max(start, window[0])
    return total


def _by_worker(timeline: pa.Table) -> Mapping[tuple[str, str], list[Interval]]:
    """Intervals in which every worker had a call open, by role and name."""
    found: defaultdict[tuple[str, str], list[Interval]] = defaultdict(list)
    columns = (timeline[name].to_pylist() for name in ("role", "worker", "start", "end"))
    for role, worker, start, end in zip(*columns, strict=True):
        found[role, worker].append((start, end))
    return {worker: _joined(spans) for worker, spans in found.items()}
