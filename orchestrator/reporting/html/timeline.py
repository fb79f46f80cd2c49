"""Spans of workers as the page's data: who was busy in which step, and how long they stood idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from orchestrator.reporting.verdicts.history import History

Json = dict[str, Any]

DRIVER = "driver"
SAMPLING, TRAINING = ("generate",), ("prepare", "update", "publish")
"""Phases that make up R, the time of the engines, and T, the time of the trainers."""


@dataclass(frozen=True)
class Span:
    """One span of a worker."""

    role: str
    worker: str
    phase: str
    start: float
    end: float
    method: str = ""
    status: str = "ok"
    detail: str = ""


def spans_of(table: pa.Table) -> list[Span]:
    """The spans of a table of the recording; rows with times that make no sense are left out."""
    rows = table.select(["role", "worker", "phase", "start", "end", "method", "status", "detail"]).to_pylist()
    return [Span(**row) for row in rows if row["start"] is not None and row["end"] is not None and _sane(row)]


def _sane(row: Json) -> bool:
    return 0 < row["start"] <= row["end"]


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def step_times(spans: Sequence[Span], start: float, end: float) -> Json:
    """Busy and idle seconds of a step by role, and its bound.

    Args:
        spans: Spans that overlap the step.
        start: Start of the step.
        end: End of the step.

    Returns:
        `seconds`; `roles`: for every role its workers, and busy seconds by phase and idle seconds, each a mean over its
        workers; `R`, `T`: means over engines and trainers of the time they work; the step cannot take less than the
        larger of the two, however well they overlap.
    """
    workers: dict[str, dict[str, list[Span]]] = {}
    for span in spans:
        if span.role in _ROLES[1:] and span.end > start and span.start < end:
            workers.setdefault(span.role, {}).setdefault(span.worker, []).append(span)
    roles: Json = {}
    for role, of_role in workers.items():
        phases: dict[str, float] = {}
        idle = 0.0
        for own in of_role.values():
            clipped = [(s.phase, max(s.start, start), min(s.end, end)) for s in own]
            idle += (end - start) - union((a, b) for _, a, b in clipped)
            for phase in dict.fromkeys(name for name, _, _ in clipped):
                seconds = union((a, b) for name, a, b in clipped if name == phase)
                phases[phase] = phases.get(phase, 0.0) + seconds
        count = len(of_role)
        roles[role] = {
            "workers": count,
            "busy": {name: round(seconds / count, 4) for name, seconds in phases.items()},
            "idle": round(idle / count, 4),
        }
    return {
        "seconds": round(end - start, 4),
        "roles": roles,
        "R": round(_work(workers.get("rollout", {}), SAMPLING, start, end), 4),
        "T": round(
            max((_work(workers.get(r, {}), TRAINING, start, end) for r in ("policy", "critic")), default=0.0), 4
        ),
    }


def _work(of_role: dict[str, list[Span]], phases: Sequence[str], start: float, end: float) -> float:
    parts = [
        union(
            (max(s.start, start), min(s.end, end)) for s in own if s.phase in phases and s.end > start and s.start < end
        )
        for own in of_role.values()
    ]
    return sum(parts) / len(parts) if parts else 0.0


def step_bounds(spans: Sequence[Span]) -> tuple[float, float] | None:
    """Start and end of the step that a step's spans describe: those of the driver's phases."""
    own = [span for span in spans if span.role == DRIVER] or list(spans)
    return (min(span.start for span in own), max(span.end for span in own)) if own else None


def timeline_block(step: int, spans: Sequence[Span]) -> Json | None:
    """One step's spans for the page, times in milliseconds from the start of the step; None where there are none."""
    bounds = step_bounds(spans)
    if bounds is None:
        return None
    start, end = bounds
    workers = sorted({(span.role, span.worker) for span in spans}, key=_lane)
    lanes = {worker: number for number, (_, worker) in enumerate(workers)}
    return {
        "step": step,
        "start": round(start, 3),
        "times": step_times(spans, start, end),
        "lanes": [[role, worker] for role, worker in workers],
        "spans": [
            [
                *(lanes[s.worker], s.phase, round(1000 * (s.start - start), 2), round(1000 * (s.end - start), 2)),
                *(s.method, s.status, s.detail[:120]),
            ]
            for s in sorted(spans, key=lambda s: s.start)
        ],
    }


_ROLES = (DRIVER, "rollout", "environment", "judge", "reward", "reference", "policy", "critic")


def _lane(worker: tuple[str, str]) -> tuple[int, str, int, str]:
    role, name = worker
    number = name.rpartition("-")[2]
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), role, int(number) if number.isdigit() else 0, name)


def phases_from_metrics(history: History) -> list[Json]:
    """Seconds of each step by the controller's phase, with R and T as far as metrics alone can say.

    In a synchronous run R is the time it waits for samples; with staleness that is only what the engines need beyond
    the updates, so that R is at least that.
    """
    names = ("generate", "prepare", "update", "sync", "evaluate", "checkpoint")
    columns = {name: dict(history[f"seconds/{name}"]) for name in names}
    found = []
    for step, seconds in history["seconds/step"]:
        phases = {name: round(column.get(step, 0.0), 4) for name, column in columns.items()}
        training = phases["prepare"] + phases["update"] + phases["sync"]
        found.append(
            {"step": step, "seconds": round(seconds, 4), "phases": phases, "R": phases["generate"], "T": training}
        )
    return found
