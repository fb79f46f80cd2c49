"""What `troupe bench` measured, for `troupe plan`: memory and times in place of estimates, where they hold for a spec.

Measurements hold for the model, the device and the settings that they were made with. Those of another spec are not
used, and the plan says which settings differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from troupe.orchestrator.capacity.placement import Node
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.roles.worker_memory import PERIODS, Part, Where, WorkerMemory
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.measured_settings import Settings, different, settings_of
from troupe.orchestrator.spec.rollout import RolloutSpec

BENCH = "bench.json"
"""File of the folder of a benchmark with its results."""
PEAK = "measured"
"""Name of the part of a worker's memory that was measured as a whole."""
_SHOWN = 3
"""Settings that a line names."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step; None: not measured for the spec."""

    sampling_s: float | None = None
    update_s: float | None = None
    weights_s: float | None = None

    def step_s(self, *, overlapping: bool) -> float | None:
        """Of a step, without scoring; `overlapping`: engines sample the next batch during the updates."""
        if self.sampling_s is None or self.update_s is None:
            return None
        parts = self.sampling_s, self.update_s
        return (max(parts) if overlapping else sum(parts)) + (self.weights_s or 0.0)


@dataclass(frozen=True)
class Measured:
    """The measurements that hold for one spec."""

    file: str
    memory: Mapping[str, Mapping[Where, int]]
    """Peak of a worker in bytes, by role."""
    step_s: float | None
    """Seconds of a step without scoring; None: not all of its parts were measured."""
    lines: tuple[str, ...]
    """What is used, and what is not, for the user."""


class Recorded:
    """The results of one benchmark. What it has for a spec is found by `of`."""

    def __init__(self, file: str, record: Mapping[str, Any]) -> None:
        self._file = file
        self._record = record
        self._points: list[Mapping[str, Any]] = [point for point in record["points"] if point["measures"]]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """The results in this folder or file. Raises UsageError."""
        file = path / BENCH if path.is_dir() else path
        try:
            return cls(str(file), json.loads(file.read_text()))
        except FileNotFoundError:
            raise UsageError(f"--measured: {file} does not exist; `troupe bench` writes it beside its page") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--measured: {file} is no result of `troupe bench`: {error!r}") from None

    def of(self, spec: RunSpec, nodes: Sequence[Node]) -> Measured:
        """The measurements that hold for a spec on these nodes."""
        if spec.rollouts is None:
            return self._none("the run has no rollouts")
        wanted = settings_of(spec.rollouts)
        if not self._points:
            return self._none("no point was measured")
        if self._record["device"] != spec.device:
            return self._none(f"it is of device {self._record['device']}, and the spec of {spec.device}")
        if spec.device == "cuda" and (types := {node.gpu_type for node in nodes if node.gpus}) != {self._record["gpu"]}:
            return self._none(f"it is of GPUs {self._record['gpu'] or '?'}, and the cluster has {_list(sorted(types))}")
        if paths := different(self._points[0]["spec"], wanted, "model"):
            return self._none(f"it is of another model ({_list(paths)})")
        return self._matching(spec.rollouts, wanted)

    def _none(self, why: str) -> Measured:
        return Measured(self._file, {}, None, (f"{self._file} is not used: {why}",))

    def _matching(self, spec: RolloutSpec, wanted: Settings) -> Measured:
        """What was measured with the same settings, of the same model on the same device."""
        memory: dict[str, Mapping[Where, int]] = {}
        lines: list[str] = []
        sampling_s = self._sampling(spec, wanted, memory, lines)
        update_s = self._training(wanted, memory, lines)
        weights_s = self._transfer(spec, wanted, lines)
        if memory:
            lines.insert(0, f"measured: memory of {', '.join(sorted(memory))} ({self._file})")
        step_s = StepTimes(sampling_s, update_s, weights_s).step_s(overlapping=spec.schedule.max_staleness > 0)
        return Measured(self._file, memory, step_s, tuple(lines))

    def _sampling(
        self, spec: RolloutSpec, wanted: Settings, memory: dict[str, Mapping[Where, int]], lines: list[str]
    ) -> float | None:
        """Seconds in which the engines sample a batch."""
        points = [point for point in self._points if not different(point["spec"], wanted, "engine")]
        if not points:
            paths = min((different(point["spec"], wanted, "engine") for point in self._points), key=len)
            lines.append(f"engines are estimated: they were measured with other values of {_list(paths)}")
            return None
        memory["rollout"] = {"host": max(point["memory"]["host"] for point in points)}
        alike = [point for point in points if not different(point["spec"], wanted, "sampling")]
        if not alike:
            paths = min((different(point["spec"], wanted, "sampling") for point in points), key=len)
            lines.append(f"the time of sampling is not known: it was measured with other values of {_list(paths)}")
            return None
        workers = spec.roles.rollout.workers
        nearest = min(alike, key=lambda point: abs(point["workers"] - workers))
        measures, scaled = nearest["measures"], nearest["workers"] != workers
        rate = measures["per_engine"] * workers
        seconds = measures["response_tokens"] * measures["sequences"] / rate
        how = f", {workers} times that of an engine of {nearest['workers']}" if scaled else ""
        lines.append(f"measured: sampling {rate:.0f} tokens/s{how}, {seconds:.2f} s of a step")
        return seconds

    def _training(self, wanted: Settings, memory: dict[str, Mapping[Where, int]], lines: list[str]) -> float | None:
        """Seconds of the updates of a step."""
        train = self._record["train"]
        if train is None or train["problem"]:
            lines.append("trainers are estimated: `troupe bench --train` measures them")
            return None
        if paths := different(train["spec"], wanted, "trainer"):
            lines.append(f"trainers are estimated: they were measured with other values of {_list(paths)}")
            return None
        for trainer in train["trainers"]:
            memory[trainer["role"]] = {"host": trainer["host_bytes"], "gpu": trainer["gpu_bytes"]}
        if paths := different(train["spec"], wanted, "sampling"):
            lines.append(f"the time of updates is not known: it was measured with other values of {_list(paths)}")
            return None
        rate = train["trainers"][0]["tokens_per_s"]
        lines.append(f"measured: updates {rate:.0f} tokens/s, {train['step_s']:.2f} s of a step")
        return train["step_s"]

    def _transfer(self, spec: RolloutSpec, wanted: Settings, lines: list[str]) -> float | None:
        """Seconds until all engines have new weights."""
        backend = spec.resolved_backend()
        found = next((one for one in self._record["weights"] if one["backend"] == backend and one["measures"]), None)
        if found is None or different(found["spec"], wanted, "engine", "trainer"):
            return None
        lines.append(f"measured: weights through {backend} {found['measures']['seconds']:.2f} s of a step")
        return found["measures"]["seconds"]


def with_peak(memory: WorkerMemory, peaks: Mapping[Where, int]) -> WorkerMemory:
    """The memory of a worker with its measured peak in place of its parts.

    On a GPU the peak is what torch has allocated: what the process takes besides stays estimated. So do parts that are
    held in some periods of a step only.
    """
    if not peaks.get(memory.where) or any(part.periods != PERIODS for part in memory.parts):
        return memory
    kept = tuple(part for part in memory.parts if memory.where == "gpu" and part.name == "process")
    return replace(memory, parts=(Part(PEAK, peaks[memory.where]), *kept))


def _list(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
