"""Reads the results of `troupe bench` for the plan of a spec with the same engines (`troupe plan --rates`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.insight.bench.points import measured_fields, value_text
from troupe.orchestrator.insight.bench.results import Measures
from troupe.orchestrator.plan.speed import Rates
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config_base import first_problem
from troupe.workers.contract.gpus import gpu_peaks


@dataclass(frozen=True)
class _Point:
    workers: int
    measured_with: Mapping[str, Any]
    measures: Measures | None


@dataclass(frozen=True)
class _Record:
    device: str
    gpu: str
    points: tuple[_Point, ...]


def read_rates(file: Path, spec: RunSpec, gpu_types: Collection[str]) -> Rates:
    """The rates of the point with the spec's engines; of several, that whose engines had the most similar number of
    sequences each, and were as many. Raises UsageError without one, or if the GPUs were others than `gpu_types`."""
    if spec.rollouts is None:
        raise UsageError(f"--rates: {spec.name} has no engines")
    if spec.rollouts.roles.environments():
        raise UsageError("--rates: an episode is several of the sequences that troupe bench measures")
    if not gpu_types or any(gpu_peaks(kind) is None for kind in gpu_types):
        raise UsageError("--rates: speeds are predicted on known GPUs only: name the cluster, as in --cluster 1x8xH100")
    record = _read(file)
    if record.device != "cuda" or any(gpu_peaks(kind) != gpu_peaks(record.gpu) for kind in gpu_types):
        measured = record.gpu or ("GPUs of unknown type" if record.device == "cuda" else "CPUs")
        raise UsageError(f"--rates {file}: measured on {measured}, and the cluster has {', '.join(sorted(gpu_types))}")
    engines = spec.rollouts.roles.rollout.workers
    own = spec.rollouts.samples_per_step / engines

    def unlike(one: tuple[int, Measures]) -> tuple[float, int]:
        return abs(math.log(one[1].sequences / one[0] / own)), abs(one[0] - engines)

    workers, measures = min(_with_its_engines(file, record, spec.rollouts), key=unlike)
    return Rates(
        tokens_per_s=measures.tokens_per_s / workers,
        drain=max(1.0, measures.most_running / measures.running) if measures.running else 1.0,
        prompt_tokens=measures.prompt_tokens,
        response_tokens=measures.response_tokens,
        group_s=max(0.0, measures.latency_s.p99 - measures.first_token_s.p99),
    )


def _read(file: Path) -> _Record:
    try:
        return TypeAdapter(_Record).validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"--rates {file}: {error.strerror or error}") from None
    except ValidationError as error:
        why = f"no results of this version's troupe bench ({first_problem(error)})"
        raise UsageError(f"--rates {file}: {why}") from None


def _with_its_engines(file: Path, record: _Record, spec: RolloutSpec) -> list[tuple[int, Measures]]:
    """The number of engines and the measurements of each point with the spec's engines."""
    wanted, found, nearest = measured_fields(spec), list[tuple[int, Measures]](), dict[str, Any]()
    for point in record.points:
        if point.measures is None or not point.measures.tokens_per_s:
            continue
        other = {name: one for name, one in point.measured_with.items() if one != wanted.get(name)}
        if other:
            nearest = min((other, nearest or other), key=len)
        else:
            found.append((point.workers, point.measures))
    if not found:
        differing = [f"{name}: {value_text(one)}, not {value_text(wanted.get(name))}" for name, one in nearest.items()]
        raise UsageError(f"--rates {file}: other engines were measured ({'; '.join(differing) or 'none at all'})")
    return found
