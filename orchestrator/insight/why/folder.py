"""The files through which `troupe why` reaches a run: the folder `why` of the run's folder, for the run's user only.

`driver.json` is rewritten every few seconds and holds the places of the driver and its workers and what the driver
waits for; it is what remains when the driver is dead or does not answer. `ended.json` is the last report. Requests and
answers go through `orchestrator/live/mailbox.py`. `reports/` has the newest automatic reports of the run.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.cluster.proc import started_at
from troupe.orchestrator.insight.why.facts import Diagnosis, Facts
from troupe.workers.contract.atomic_file import write_atomic

FOLDER = "why"
_KEPT_REPORTS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class DriverSnapshot:
    """What the driver has last written about itself."""

    time: float
    """Seconds since 1970."""
    host: str
    pid: int
    started: int
    """Start of the driver's process, as the kernel counts: a process id may be reused."""
    facts: Facts
    """Without processes and nodes."""
    logs: str
    """Log folder of Ray's session on the driver's node."""
    roots: Mapping[int, str] = field(default_factory=dict)
    """Workers on the driver's node, by process id."""

    @property
    def is_local(self) -> bool:
        """Whether the driver is on this machine."""
        return self.host == socket.gethostname()

    def process(self) -> psutil.Process | None:
        """The driver's process on this machine; None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE and started_at(self.pid) == self.started
        except psutil.Error:
            return None
        return process if alive else None


@dataclass(frozen=True)
class DiagnosisReport:
    """A diagnosis with its time."""

    time: float
    pid: int
    """The driver that it is about."""
    diagnosis: Diagnosis
    seconds: float = 0.0
    """Time that it took."""


class _File(Generic[T]):
    """A file with one value as JSON."""

    def __init__(self, name: str, kind: type[T]) -> None:
        self.name = name
        self._adapter = TypeAdapter(kind)

    def write(self, folder: Path, value: T) -> None:
        """Write it atomically. Raises OSError."""
        write_atomic(folder / self.name, self.encode(value))

    def read(self, folder: Path) -> T | None:
        """The value; None if the file does not exist or cannot be read."""
        try:
            return self.decode((folder / self.name).read_bytes())
        except OSError:
            return None

    def encode(self, value: T) -> bytes:
        """The value as JSON."""
        return self._adapter.dump_json(value)

    def decode(self, content: bytes) -> T | None:
        """The value that JSON contains; None if it contains another."""
        try:
            return self._adapter.validate_json(content)
        except ValidationError:
            return None


SNAPSHOT = _File("driver.json", DriverSnapshot)
ENDED = _File("ended.json", DiagnosisReport)


def keep_report(folder: Path, report: DiagnosisReport) -> Path:
    """Writes a report as text to the folder of the newest ones; returns its path. Raises OSError."""
    reports = folder / "reports"
    reports.mkdir(mode=0o700, parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(report.time))
    path = reports / f"{stamp}-{report.diagnosis.cause}.txt"
    path.write_text(report.diagnosis.text() + "\n")
    for old in sorted(reports.glob("*.txt"))[:-_KEPT_REPORTS]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path
