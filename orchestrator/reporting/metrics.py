"""Metrics of a run: phase timers, aggregation, and the files that record them."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from workers.contract.memory import resident_peak
from workers.contract.messages import Answer, Peak, UpdateMetrics

logger = logging.getLogger(__name__)

_FILES = itertools.count()  # distinguishes event files that one process starts within the same second

Metrics = Mapping[str, object]
"""Metrics by name; a few are text (`kind`)."""


class PhaseTimers:
    """Seconds spent in named phases since construction. Phases may overlap; each counts its own time."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`record`: records the block of a phase of this name in the run's timeline."""
        self._clock = clock
        self._record = record
        self._started = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.failed = ""
        """Phase that has raised; empty: none has."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, also if it raises."""
        started = self._clock()
        try:
            with self._record(name):
                yield
        except BaseException:
            self.failed = name
            raise
        finally:
            self._seconds[name] += self._clock() - started

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; an open phase is added when it ends."""
        return dict(self._seconds)

    def total(self) -> float:
        """Seconds since construction."""
        return self._clock() - self._started

    def shares(self) -> dict[str, float]:
        """Fraction of the total time by phase (its utilisation); empty if no time has passed."""
        total = self.total()
        return {name: seconds / total for name, seconds in self._seconds.items()} if total > 0 else {}


def std(values: Sequence[float]) -> float:
    """Population standard deviation; nan for no values."""
    return float(np.std(values)) if len(values) else math.nan


def merge_update_metrics(ranks: Sequence[UpdateMetrics]) -> dict[str, float]:
    """Combine one update's metrics of all ranks: `sums` add up, `values` are equal on all ranks and taken once.

    Raises:
        ValueError: There is no rank, a name is both a sum and a value, or the ranks disagree on a value or on having
            skipped the update, in which case they no longer hold the same model.
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
    """Unbiased estimate of the probability that at least one of `k` samples is correct, from `correct` of `samples`.

    1 - C(samples - correct, k) / C(samples, k): equation 1 of Chen et al. 2021 (arXiv 2107.03374).

    Raises:
        ValueError: 0 <= correct <= samples or 1 <= k <= samples does not hold.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} is not defined for {correct} correct of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


_MOST_WAITING = 10_000
"""Lines that are kept while a file cannot be written."""


class MetricSink(Protocol):
    """Destination of a run's metrics."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's metrics; they are flushed to the operating system on return."""
        ...

    def close(self) -> None:
        """Release resources; no write follows."""
        ...


class JsonlSink:
    """`metrics.jsonl`: one JSON object a line, `step` and `time` (seconds since 1970) first."""

    def __init__(self, path: str | Path, keep_through: int) -> None:
        """Open for appending.

        Args:
            path: The file.
            keep_through: Last step to keep; -1 for a new run. Lines of later steps and a line truncated by a kill are
                dropped, because a run resumed at that step writes them again.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _keep_lines(self.path, keep_through)
        self._file = self.path.open("ab", buffering=0)
        self._end = self._file.seek(0, os.SEEK_END)
        """Size of the file with whole lines."""
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        """Lines that could not be written yet."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line. nan and infinity become null, because JSON has neither.

        A line that cannot be written (disk full, read-only) is written with a later one.
        """
        line = {"step": step, "time": round(time.time(), 3)} | {k: _finite(v) for k, v in metrics.items()}
        self._waiting.append(f"{json.dumps(line, allow_nan=False)}\n".encode())
        try:
            self._flush()
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written (%s): its lines are kept until it can", self.path, error.strerror)

    def _flush(self) -> None:
        """Append the lines that wait. Raises OSError, and the file then ends with a whole line."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the folder was removed
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file, self._end = self.path.open("ab", buffering=0), 0
        while self._waiting:
            if self._file.write(self._waiting[0]) < len(self._waiting[0]):
                os.ftruncate(self._file.fileno(), self._end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self._end += len(self._waiting.popleft())

    def close(self) -> None:
        """Close the file, with all lines if they can be written now."""
        try:
            self._flush()
        except OSError as error:
            logger.error("%s: %d lines are lost: %s", self.path, len(self._waiting), error.strerror)
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
    """The step of a complete line; infinity for a truncated or foreign line."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        step = None
    return step if isinstance(step, int) else math.inf


class TensorBoardSink:
    """Scalars in TensorBoard's file format, written without torch or TensorFlow."""

    def __init__(self, directory: str | Path, keep_through: int) -> None:
        """Start a new event file; TensorBoard then hides steps after `keep_through` in earlier files."""
        # Imported here because protobuf takes a third of a second to load and most commands write no events.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Protobuf creates the classes at import time, so a type checker has no source to read.
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
    """All destinations of a run's metrics."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    @classmethod
    def open(cls, folder: str | Path, *, tensorboard: bool, resume_at: int) -> MetricSinks:
        """Open `metrics.jsonl`, and event files in `tensorboard/` if requested, in a run folder.

        Args:
            folder: The run folder.
            tensorboard: Whether to write event files.
            resume_at: Steps that the run has completed. Records of later steps are dropped; at 0, all records.
        """
        keep_through = resume_at if resume_at > 0 else -1
        sinks: list[MetricSink] = [JsonlSink(Path(folder) / "metrics.jsonl", keep_through)]
        if tensorboard:
            sinks.append(TensorBoardSink(Path(folder) / "tensorboard", keep_through))
        return cls(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Record one step's metrics in every sink. A sink that cannot be written does not end the run."""
        for sink in self._sinks:
            try:
                sink.write(step, metrics)
            except OSError as error:
                logger.warning("the metrics of step %d are missing in %s: %s", step, type(sink).__name__, error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


GIB = 2**30


class PeakMemory:
    """Peak memory of the largest worker of each role, ended workers included, and of the driver process."""

    def __init__(self) -> None:
        self._roles: dict[str, Peak] = {}

    def note(self, worker: str, answer: object) -> None:
        """Record the peak that the answer of a worker (`rollout-0`) reports; an answer without one is ignored."""
        if isinstance(answer, Answer) and answer.peak is not None:
            role = worker.rpartition("-")[0]
            before = self._roles.get(role, Peak(0))
            self._roles[role] = Peak(max(before.host, answer.peak.host), max(before.gpu, answer.peak.gpu))

    def metrics(self) -> dict[str, float]:
        """`memory/ROLE`, `memory/driver` and, for roles with memory on GPUs, `memory/ROLE_gpu`, in GiB."""
        peaks = dict(sorted(self._roles.items())) | {"driver": Peak(resident_peak())}
        host = {f"memory/{role}": peak.host / GIB for role, peak in peaks.items()}
        return host | {f"memory/{role}_gpu": peak.gpu / GIB for role, peak in peaks.items() if peak.gpu}

    def summary(self) -> str:
        """One line: `policy 0.61, rollout 1.20, driver 0.31 GiB`."""
        parts = (f"{name.removeprefix('memory/')} {value:.2f}" for name, value in self.metrics().items())
        return f"{', '.join(parts)} GiB"


def mean_of(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every metric over the dicts that have it."""
    names = dict.fromkeys(name for metrics in dicts for name in metrics)
    return {name: fmean(metrics[name] for metrics in dicts if name in metrics) for name in names}
