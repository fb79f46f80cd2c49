"""A run's timeline as a trace file for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing), and its bottlenecks.

The format is the Trace Event Format: a process for each role, a thread for each worker. A call that overlaps no other
call of its worker is a complete slice (`X`); calls of one worker that overlap are asynchronous slices (`b`, `e`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.orchestrator.roles.names import section_of
from troupe.orchestrator.roles.table import NAMES, SAMPLERS, TRAINERS
from troupe.orchestrator.telemetry.timeline import DRIVER, OK
from troupe.workers.contract.atomic_file import replacing

Event = dict[str, Any]
Row = Mapping[str, Any]
"""A row of a TIMELINE table."""
_ORDER = ("driver", *NAMES)
"""Processes from top to bottom; others follow by name."""
_STEPS = "steps"
"""Name of the process that shows the steps."""
_MICRO = 1e6
Interval = tuple[float, float]


def trace_events(timeline: pa.Table) -> list[Event]:
    """The events of a TIMELINE table, metadata first."""
    rows = timeline.sort_by("start").to_pylist()
    if not rows:
        return []
    origin = rows[0]["start"]
    windows = step_windows(timeline)
    processes = {role: number for number, role in enumerate([_STEPS, *_roles(rows)], start=1)}
    threads = {worker: number for number, worker in enumerate(sorted({row["worker"] for row in rows}, key=_natural), 1)}
    events = list(_names(processes, threads, {row["worker"]: row["role"] for row in rows}))
    for step, (start, end) in windows.items():
        events.append(_slice(f"step {step}", "step", processes[_STEPS], 0, start - origin, end - start, {"step": step}))
    overlapping = _overlapping(rows)
    for number, row in enumerate(rows):
        place = processes[row["role"]], threads[row["worker"]]
        events += (
            _asynchronous(number, row, place, origin) if number in overlapping else [_complete(row, place, origin)]
        )
    return events


def write_trace(events: Sequence[Event], path: Path) -> None:
    """Writes the events as JSON, atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events}, file, allow_nan=False)


def _roles(rows: Sequence[Row]) -> list[str]:
    found = {row["role"] for row in rows}

    def place(role: str) -> tuple[int, str]:
        section = section_of(role)
        return _ORDER.index(section) if section in _ORDER else len(_ORDER), role

    return sorted(found, key=place)


def _natural(worker: str) -> tuple[str, int]:
    role, _, index = worker.rpartition("-")
    return (role, int(index)) if index.isdecimal() else (worker, 0)


def _names(processes: Mapping[str, int], threads: Mapping[str, int], roles: Mapping[str, str]) -> Iterator[Event]:
    """Metadata: what processes and threads are called, and their order."""
    for role, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for worker, tid in threads.items():
        pid = processes[roles[worker]]
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": worker}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _overlapping(rows: Sequence[Row]) -> set[int]:
    """Numbers of the rows that overlap another one of their worker; the rows are in order of their start."""
    found: set[int] = set()
    latest: dict[str, tuple[float, int]] = {}
    for number, row in enumerate(rows):
        end, other = latest.get(row["worker"], (0.0, -1))
        if other >= 0 and row["start"] < end:
            found |= {number, other}
        if row["end"] >= end:
            latest[row["worker"]] = (row["end"], number)
    return found


def _complete(row: Row, place: tuple[int, int], origin: float) -> Event:
    return _slice(_title(row), row["phase"], *place, row["start"] - origin, row["end"] - row["start"], _arguments(row))


def _asynchronous(number: int, row: Row, place: tuple[int, int], origin: float) -> list[Event]:
    common = {"name": _title(row), "cat": row["phase"], "id": f"0x{number:x}", "pid": place[0], "tid": place[1]}
    begin = {"ph": "b", "ts": _micros(row["start"] - origin), **common, "args": _arguments(row)}
    return [begin, {"ph": "e", "ts": _micros(row["end"] - origin), **common}]


def _slice(name: str, category: str, pid: int, tid: int, start: float, seconds: float, arguments: Event) -> Event:
    place = {"pid": pid, "tid": tid, "ts": _micros(start), "dur": _micros(max(0.0, seconds))}
    return {"ph": "X", "name": name, "cat": category, **place, "args": arguments}


def _title(row: Row) -> str:
    return row["method"] or row["phase"]


def _arguments(row: Row) -> Event:
    shown = {"step": row["step"], "worker": row["worker"]}
    shown |= {"detail": row["detail"]} if row["detail"] else {}
    return shown if row["status"] == OK else shown | {"status": row["status"]}


def _micros(seconds: float) -> float:
    return round(seconds * _MICRO, 1)


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
