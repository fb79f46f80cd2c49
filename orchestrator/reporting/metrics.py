"""Figures of a run: phase timers, aggregation, and the files they are written to."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from workers.messages import UpdateMetrics

logger = logging.getLogger(__name__)

_FILES = itertools.count()  # tells apart the event files one process starts within a second

Metrics = Mapping[str, object]
"""Figures by name; a few are text (`kind`)."""


class PhaseTimers:
    """Seconds spent in named phases since this was made. Phases may overlap: each one counts its own time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, also where it raises."""
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - started

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; a phase that is still open counts when it ends."""
        return dict(self._seconds)

    def total(self) -> float:
        """Seconds since this was made."""
        return self._clock() - self._started

    def shares(self) -> dict[str, float]:
        """Share of the total time by phase: its utilisation. Empty where no time has passed."""
        total = self.total()
        return {name: seconds / total for name, seconds in self._seconds.items()} if total > 0 else {}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing."""
    return float(np.mean(values)) if len(values) else math.nan


def std(values: Sequence[float]) -> float:
    """Population standard deviation; nan of nothing."""
    return float(np.std(values)) if len(values) else math.nan


def percentiles(values: Sequence[float], wanted: Sequence[float] = (10, 50, 90)) -> tuple[float, ...]:
    """Percentiles (0 to 100), interpolated linearly; nan of nothing."""
    if not len(values):
        return (math.nan,) * len(wanted)
    return tuple(float(value) for value in np.percentile(values, wanted))


def summarize(name: str, values: Sequence[float]) -> dict[str, float]:
    """`<name>/mean`, `std`, `min`, `p10`, `p50`, `p90` and `max`; empty for no values."""
    if not len(values):
        return {}
    figures = {"mean": mean(values), "std": std(values), "min": float(min(values)), "max": float(max(values))}
    figures |= dict(zip(("p10", "p50", "p90"), percentiles(values), strict=True))
    return {f"{name}/{key}": figure for key, figure in figures.items()}


def merge_update_metrics(ranks: Sequence[UpdateMetrics]) -> dict[str, float]:
    """One update's figures over all ranks: `sums` add up, `values` are equal on all ranks and taken once.

    Raises:
        ValueError: there is no rank, a name is both a sum and a value, or the ranks disagree on a value or on having
            skipped the update; then they no longer hold the same model.
    """
    if not ranks:
        raise ValueError("an update has at least one rank")
    first = ranks[0]
    sums: defaultdict[str, float] = defaultdict(float)
    for rank, metrics in enumerate(ranks):
        if metrics.skipped != first.skipped or metrics.values.keys() != first.values.keys():
            raise ValueError(f"ranks 0 and {rank} disagree on whether the update was skipped, or on what to report")
        for name, value in metrics.values.items():
            if not _equal(value, first.values[name]):
                raise ValueError(f"ranks 0 and {rank} disagree on {name}: {first.values[name]} and {value}")
        for name, value in metrics.sums.items():
            sums[name] += value
    if both := sums.keys() & first.values.keys():
        raise ValueError(f"{min(both)} is both a sum and a value")
    return {**sums, **first.values}


def _equal(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-12)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` samples is right, from `correct` of `samples`.

    1 - C(samples - correct, k) / C(samples, k): equation 1 of Chen et al. 2021 (arXiv 2107.03374).

    Raises:
        ValueError: not 0 <= correct <= samples and 1 <= k <= samples.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} is not defined for {correct} right of {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


class MetricSink(Protocol):
    """Where the figures of a step go."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's figures; they are on their way to the disk when this returns."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class JsonlSink:
    """`metrics.jsonl`: one JSON object a line, `step` and `time` (seconds since 1970) first."""

    def __init__(self, path: str | Path, keep_through: int) -> None:
        """Open for appending. Lines of steps after `keep_through` are dropped, and so is a line that was cut by a kill:
        a run resumed at that step writes them again. A run that starts from nothing passes -1."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _keep_lines(self.path, keep_through)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line. JSON has no nan and no infinity: they become null."""
        line = {"step": step, "time": round(time.time(), 3)} | {k: _finite(v) for k, v in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep_lines(path: Path, keep_through: int) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= keep_through]
    if len(kept) == len(lines):
        return
    logger.info("%s: dropped %d lines of steps after %d", path, len(lines) - len(kept), keep_through)
    shorter = path.with_name(f".{path.name}.{os.getpid()}")
    shorter.write_text("".join(kept), encoding="utf-8")
    os.replace(shorter, path)


def _step_of(line: str) -> float:
    """The step of a whole line; infinity for a line that is cut or is not ours."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        step = None
    return step if isinstance(step, int) else math.inf


class TensorBoardSink:
    """Scalars in TensorBoard's own file format, written without torch or TensorFlow."""

    def __init__(self, directory: str | Path, keep_through: int) -> None:
        """Start a new event file; TensorBoard then hides steps after `keep_through` of earlier files."""
        # Here, not at the top: protobuf costs a third of a second, and most commands write no events.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # The classes are made when protobuf loads; there is no source for a type checker to read.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_FILES)}"
        self._records = RecordWriter((folder / name).open("ab"))
        self._append(file_version="brain.Event:2")
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._append(step=keep_through + 1, session_log=restart)

    def write(self, step: int, metrics: Metrics) -> None:
        """Write every number as a scalar of this step, and flush."""
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if isinstance(value, int | float)
        ]
        self._append(step=step, summary=self._summaries.Summary(value=values))

    def _append(self, **fields: object) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the event file."""
        self._records.close()


class MetricSinks:
    """Every place a run's figures go."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    @classmethod
    def open(cls, folder: str | Path, *, tensorboard: bool, resume_at: int) -> MetricSinks:
        """`metrics.jsonl`, and event files in `tensorboard/`, of a run in `folder` that has done `resume_at` steps.

        What an interrupted run wrote of later steps is dropped; a run at step 0 drops everything.
        """
        keep_through = resume_at if resume_at > 0 else -1
        sinks: list[MetricSink] = [JsonlSink(Path(folder) / "metrics.jsonl", keep_through)]
        if tensorboard:
            sinks.append(TensorBoardSink(Path(folder) / "tensorboard", keep_through))
        return cls(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Record figures of one step everywhere."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Nothing more comes."""
        for sink in self._sinks:
            sink.close()
