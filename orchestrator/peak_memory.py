"""What every role has needed of memory so far, from the peaks that workers tell along with their answers."""

from __future__ import annotations

from workers.messages import Answer, Peak
from workers.peaks import resident_peak

GIB = 2**30


class PeakMemory:
    """The largest worker of every role at its own peak, those that are gone included, and the driver's process."""

    def __init__(self) -> None:
        self._roles: dict[str, Peak] = {}

    def note(self, worker: str, answer: object) -> None:
        """Look at what a worker (`rollout-0`) answered; most answers that say nothing of memory are no `Answer`."""
        if isinstance(answer, Answer) and answer.peak is not None:
            role = worker.rpartition("-")[0]
            before = self._roles.get(role, Peak(0))
            self._roles[role] = Peak(max(before.host, answer.peak.host), max(before.gpu, answer.peak.gpu))

    def metrics(self) -> dict[str, float]:
        """`memory/ROLE` and `memory/driver`, and `memory/ROLE_gpu` where there is something on GPUs, in GiB."""
        peaks = dict(sorted(self._roles.items())) | {"driver": Peak(resident_peak())}
        host = {f"memory/{role}": peak.host / GIB for role, peak in peaks.items()}
        return host | {f"memory/{role}_gpu": peak.gpu / GIB for role, peak in peaks.items() if peak.gpu}

    def summary(self) -> str:
        """One line: `policy 0.61, rollout 1.20, driver 0.31 GiB`."""
        told = (f"{name.removeprefix('memory/')} {value:.2f}" for name, value in self.metrics().items())
        return f"{', '.join(told)} GiB"
