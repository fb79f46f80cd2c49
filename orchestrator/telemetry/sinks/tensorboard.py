"""TensorBoard event files."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from troupe.orchestrator.telemetry.sinks.base import Metrics, numbers

_FILES = itertools.count()  # distinguishes event files that one process starts within the same second


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
            self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()
        ]
        self._append(step=step, summary=self._summaries.Summary(value=values))

    def _append(self, **fields: object) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Close the event file."""
        self._records.close()
