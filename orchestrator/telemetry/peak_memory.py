"""Peak memory by role, from the answers of workers."""

from __future__ import annotations

from troupe.orchestrator.roles.names import role_of
from troupe.workers.contract.messages import Answer, Peak
from troupe.workers.contract.units import GIB
from troupe.workers.telemetry.peak_memory import resident_peak


class PeakMemory:
    """Peak memory of the largest worker of each role, ended workers included, and of the driver process."""

    def __init__(self) -> None:
        self._roles: dict[str, Peak] = {}

    def note(self, worker: str, answer: object) -> None:
        """Record the peak that the answer of a worker (`rollout-0`) reports; an answer without one is ignored."""
        if isinstance(answer, Answer) and answer.peak is not None:
            role = role_of(worker)
            before = self.of(role)
            self._roles[role] = Peak(max(before.host, answer.peak.host), max(before.gpu, answer.peak.gpu))

    def of(self, role: str) -> Peak:
        """Peak of the largest worker of a role; 0 if none has reported."""
        return self._roles.get(role, Peak(0))

    def metrics(self) -> dict[str, float]:
        """`memory/ROLE`, `memory/driver` and, for roles with memory on GPUs, `memory/ROLE_gpu`, in GiB."""
        peaks = dict(sorted(self._roles.items())) | {"driver": Peak(resident_peak())}
        host = {f"memory/{role}": peak.host / GIB for role, peak in peaks.items()}
        return host | {f"memory/{role}_gpu": peak.gpu / GIB for role, peak in peaks.items() if peak.gpu}

    def summary(self) -> str:
        """One line: `policy 0.61, rollout 1.20, driver 0.31 GiB`."""
        parts = (f"{name.removeprefix('memory/')} {value:.2f}" for name, value in self.metrics().items())
        return f"{', '.join(parts)} GiB"
