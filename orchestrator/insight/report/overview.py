"""Data of the page about a run besides its samples and spans: verdicts, curves, ledger, weights, memory, spec."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.event_texts import event_text
from troupe.orchestrator.insight.report.comparison import MOST_POINTS, outcome, used
from troupe.orchestrator.insight.report.evaluations import evaluations
from troupe.orchestrator.insight.verdicts.apply import apply_rules
from troupe.orchestrator.insight.verdicts.comparable import comparable_history
from troupe.orchestrator.insight.verdicts.history import History, Series
from troupe.orchestrator.plan.plan import local_node, plan
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import read_file
from troupe.orchestrator.telemetry.metric_reference import Metric, metric_named, metric_sections
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.units import GIB

Json = dict[str, Any]

_MOST_EVENTS = 500
_OWN_SECTION = frozenset({"weights", "checkpoint"})
"""Events of every step, which are no news."""
_LONGEST_EVENT = 1000
_OTHER = "Other"
_STATE = "state.json"
"""What a checkpoint holds of the controller."""
_CHECKPOINT = re.compile(r"step-\d+")


def overview(run: RunFolder) -> Json:
    """The page's data of one run."""
    lines, events = run.metrics(), run.events()
    history = History.of(lines, run.spec, events)
    compared = comparable_history(run, history)
    spec = _loaded(run)
    return {
        "name": run.name,
        "folder": str(run.path),
        "algorithm": str(history.get("algorithm.name", "")),
        "model": str(history.get("model.path", "")),
        "steps_done": history.last_step,
        "steps": int(history.get("schedule.steps", 0)),
        "staleness": int(history.get("schedule.max_staleness", 0)),
        "outcome": outcome(compared),
        "used": used(lines),
        "evaluations": evaluations(run),
        "verdicts": [asdict(verdict) for verdict in apply_rules(compared)],
        "metrics": {name: _points(series) for name, series in history.metrics.items()},
        "resumes": resumes(lines, events),
        "ledger": _ledger(run, history),
        "weights": [_weights(event) for event in events if event.get("event") == "weights"][-_MOST_EVENTS:],
        "events": [_event(event) for event in events if event.get("event") not in _OWN_SECTION][-_MOST_EVENTS:],
        "memory": _memory(history, spec),
        "spec": yaml.safe_dump(run.spec, sort_keys=False, allow_unicode=True) if run.spec else "",
    }


def sections(names: Sequence[str]) -> list[Json]:
    """The metrics by section of the reference, in its order, each with what is known about it."""
    grouped: dict[str, list[Json]] = {title: [] for title in (*metric_sections(), _OTHER)}
    titles = {metric: title for title, rows in metric_sections().items() for metric in rows}
    for name in names:
        metric = metric_named(name) or Metric(name, unit="-", meaning="", healthy="-")
        grouped[titles.get(metric, _OTHER)].append(asdict(metric) | {"name": name})
    return [{"title": title, "metrics": rows} for title, rows in grouped.items() if rows]


def spec_differences(specs: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Every field whose value is not the same in all specs, with the value in each; `null` if it is missing."""
    flat = [dict(_flat(spec)) for spec in specs]
    fields = sorted({field for one in flat for field in one})
    rows = [(field, [one.get(field) for one in flat]) for field in fields]
    return [
        {"field": field, "values": [json.dumps(value, ensure_ascii=False) for value in values]}
        for field, values in rows
        if any(value != values[0] for value in values)
    ]


def resumes(lines: Sequence[Json], events: Sequence[Json]) -> list[int]:
    """Steps after which the run was stopped and resumed: from the events, else from lines that repeat a step."""
    recorded = [event.get("resume_at") for event in events if event.get("event") == "run_started"]
    found = {step for step in recorded if isinstance(step, int) and step > 0}
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    found |= {after - 1 for before, after in itertools.pairwise(steps) if after <= before and after > 0}
    return sorted(found)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def _points(series: Series) -> Json:
    """Steps and values; of a long series the least and the largest value of every bucket, so that spikes stay."""
    pairs = [(step, _short(value)) for step, value in series]
    if len(pairs) > MOST_POINTS:
        size = math.ceil(len(pairs) / (MOST_POINTS // 2))
        buckets = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        ends = [{min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])} for b in buckets]
        pairs = sorted(point for pair in ends for point in pair)
    return {"steps": [step for step, _ in pairs], "values": [value for _, value in pairs]}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _loaded(run: RunFolder) -> RunSpec | None:
    try:
        return parse_spec(read_file(run.path / "spec.yaml"))
    except (TroupeError, OSError, ValueError):
        return None


def _ledger(run: RunFolder, history: History) -> Json:
    """Counts of the last step, and dropped samples by reason."""
    counts = {s.name.removeprefix("ledger/"): s.values[-1] for s in history.named("ledger/")}
    reasons: dict[str, float] = {}
    for event in history.events:
        if event.get("event") == "dropped" and isinstance(event.get("samples"), int):
            reason = str(event.get("reason"))[:200]
            reasons[reason] = reasons.get(reason, 0) + event["samples"]
    return {"counts": counts, "reasons": reasons or _saved_reasons(run.path / "checkpoints")}


def _saved_reasons(checkpoints: Path) -> dict[str, float]:
    """Drop reasons in the newest checkpoint."""
    folders = sorted(path for path in checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
    if not folders:
        return {}
    try:
        dropped = json.loads((folders[-1] / _STATE).read_bytes())["ledger"]["dropped"]
        return {str(reason)[:200]: float(count) for reason, count in dropped.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _event(event: Mapping[str, Any]) -> Json:
    return {"time": event.get("time"), "step": event.get("step"), "text": event_text(event)[:_LONGEST_EVENT]}


def _weights(event: Mapping[str, Any]) -> Json:
    engines = event.get("engines")
    digests = engines if isinstance(engines, Mapping) else {}
    digest = str(event.get("digest") or "")
    return {
        "step": event.get("step"),
        "version": event.get("version"),
        "digest": digest,
        "bytes": event.get("bytes"),
        "seconds": event.get("seconds"),
        "engines": {str(name): str(value) for name, value in digests.items()},
        "equal": all(str(value) == digest for value in digests.values()) if digests and digest else None,
    }


def _memory(history: History, spec: RunSpec | None) -> Json:
    """Peak memory by role in GiB, with the plan's."""
    peaks = {s.name.removeprefix("memory/"): s.values[-1] for s in history.named("memory/")}
    planned: dict[str, float] = {}
    problem = "" if spec else "the spec cannot be read"
    if spec is not None:
        try:
            found = plan(spec, [local_node(os.cpu_count() or 1, spec)]).memory
        except (TroupeError, OSError, ValueError, KeyError) as error:
            problem = str(error)
        else:
            for worker in found.workers:
                name = role_of(worker.worker) + ("_gpu" if worker.where == "gpu" else "")
                planned[name] = max(planned.get(name, 0.0), worker.total / GIB)
            problem = "; ".join(f"the size of {model.path} is not known: {model.why}" for model in found.unknown)
    return {"peaks": peaks, "planned": planned, "problem": problem}
