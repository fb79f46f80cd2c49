"""The results of a benchmark as plain data: for `--json`, for the page, and for `troupe plan --measured`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from troupe.orchestrator.insight.bench.bounds import Bound, best_of, bound_of
from troupe.orchestrator.insight.bench.results import Result
from troupe.orchestrator.insight.bench.trainers import TrainResult, TransferResult
from troupe.orchestrator.spec.derived.measured import settings_of

Json = dict[str, Any]


def record_of(
    results: Sequence[Result],
    cores: int | None,
    train: TrainResult | None = None,
    weights: Sequence[TransferResult] = (),
) -> Json:
    """The whole benchmark.

    Args:
        results: The result of every point, in order.
        cores: CPU cores of the machine, or None for a cluster, whose free resources are unknown.
        train: The trainers alone, at the fastest point, or None if not measured.
        weights: Updates of the weights by back-end, at the fastest point; empty if not measured.
    """
    spec, best = results[0].point.spec, best_of(results)
    settings = None if best is None else settings_of(best.point.spec)
    return {
        "name": spec.name,
        "model": spec.model.path,
        "device": spec.device,
        "gpu": "" if best is None else best.gpu_type,
        "prompts": [result.point.spec.schedule.prompts_per_step for result in results],
        "fields": list(results[0].point.settings),
        "best": None if best is None else results.index(best),
        "points": [_point(result, bound_of(result, results, cores)) for result in results],
        "train": None if train is None else asdict(train) | {"spec": settings},
        "weights": [asdict(one) | {"spec": settings} for one in weights],
    }


def _point(result: Result, bound: Bound | None) -> Json:
    spec = result.point.spec
    return {
        "settings": dict(result.point.settings),
        "label": result.point.label,
        "workers": result.point.workers,
        "group_size": spec.group_size,
        "prompts": spec.schedule.prompts_per_step,
        "spec": settings_of(spec),
        "memory": asdict(result.peak),
        "measures": None if result.measures is None else asdict(result.measures),
        "problem": result.problem,
        "bound": None
        if bound is None
        else {"kind": bound.kind.value, "why": bound.why, "lines": list(bound.lines), "note": bound.note},
    }
