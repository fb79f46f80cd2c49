"""A run's timeline as a trace file for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing).

The format is the Trace Event Format: a process for each role, a thread for each worker. A call that overlaps no other
call of its worker is a complete slice (`X`); calls of one worker that overlap are asynchronous slices (`b`, `e`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.orchestrator.roles.names import section_of
from troupe.orchestrator.roles.table import NAMES
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


def step_windows(timeline: pa.Table) -> dict[int, Interval]:
    """Start and end of every step but 0, from the controller's phases. A checkpoint is recorded with the step after
    it; what lies between two steps, such as the time until a resumption, belongs to none."""
    found: dict[int, Interval] = {}
    columns = (timeline[name].to_pylist() for name in ("step", "worker", "phase", "start", "end"))
    for step, worker, phase, start, end in zip(*columns, strict=True):
        if worker == DRIVER and step > 0 and phase != "checkpoint":
            first, last = found.get(step, (start, end))
            found[step] = min(first, start), max(last, end)
    return dict(sorted(found.items()))
