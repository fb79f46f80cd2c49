"""What is known about a run at one moment, and the files through which `troupe why` reaches it.

The files are in the folder `why` of the run's folder, for the run's user only. `driver.json` is rewritten every few
seconds and holds the places of the driver and its workers and what the driver waits for; it is what remains when the
driver is dead or does not answer. `ended.json` is the last report. Requests and answers go through
`orchestrator/live/mailbox.py`. `reports/` has the newest automatic reports of the run.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

import psutil
from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.cluster.inspection import NodeFacts, ProcessFacts
from troupe.orchestrator.cluster.proc import is_running
from troupe.orchestrator.pools.engine import Queues
from troupe.orchestrator.roles.names import role_of, section_of
from troupe.workers.contract.atomic_file import write_atomic

DriverState = Literal["answers", "blocked", "silent", "stopped", "dead"]
"""`blocked`: its event loop does not run; `silent`: it answers nothing at all although its process runs."""
FOLDER = "why"
_KEPT_REPORTS = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """A call to a worker that has not ended."""

    worker: str
    method: str
    age_s: float
    timeout_s: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.worker} ({self.method}, {self.age_s:.0f} s of {self.timeout_s:g} s)"


@dataclass(frozen=True)
class RunFacts:
    """Where the run is."""

    name: str
    steps: int = 0
    total: int = 0
    phase: str = ""
    progress: str = ""
    """Parts of the phase that have ended, as in `3/8`."""
    phase_s: float = 0.0
    step_s: float = 0.0
    """Seconds since the last step ended."""
    usual_step_s: float = 0.0
    """Median of the steps before; 0: there are too few."""

    @property
    def location(self) -> str:
        """The step or phase that the run is in, as the subject of a sentence."""
        if self.phase == "close" or (not self.steps and self.phase.startswith(("start", "download"))):
            return f"the run ({self.phase})"
        return f"step {self.steps + 1}"

    @property
    def in_phase(self) -> str:
        """The same with its phase: `step 3 (update)`."""
        named = f"({self.phase})"
        return self.location if not self.phase or self.location.endswith(named) else f"{self.location} {named}"


@dataclass(frozen=True)
class DriverFacts:
    """The process that controls the run."""

    pid: int
    host: str
    state: DriverState = "answers"
    blocked_s: float = 0.0
    """Seconds for which its event loop has not run."""
    last_seen_s: float = 0.0
    """Seconds since it last wrote what it waits for."""


@dataclass(frozen=True)
class Facts:
    """All that is known."""

    run: RunFacts
    driver: DriverFacts
    calls: tuple[Call, ...] = ()
    processes: tuple[ProcessFacts, ...] = ()
    nodes: tuple[NodeFacts, ...] = ()
    workers: Mapping[str, int] = field(default_factory=dict)
    """Process ids by name of the workers that serve the calls."""
    queues: Queues = field(default_factory=Queues)
    error: str = ""
    """Error that the run ends with."""
    exit_reasons: tuple[str, ...] = ()
    """The end of logs of processes that have ended, and the kernel's messages about them."""
    kills_before: int = 0
    """Processes that the out-of-memory killer of the driver's node had ended before the run."""
    networks: Mapping[str, str] = field(default_factory=dict)
    """How fast the network between the nodes of a group of trainers is, by role."""

    def tree(self, worker: str) -> tuple[ProcessFacts, ...]:
        return tuple(process for process in self.processes if process.worker == worker)

    def role(self, role: str) -> Iterator[ProcessFacts]:
        """The processes of all workers of a role, or of all roles of a section."""
        return (process for process in self.processes if role in (own := role_of(process.worker), section_of(own)))


@dataclass(frozen=True)
class Diagnosis:
    """What follows."""

    cause: str
    """Name of the rule, for programs."""
    summary: str
    """A sentence."""
    blocked_by: str = ""
    """The worker, process or node that the run waits for; empty if there is none."""
    evidence: tuple[str, ...] = ()

    def text(self) -> str:
        """The summary, then a line for each piece of evidence."""
        return "\n".join([self.summary, *(f"  {line}" for line in self.evidence)])


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
            return psutil.Process(self.pid) if is_running(self.pid, self.started) else None
        except psutil.Error:
            return None


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
        write_atomic(folder / self.name, self.encode(value))

    def read(self, folder: Path) -> T | None:
        """The value; None if the file does not exist or cannot be read."""
        try:
            return self.decode((folder / self.name).read_bytes())
        except OSError:
            return None

    def encode(self, value: T) -> bytes:
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
