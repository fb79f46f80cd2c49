"""What a fault does to a running run, and what was seen afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from tests.real.commands import Run, ledger_balances
from troupe.orchestrator.roles.table import ROLES

RECOVERY_S = 240.0
"""Longest recovery."""
WORKERS = {row.kind: f"ray::{row.worker.partition(':')[2]}" for row in ROLES.values() if row.kind == row.section}
"""Beginning of the title of a worker's process, by role."""
ENGINE = "VLLM::EngineCore"
"""Title of the process of an engine."""


@dataclass(frozen=True)
class Outcome:
    """What one fault led to."""

    fault: str
    outcome: str
    found_s: float | None = None
    """Seconds until the run said so."""
    recovered_s: float | None = None
    """Seconds until the first step that began after that has ended."""
    lost_samples: int = 0
    left_behind: str = "nothing"
    ok: bool = True


@dataclass(frozen=True)
class Signalled:
    """A signal to the process of one worker of a run that trains."""

    what: str
    """Role, as the table names it."""
    title: str
    """Beginning of the title of its process."""
    number: signal.Signals

    @property
    def name(self) -> str:
        """The fault in words."""
        return f"{self.number.name} of {self.what}"

    def inject(self, run: Run) -> Outcome:
        """Send the signal, and wait until the run has recovered."""
        process = _only_process(run, self.title)
        before, said = run.metrics[-1], len(run.stderr)
        process.send_signal(self.number)
        began = time.monotonic()
        found_s = seconds_until(run, lambda: "WARNING" in run.stderr[said:], began)
        step = run.metrics[-1]["step"]
        recovered_s = seconds_until(run, lambda: run.metrics[-1]["step"] > step + 1, began)
        after = run.metrics[-1]
        lost = round(after["ledger/dropped"] - before["ledger/dropped"])
        ended = run.process.poll()
        ok = found_s is not None and recovered_s is not None and ledger_balances(after) and lost == 0
        outcome = "continues" if recovered_s is not None else "stalls" if ended is None else f"ended with {ended}"
        return Outcome(self.name, outcome, found_s, recovered_s, lost, ok=ok)


def seconds_until(run: Run, condition: Callable[[], Any], began: float) -> float | None:
    """Seconds since `began` at which the condition holds; None if the run ends or stalls before."""
    while time.monotonic() - began < RECOVERY_S:
        if condition():
            return time.monotonic() - began
        if run.process.poll() is not None:
            return None
        time.sleep(0.05)
    return None


def _only_process(run: Run, title: str) -> psutil.Process:
    """The process of a worker; once there is exactly one that is not ending."""
    return run.wait_until(lambda: found[0] if len(found := run.processes(title)) == 1 else None, f"one process {title}")


def left_behind(run: Run) -> str:
    """Processes and files in shared memory that remain after a run has ended."""
    processes, files = run.leftover_processes(), run.weight_files
    parts = [f"{len(processes)} process(es)"] * bool(processes) + [f"{len(files)} file(s) in /dev/shm"] * bool(files)
    return ", ".join(parts) or "nothing"


def stop_group(run: Run, number: signal.Signals) -> None:
    """Send a signal to the foreground process group of a run."""
    os.killpg(run.process.pid, number)
