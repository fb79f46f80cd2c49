"""Data of the page about a run besides its samples: verdicts, results, curves, ledger, weights, memory, spec."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.insight.event_texts import event_text
from troupe.orchestrator.insight.verdicts.apply import apply_rules, comparable_history
from troupe.orchestrator.insight.verdicts.history import History, Series
from troupe.orchestrator.plan.plan import local_node, plan
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, comparable, read_evaluations
from troupe.orchestrator.rollouts.held_out import is_share
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import read_file
from troupe.orchestrator.telemetry.metrics import Metric, metric_named, metric_sections
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.orchestrator.telemetry.run_summary import LEARNED
from troupe.workers.contract.text import without_secrets
from troupe.workers.contract.units import GIB

Json = dict[str, Any]
_MOST_EVENTS = 500
"""Events that the page keeps, over all runs."""
_OWN_SECTION = frozenset({"weights", "checkpoint"})
"""Events of every step, which are no news."""
_LONGEST_EVENT = 1000
_OTHER = "Other"
MOST_POINTS, MOST_SHARED, LEAST_POINTS = 2000, 1500, 250
"""Points of a curve that the page keeps: of one run; of all runs together; and of each of many."""
_HELD_OUT = ("eval/accuracy", "eval/reward", "eval/loss")
_SET_REWARD = re.compile(r"eval/[a-z0-9-]+/reward")
_SPEEDS = ("response_tokens_per_s", "tokens_per_s")
"""Tokens over the seconds of whole steps, of a run with rollouts and of an offline run."""
_USED = {"tokens": "tokens", "seconds": "seconds/step"}
"""Other x axes than the step, and the metrics that add up to them."""


def overview(run: RunFolder, runs: int = 1) -> Json:
    """The page's data of one of several runs."""
    most = MOST_POINTS if runs == 1 else max(LEAST_POINTS, MOST_SHARED // runs)
    latest = max(1, _MOST_EVENTS // runs)
    lines = run.metrics()
    history = History.read(run, lines)
    events = history.events
    compared = comparable_history(run, history)
    spec = _loaded(run)
    return {
        "name": run.name,
        "folder": str(run.path),
        "algorithm": str(history.get("algorithm.name", "")),
        "model": str(history.get("model.path", "")),
        "steps_done": history.last_step,
        "steps": history.state.total,
        "state": history.state.name,
        "traced": bool(run.timeline_files()),
        "outcome": outcome(compared),
        "used": used(lines),
        "evaluations": evaluations(run),
        "verdicts": [asdict(verdict) for verdict in apply_rules(compared)],
        "metrics": {name: _points(series, most) for name, series in history.metrics.items()},
        "resumes": resumes(events),
        "ledger": _ledger(history),
        "weights": [_weights(event) for event in events if event.get("event") == "weights"][-latest:],
        "events": [_event(event) for event in events if event.get("event") not in _OWN_SECTION][-latest:],
        "memory": _memory(history, spec),
        "spec": yaml.safe_dump(without_secrets(run.spec), sort_keys=False, allow_unicode=True) if run.spec else "",
    }


def sections(names: Sequence[str]) -> list[Json]:
    """The metrics by section of the reference, in its order, each with what is known about it."""
    grouped: dict[str, list[Json]] = {title: [] for title in (*metric_sections(), _OTHER)}
    titles = {metric: title for title, rows in metric_sections().items() for metric in rows}
    for name in names:
        metric = metric_named(name) or Metric(name, meaning="")
        grouped[titles.get(metric, _OTHER)].append(asdict(metric) | {"name": name})
    return [{"title": title, "metrics": rows} for title, rows in grouped.items() if rows]


def spec_differences(specs: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Every field whose value is not the same in all specs, with the value in each; `null` if it is missing."""
    flat = [dict(_flat(without_secrets(spec))) for spec in specs]
    fields = sorted({field for one in flat for field in one})
    rows = [(field, [one.get(field) for one in flat]) for field in fields]
    return [
        {"field": field, "values": [json.dumps(value, ensure_ascii=False) for value in values]}
        for field, values in rows
        if any(value != values[0] for value in values)
    ]


def resumes(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Steps after which the run was stopped and resumed."""
    recorded = {event.get("resume_at") for event in events if event.get("event") == "run_started"}
    return sorted(step for step in recorded if isinstance(step, int) and step > 0)


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def _points(series: Series, most: int) -> Json:
    """Steps and values; of a long series the least and the largest value of every bucket, so that spikes stay."""
    pairs = [(step, float(f"{value:.6g}")) for step, value in series]
    if len(pairs) > most:
        size = math.ceil(len(pairs) / (most // 2))
        buckets = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        ends = [{min(b, key=lambda p: p[1]), max(b, key=lambda p: p[1])} for b in buckets]
        pairs = sorted(point for pair in ends for point in pair)
    return {"steps": [step for step, _ in pairs], "values": [value for _, value in pairs]}


def _loaded(run: RunFolder) -> RunSpec | None:
    try:
        return parse_spec(read_file(run.path / "spec.yaml"))
    except (TroupeError, OSError, ValueError):
        return None


def _ledger(history: History) -> Json:
    """Counts of the last step, and dropped samples by reason."""
    counts = {s.name.removeprefix("ledger/"): s.values[-1] for s in history.named("ledger/")}
    reasons: dict[str, float] = {}
    for event in history.events:
        if event.get("event") == "dropped" and isinstance(event.get("samples"), int):
            reason = str(event.get("reason"))[:200]
            reasons[reason] = reasons.get(reason, 0) + event["samples"]
    return {"counts": counts, "reasons": reasons}


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


def labels(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Distinct labels: the name of a run; if several share it, as much of the path of the folder as is needed."""
    shared = Counter(names)
    alike = [folder.resolve() for name, folder in zip(names, folders, strict=True) if shared[name] > 1]
    pairs = zip(names, folders, strict=True)
    return [name if shared[name] == 1 else _ending(folder.resolve(), alike) for name, folder in pairs]


def _ending(folder: Path, alike: Sequence[Path]) -> str:
    """The shortest ending of a path that no other path has, or the whole path."""
    for depth in range(1, len(folder.parts)):
        ending = folder.parts[-depth:]
        if sum(other.parts[-depth:] == ending for other in alike) == 1:
            return "/".join(ending)
    return str(folder)


def outcome(history: History) -> Json:
    """The results that the table of runs shows; null if a run does not have them."""
    learned = next((metric for _, metric, _ in LEARNED if history[metric]), None)
    held_out = next((metric for metric in (*_HELD_OUT, *_first_set(history)) if history[metric]), None)
    return {
        "learned": _change(history, learned),
        "held_out": _ends(history, held_out),
        "tokens_per_s": next((history[name].median for name in _SPEEDS if history[name]), None),
        "tokens": sum(history["tokens"].values),
        "seconds": sum(history["seconds/step"].values),
    }


def _first_set(history: History) -> Sequence[str]:
    """The results of the first held-out set with a name."""
    first = next((name for name in history.metrics if _SET_REWARD.fullmatch(name)), None)
    return () if first is None else (f"{first.removesuffix('reward')}avg", first)


def _change(history: History, metric: str | None) -> Json | None:
    return None if metric is None else {"name": metric, "first": history[metric].first, "last": history[metric].last}


def _ends(history: History, metric: str | None) -> Json | None:
    if metric is None:
        return None
    values = history[metric].values
    return {"name": metric, "first": values[0], "last": values[-1]}


def used(lines: Sequence[Mapping[str, Any]]) -> dict[str, Json]:
    """Tokens trained and seconds spent up to each step, without the time between a stop and a resumption."""
    rows = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    found: dict[str, Json] = {}
    for axis, metric in _USED.items():
        total = 0.0
        steps: list[int] = []
        values: list[float] = []
        for step, row in sorted(rows.items()):
            value = row.get(metric)
            total += value if isinstance(value, int | float) and math.isfinite(value) else 0.0
            steps.append(step)
            values.append(round(total, 3))
        kept = spread(range(len(steps)), MOST_POINTS) if total > 0 else []
        found[axis] = {"steps": [steps[i] for i in kept], "values": [values[i] for i in kept]}
    return found


def evaluations(run: RunFolder) -> Json:
    """The first and the last evaluation of a run by set; empty if it has none, or if they do not have this form. The
    first one is the first that was made like the last one: a resumed run may have changed how."""
    content = read_evaluations(run.path / EVALUATIONS)
    try:
        found = comparable(content["evaluations"])
        sets = [_set(label, one, found) for label, one in content["sets"].items()]
        return {"first": found[0]["step"], "last": found[-1]["step"], "sets": sets}
    except (LookupError, TypeError, AttributeError):
        return {}


def _set(label: str, description: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Json:
    results = [one["sets"][label] for one in (found[0], found[-1])]
    return {
        "label": label,
        "sampling": sampling_text(description["sampling"]),
        "environment": str(description.get("environment", "")),
        "rewards": ", ".join(str(one.get("label") or one["name"]) for one in description["rewards"]),
        "prompts": results[-1]["prompts"],
        "failed": results[-1]["failed_samples"],
        "refused": results[-1]["refused"],
        "rows": list(_rows(results)),
        "parts": [
            {"part": f"{noun} {part}", "rows": [_row(name, results, kind, part) for name in estimates]}
            for noun, kind in (("player", "players"), ("level", "levels"))
            for part, estimates in results[-1].get(kind, {}).items()
        ],
    }


def _rows(results: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    for name in results[-1]["estimates"]:
        yield _row(name, results)
    for name in ("truncated", "response_tokens"):
        first, last = (
            None if one[name] is None else {"value": one[name], "low": None, "high": None} for one in results
        )
        if last is not None:
            yield {"name": name, "share": name == "truncated", "first": first, "last": last}


def _row(name: str, results: Sequence[Mapping[str, Any]], kind: str = "", part: str = "") -> Json:
    samples = results[-1]["samples"]
    estimates = [one.get(kind, {}).get(part, {}) if kind else one["estimates"] for one in results]
    first, last = (one.get(name) for one in estimates)
    shown = f"avg@{samples}" if name in ("avg", "accuracy") else name
    return {"name": shown, "share": is_share(name), "first": first, "last": last}


def sampling_text(sampling: Mapping[str, Any]) -> str:
    """How a set is sampled: `8 samples at temperature 1, top-p 0.95, at most 512 tokens`."""
    samples, temperature = sampling["samples"], sampling["temperature"]
    count = "1 sample" if samples == 1 else f"{samples} samples"
    parts = ["greedy" if temperature == 0 else f"{count} at temperature {temperature:g}"]
    parts += [f"top-p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    parts += [f"top-k {sampling['top_k']}"] if sampling["top_k"] else []
    parts += [f"min-p {sampling['min_p']:g}"] if sampling.get("min_p") else []
    parts += [f"until {', '.join(map(repr, sampling['stop']))}"] if sampling.get("stop") else []
    return ", ".join([*parts, f"at most {sampling['max_tokens']} tokens"])


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, the first and the last among them."""
    if count >= len(steps):
        return list(steps)
    if count < 2:
        return list(steps[-count:]) if count else []
    last = len(steps) - 1
    return [steps[round(i * last / (count - 1))] for i in range(count)]


def fitting(steps: Sequence[int], size: Callable[[int], int], budget: int) -> list[int]:
    """The most of the ascending steps, evenly spread, whose sizes in bytes add up to the budget; always the last."""
    low, high = 1, len(steps)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(map(size, spread(steps, middle))) <= budget:
            low = middle
        else:
            high = middle - 1
    return spread(steps, low) if steps else []
