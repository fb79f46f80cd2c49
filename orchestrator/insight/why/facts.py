"""What is known about a run at one moment: the input of the diagnosis. Gathered by `observer` and `client`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from troupe.orchestrator.cluster.inspection import NodeFacts, ProcessFacts
from troupe.orchestrator.pools.queues import Queues
from troupe.orchestrator.roles.names import role_of, section_of

DriverState = Literal["answers", "blocked", "silent", "stopped", "dead"]
"""`blocked`: its event loop does not run; `silent`: it answers nothing at all although its process runs."""


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
    """Steps that have ended."""
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
        if not self.steps and self.phase.startswith(("start", "download", "close")):
            return f"the run ({self.phase})"
        return f"step {self.steps + 1}"


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

    def tree(self, worker: str) -> tuple[ProcessFacts, ...]:
        """The processes of a worker."""
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
