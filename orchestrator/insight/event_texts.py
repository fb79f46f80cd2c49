"""Events of a run as text for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]


def event_text(event: Event) -> str:
    """The event as one line of text; an event of an unknown kind is shown by its fields."""
    describe = _TEXTS.get(str(event.get("event")), _fields)
    return describe(event)


def _run_started(event: Event) -> str:
    resumed = event.get("resume_at")
    roles = _counts(event.get("roles"))
    start = f"run resumed after step {resumed}" if resumed else "run started"
    versions = event.get("versions")
    known = (
        ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, Mapping) else ""
    )
    return "; ".join(filter(None, [f"{start} with {roles}" if roles else start, known]))


def _run_ended(event: Event) -> str:
    error, detail = event.get("error"), event.get("detail")
    return ": ".join(str(part) for part in (f"run {event.get('how', 'ended')}", error, detail) if part)


def _worker(event: Event) -> str:
    what = str(event["event"]).removeprefix("worker_")
    detail = f" ({event['detail']})" if event.get("detail") else ""
    return f"{event.get('worker', 'a worker')} {what}{detail}"


def _checkpoint(event: Event) -> str:
    if not event.get("ok", True):
        return f"checkpoint failed: {event.get('detail')}"
    seconds = event.get("seconds")
    return "checkpoint saved" + (f" in {seconds:.2g} s" if isinstance(seconds, int | float) else "")


def _evaluation(event: Event) -> str:
    if not event.get("ok", True):
        return f"the evaluation of step {event.get('of')} is lost: {event.get('detail')}"
    return f"step {event.get('of')} evaluated beside training"


def _weights(event: Event) -> str:
    seconds = event.get("seconds")
    took = f" in {seconds:.2g} s" if isinstance(seconds, int | float) else ""
    to_nodes = event.get("to_nodes")
    away = f", {to_nodes / 1e6:.2g} MB to other nodes" if isinstance(to_nodes, int) and to_nodes else ""
    return f"weights of version {event.get('version')} sent{took}{away}"


def _fields(event: Event) -> str:
    rest = {name: value for name, value in event.items() if name not in {"time", "step", "event"}}
    shown = ", ".join(f"{name} {_plain(value)}" for name, value in rest.items())
    name = str(event.get("event", "event")).replace("_", " ")
    return f"{name}: {shown}" if shown else name


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _counts(workers: object) -> str:
    return ", ".join(f"{count} {role}" for role, count in workers.items()) if isinstance(workers, Mapping) else ""


def _names(workers: object) -> str:
    return ", ".join(map(str, workers)) if isinstance(workers, list) else str(workers)


def _number(count: object, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_TEXTS: Mapping[str, Callable[[Event], str]] = {
    "run_started": _run_started,
    "run_ended": _run_ended,
    "worker_started": _worker,
    "worker_replaced": _worker,
    "worker_lost": _worker,
    "slow_engine": lambda event: f"{event.get('worker')} {event.get('detail')}",
    "trainer_restarted": lambda event: f"trainers restarted: {_names(event.get('workers'))}",
    "dropped": lambda event: f"{_number(event.get('samples'), 'sample')} dropped: {event.get('reason')}",
    "retry": lambda event: f"{_number(event.get('groups'), 'group')} sampled again",
    "scaled": lambda event: f"workers changed to {_counts(event.get('workers')) or event.get('workers')}",
    "network": lambda event: f"{event.get('role')}: {event.get('detail')}",
    "opponent": lambda event: f"the opponent is the model of step {event.get('of')}",
    "offset": lambda event: str(event.get("detail")),
    "alarm": lambda event: f"alarm: {event.get('detail')}",
    "checkpoint": _checkpoint,
    "evaluation": _evaluation,
    "weights": _weights,
}
