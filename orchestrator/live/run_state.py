"""The state of a run, read from its events and its lock: every command, report and tracker says this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from troupe.orchestrator.live.lock import LockHolder
from troupe.orchestrator.telemetry.run_folder import RunFolder

Name = Literal["not started", "running", "finished", "stopped", "failed", "died", "unknown"]


@dataclass(frozen=True)
class RunState:
    """Whether a run is active, or how it has ended."""

    name: Name = "unknown"
    """`died`: its process has ended, and has left no record of that; `unknown`: a folder without events."""
    detail: str = ""
    """Why it failed, died, or finished before its last step, or what it waits for between two starts; else empty."""
    steps: int = 0
    """The last recorded step."""
    total: int = 0
    """`schedule.steps`, or 0 if the spec is not known."""

    @property
    def where(self) -> str:
        """`after 3 of 10 steps`, or `before its first step`."""
        return f"after {self.steps} of {self.total} steps" if self.steps else "before its first step"

    def __str__(self) -> str:
        said = self.name if self.name in ("not started", "unknown") else f"{self.name} {self.where}"
        return f"{said}: {self.detail}" if self.detail else said


def run_state(run: RunFolder) -> RunState:
    """The state of the run in a folder."""
    total = run.spec.get("schedule", {}).get("steps", 0)
    return state_of(run.events(), LockHolder.of(run.path), max(run.steps(), default=0), total)


def state_of(events: Sequence[Mapping[str, Any]], holder: LockHolder | None, steps: int, total: int) -> RunState:
    """The state of a run.

    Args:
        events: All of them, or those of its starts and ends.
        holder: Who has locked its folder, and has not released it.
        steps: The last recorded step.
        total: `schedule.steps`.
    """
    last = next((one for one in reversed(events) if one.get("event") in ("run_started", "run_ended")), {})
    resumed = holder is not None and holder.since > float(last.get("time") or 0.0)
    if last.get("event") == "run_ended" and not resumed:
        why = ": ".join(str(last[name]) for name in ("error", "detail") if last.get(name))
        return RunState(last.get("how", "unknown"), why, steps, total)
    if holder is not None and holder.is_active:
        return RunState("running", holder.waits, steps, total)
    if holder is None and not last:
        return RunState("unknown" if steps else "not started", "", steps, total)
    return RunState("died", "it could not record its end" if holder is None else holder.absence, steps, total)
