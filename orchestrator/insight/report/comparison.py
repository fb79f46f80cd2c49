"""What the page needs to compare runs: their names, their results, and what they had used after each step."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.orchestrator.insight.report.budget import spread
from troupe.orchestrator.insight.verdicts.history import History
from troupe.orchestrator.telemetry.run_summary import LEARNED

Json = dict[str, Any]

MOST_POINTS = 2000
"""Points of a curve that the page keeps."""
_HELD_OUT = ("eval/accuracy", "eval/reward", "eval/loss")
_SET_REWARD = re.compile(r"eval/[a-z0-9-]+/reward")
_SPEEDS = ("response_tokens_per_s", "tokens_per_s")
"""Tokens over the seconds of whole steps, of a run with rollouts and of an offline run."""
_USED = {"tokens": "tokens", "seconds": "seconds/step"}
"""Other x axes than the step, and the metrics that add up to them."""


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
    """Tokens trained and seconds spent up to each step, without the time between a stop and a resumption.

    Empty for what a run does not record.
    """
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
