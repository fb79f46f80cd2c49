"""Reads what a run has recorded in its folder, also while it runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.telemetry.event_log import EVENTS
from troupe.orchestrator.telemetry.timeline import TIMELINE
from troupe.workers.contract.samples import SAMPLES, conform

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
TIMELINES = "timeline"
SPEC = "spec.yaml"

_STEP_FILE = re.compile(r"step-(\d{6,})\.parquet")


class RunFolder:
    """The records of one run. A method reads its file when it is called; only the spec is kept."""

    def __init__(self, path: str | Path) -> None:
        """Raises UsageError if the path is no folder of a run."""
        self.path = Path(path)
        if not (self.path / SPEC).is_file() and not (self.path / METRICS).is_file():
            reason = "it has no spec.yaml and no metrics.jsonl" if self.path.is_dir() else "there is no such folder"
            raise UsageError(f"{self.path} is not the folder of a run: {reason}")

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The resolved spec, with every default; empty if the folder has none."""
        file = self.path / SPEC
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise DataError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(loaded, dict):
            raise DataError(f"{file}: expected a mapping")
        return loaded

    @property
    def name(self) -> str:
        return str(self.spec.get("name") or self.path.name)

    def metrics(self) -> list[dict[str, Any]]:
        """One mapping for each step, in order, 0 the evaluation at the start; null is nan or infinity. Evaluations
        that ended later are part of their steps' lines."""
        return _with_evaluations(_lines(self.path / METRICS))

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What happened, in order; only events of these kinds if some are given."""
        return [event for event in _lines(self.path / EVENTS) if not kinds or event.get("event") in kinds]

    def steps(self) -> list[int]:
        """Steps with metrics, in order; 0 included if the run was evaluated at its start."""
        return sorted({step for line in self.metrics() if isinstance(step := line.get("step"), int)})

    def sample_files(self) -> dict[int, Path]:
        """The file of the samples of each step that has one, in order of the steps."""
        return step_files(self.path / TRAJECTORIES)

    def timeline_files(self) -> dict[int, Path]:
        """The file of the timeline of each step that has one, in order of the steps."""
        return step_files(self.path / TIMELINES)

    def samples(self, step: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The samples of a step as a SAMPLES table, or these columns (null if missing). Raises UsageError,
        DataError."""
        file = self.path / TRAJECTORIES / f"step-{step:06d}.parquet"
        if not file.is_file():
            raise UsageError(f"{file.parent}: no samples of step {step}{_range(self.sample_files())}")
        schema = SAMPLES if columns is None else pa.schema([SAMPLES.field(name) for name in columns])
        return conform(_read(file, schema.names), schema, step=step)

    def timeline(self, step: int | None = None) -> pa.Table:
        """The spans that ended during a step (default all steps) as a TIMELINE table; empty if none is recorded."""
        return self.timeline_of(step, step)

    def timeline_of(self, first: int | None, last: int | None) -> pa.Table:
        """The spans that ended during the steps `first` to `last` as a TIMELINE table; empty if none is recorded. Both
        steps are included; None stands for the start or the end. Files of other steps are not opened."""
        low, high = first or 0, math.inf if last is None else last
        chosen = [file for step, file in self.timeline_files().items() if low <= step <= high]
        tables = [conform(_read(file, TIMELINE.names), TIMELINE) for file in chosen]
        return pa.concat_tables(tables) if tables else TIMELINE.empty_table()


def _with_evaluations(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl` with late evaluations in the lines of their steps. A late evaluation is a line of only
    `eval/` metrics behind the line of its step, or of a later one."""
    found: list[dict[str, Any]] = []
    for line in lines:
        names = line.keys() - {"step", "time"}
        if not found or not names or not all(name.startswith("eval/") for name in names):
            found.append(line)
            continue
        step: Any = line.get("step")
        place = next((i for i in reversed(range(len(found))) if found[i].get("step") == step), None)
        if place is not None:
            found[place] = found[place] | line | {"time": found[place].get("time")}
        elif step == 0:  # the model's before training, which has no other metrics
            found.insert(0, line)
        else:
            found.append(line)
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A last line that is being written is left out."""
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def step_files(folder: Path) -> dict[int, Path]:
    """The files `step-NNNNNN.parquet` of a folder, in order of the steps."""
    found = ((match, path) for path in folder.glob("step-*.parquet") if (match := _STEP_FILE.fullmatch(path.name)))
    return dict(sorted((int(match[1]), path) for match, path in found))


def _range(steps: Iterable[int]) -> str:
    numbers = list(steps)
    return f" (there are {len(numbers)} of steps {numbers[0]} to {numbers[-1]})" if numbers else ""


def _read(path: Path, names: Sequence[str]) -> pa.Table:
    """The columns of `names` that the file has."""
    try:
        with pq.ParquetFile(path) as file:
            present = set(file.schema_arrow.names)
            return file.read([name for name in names if name in present])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
