"""Spans of workers as the page's data: who was busy in which step, and how long they stood idle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from troupe.orchestrator.insight.trace import covered
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.roles.names import role_of, section_of
from troupe.orchestrator.roles.table import NAMES, SAMPLERS, TRAINERS
from troupe.orchestrator.telemetry.timeline import DRIVER

Json = dict[str, Any]

Interval = tuple[float, float]


@dataclass(frozen=True)
class TimelineSpan:
    """One span of a worker."""

    role: str
    worker: str
    phase: str
    start: float
    end: float
    method: str = ""
    status: str = "ok"
    detail: str = ""


def spans_of(table: pa.Table) -> list[TimelineSpan]:
    """The spans of a table of the recording; rows with times that make no sense are left out."""
    rows = table.select(["role", "worker", "phase", "start", "end", "method", "status", "detail"]).to_pylist()
    return [TimelineSpan(**row) for row in rows if row["start"] is not None and row["end"] is not None and _sane(row)]


def _sane(row: Json) -> bool:
    return 0 < row["start"] <= row["end"]


def step_times(spans: Sequence[TimelineSpan], start: float, end: float) -> Json:
    """Busy and idle seconds of a step by role, and its bound.

    Args:
        spans: Spans that overlap the step.
        start: Start of the step.
        end: End of the step.

    Returns:
        `seconds`; `roles`: for every role its workers, and busy seconds by phase and idle seconds, each a mean over its
        workers; `R`, `T`: time of the busiest engine and of the busiest trainer; the step cannot take less than the
        larger of the two, however well they overlap.
    """
    window = (start, end)
    workers: dict[str, dict[str, list[TimelineSpan]]] = {}
    for span in spans:
        if span.role in _ROLES[1:] and span.end > start and span.start < end:
            workers.setdefault(span.role, {}).setdefault(span.worker, []).append(span)
    roles: Json = {}
    for role, of_role in workers.items():
        phases: dict[str, float] = {}
        for own in of_role.values():
            for phase in dict.fromkeys(span.phase for span in own):
                seconds = covered(_times(span for span in own if span.phase == phase), window)
                phases[phase] = phases.get(phase, 0.0) + seconds
        busy = sum(covered(_times(own), window) for own in of_role.values())
        roles[role] = {
            "workers": len(of_role),
            "busy": {name: round(seconds / len(of_role), 4) for name, seconds in phases.items()},
            "idle": round(end - start - busy / len(of_role), 4),
        }
    return {
        "seconds": round(end - start, 4),
        "roles": roles,
        "R": round(_longest(workers, SAMPLERS, window), 4),
        "T": round(_longest(workers, TRAINERS, window), 4),
    }


def _longest(workers: Json, roles: Sequence[str], window: Interval) -> float:
    return max((covered(_times(own), window) for role in roles for own in workers.get(role, {}).values()), default=0.0)


def _times(spans: Iterable[TimelineSpan]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]


def step_bounds(spans: Sequence[TimelineSpan]) -> tuple[float, float] | None:
    """Start and end of the step that a step's spans describe, from the driver's phases.

    A checkpoint counts in the next step's metrics, although its spans end before that step begins.
    """
    own = [span for span in spans if span.role == _ROLES[0] and span.phase != "checkpoint"] or list(spans)
    return (min(span.start for span in own), max(span.end for span in own)) if own else None


def timeline_block(
    step: int, spans: Sequence[TimelineSpan], bounds: tuple[float, float], crossing: Sequence[TimelineSpan]
) -> Json:
    """One step's spans for the page, times in milliseconds from the start of the step.

    `crossing`: calls that were open at its end, which count in the times of the step and are drawn in the next one.
    """
    start, end = bounds
    workers = sorted({(span.role, span.worker) for span in spans}, key=_lane)
    lanes = {worker: number for number, (_, worker) in enumerate(workers)}
    return {
        "step": step,
        "start": round(start, 3),
        "times": step_times([*spans, *crossing], start, end),
        "lanes": [[role, worker] for role, worker in workers],
        "spans": [
            [
                *(lanes[s.worker], s.phase, round(1000 * (s.start - start), 2), round(1000 * (s.end - start), 2)),
                *(s.method, s.status, s.detail[:120]),
            ]
            for s in sorted(spans, key=lambda s: s.start)
        ],
    }


_ROLES = (role_of(DRIVER), *NAMES)


def _lane(worker: tuple[str, str]) -> tuple[int, str, int, str]:
    role, name = worker
    number = name.rpartition("-")[2]
    section = section_of(role)
    return (
        _ROLES.index(section) if section in _ROLES else len(_ROLES),
        role,
        int(number) if number.isdigit() else 0,
        name,
    )


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
