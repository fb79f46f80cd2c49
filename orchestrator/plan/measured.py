"""What `troupe bench` measured, for `troupe plan`: memory and times instead of estimates, if they hold for a spec.

Measurements hold for the model, the device and the settings that they were made with. Measurements of another spec are
not used, and the plan lists the settings that differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.worker_memory import PERIODS, Part, Where, WorkerMemory
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.digests import Settings, different, measured_settings
from troupe.orchestrator.spec.derived.training import overlaps_steps
from troupe.orchestrator.spec.rollout import RolloutSpec

BENCH = "bench.json"
"""File of the folder of a benchmark with its results."""
PEAK = "measured"
"""Name of the part of a worker's memory that was measured as a whole."""
_SHOWN = 3
"""Settings that a line names."""

Peaks = Mapping[Where, int]
"""Peak memory of a worker in bytes."""


@dataclass(frozen=True)
class Measured:
    """The measurements that hold for one spec."""

    file: str
    memory: Mapping[str, Peaks]
    """Peaks by role."""
    step_s: float | None
    """Seconds of a step without scoring and weight updates, or None if not all of its parts were measured."""
    lines: tuple[str, ...]
    """What is used, and what is not, for the user."""
    sampling_s: float | None = None
    """Seconds in which the engines sample a batch, or None if unknown."""
    training_s: float | None = None
    """Seconds of a step's updates, or None if unknown."""


@dataclass(frozen=True)
class _Found:
    """What was measured of one part of a step."""

    line: str = ""
    """The measurements used, or why there are none, for the user; may be empty."""
    memory: Mapping[str, Peaks] = field(default_factory=dict[str, Peaks])
    seconds: float | None = None


class Recorded:
    """The results of one benchmark."""

    def __init__(self, file: str, record: Mapping[str, Any]) -> None:
        """`record`: as `orchestrator/insight/bench/bounds.py` writes it; otherwise raises KeyError or TypeError."""
        self._file = file
        self._device, self._gpu = record["device"], record["gpu"]
        self._points = [point for point in record["points"] if point["measures"]]
        self._train = record["train"] if record["train"] and not record["train"]["problem"] else None

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """The results in this folder or file. Raises UsageError."""
        file = path / BENCH if path.is_dir() else path
        try:
            return cls(str(file), json.loads(file.read_text()))
        except FileNotFoundError:
            raise UsageError(f"--measured: {file} does not exist; `troupe bench` writes it") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--measured: {file} is no result of `troupe bench`: {error!r}") from None

    def of(self, spec: RunSpec, nodes: Sequence[Node]) -> Measured:
        """The measurements that hold for a spec on these nodes."""
        if spec.rollouts is None:
            return self._none("the run has no rollouts")
        if not self._points:
            return self._none("no point was measured")
        if self._device != spec.device:
            return self._none(f"it is of device {self._device}, and the spec of {spec.device}")
        types = {node.gpu_type for node in nodes if node.gpus}
        if spec.device == "cuda" and (types != {self._gpu} or not self._gpu):
            there = _list([kind or "an unknown type" for kind in sorted(types)])
            return self._none(f"it is of GPUs of {self._gpu or 'an unknown type'}, and the cluster has {there}")
        wanted = measured_settings(spec.rollouts)
        if paths := different(self._points[0]["spec"], wanted, "model"):
            return self._none(f"it is of another model ({_list(paths)})")
        return self._of_model(spec.rollouts, wanted)

    def _none(self, why: str) -> Measured:
        return Measured(self._file, {}, None, (f"{self._file} is not used: {why}",))

    def _of_model(self, spec: RolloutSpec, wanted: Settings) -> Measured:
        """What was measured with the spec's settings, of its model on its device."""
        engines = self._engines(spec, wanted)
        trainers = self._trainers(wanted)
        memory = {**engines.memory, **trainers.memory}
        step_s = None
        if engines.seconds is not None and trainers.seconds is not None:
            step_s = engines.seconds + trainers.seconds
            if overlaps_steps(spec):  # engines sample the next batch during the updates
                step_s = max(engines.seconds, trainers.seconds)
        first = [f"measured: memory of {', '.join(sorted(memory))} ({self._file})"] if memory else []
        lines = [part.line for part in (engines, trainers) if part.line]
        return Measured(self._file, memory, step_s, (*first, *lines), engines.seconds, trainers.seconds)

    def _engines(self, spec: RolloutSpec, wanted: Settings) -> _Found:
        """Memory of an engine, and the seconds in which all of them sample a batch."""
        points, paths = _alike(self._points, wanted, "engine")
        if paths:
            return _Found(f"engines are estimated: they were measured with other values of {_list(paths)}")
        memory: dict[str, Peaks] = {"rollout": {"host": max(point["memory"]["host"] for point in points)}}
        points, paths = _alike(points, wanted, "sampling")
        if paths:
            why = f"it was measured with other values of {_list(paths)}"
            return _Found(f"the time of sampling is not known: {why}", memory)
        workers = spec.roles.rollout.workers
        nearest = min(points, key=lambda point: abs(point["workers"] - workers))
        measures = nearest["measures"]
        rate = measures["per_engine"] * workers
        seconds = measures["response_tokens"] * measures["sequences"] / rate
        scaled = f", {workers} times that of an engine of {nearest['workers']}" if nearest["workers"] != workers else ""
        return _Found(f"measured: sampling {rate:.0f} tokens/s{scaled}, {seconds:.2f} s of a step", memory, seconds)

    def _trainers(self, wanted: Settings) -> _Found:
        """Memory of the trainers, and the seconds of the updates of a step."""
        train = self._train
        if train is None:
            return _Found("trainers are estimated: `troupe bench --train` measures them")
        if paths := different(train["spec"], wanted, "trainer"):
            return _Found(f"trainers are estimated: they were measured with other values of {_list(paths)}")
        memory: dict[str, Peaks] = {
            trainer["role"]: {"host": trainer["host_bytes"], "gpu": trainer["gpu_bytes"]}
            for trainer in train["trainers"]
        }
        if paths := different(train["spec"], wanted, "sampling"):
            why = f"it was measured with other values of {_list(paths)}"
            return _Found(f"the time of updates is not known: {why}", memory)
        rate, seconds = train["trainers"][0]["tokens_per_s"], train["step_s"]
        return _Found(f"measured: updates {rate:.0f} tokens/s, {seconds:.2f} s of a step", memory, seconds)


def with_peak(memory: WorkerMemory, peaks: Peaks) -> WorkerMemory:
    """The memory of a worker with its measured peak instead of its parts.

    On a GPU the peak is what torch has allocated: what the process takes besides stays estimated. So do parts that are
    held in some periods of a step only.
    """
    if not peaks.get(memory.where) or any(part.periods != PERIODS for part in memory.parts):
        return memory
    kept = tuple(part for part in memory.parts if memory.where == "gpu" and part.name == "process")
    return replace(memory, parts=(Part(PEAK, peaks[memory.where]), *kept))


def _alike(
    points: Sequence[Mapping[str, Any]], wanted: Settings, part: str
) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
    """The points that were measured with these settings; without any, the settings in which the nearest one differs."""
    differences = [different(point["spec"], wanted, part) for point in points]
    equal = [point for point, paths in zip(points, differences, strict=True) if not paths]
    return equal, [] if equal else min(differences, key=len)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
