"""The number of workers of a role, as `troupe scale` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoleState:
    """Number of workers of a role that scales."""

    role: str
    wanted: int
    """Workers the role is scaled to: the spec's number, or the rest of it after a failed start."""
    running: int
    """Workers that receive work now."""
    scaling: bool
    """Whether workers are being added or removed."""
    min_workers: int
    max_workers: int | None

    def __str__(self) -> str:
        text = f"{self.role}: {self.wanted} {'worker' if self.wanted == 1 else 'workers'}"
        if self.scaling or self.running != self.wanted:
            text += f", {self.running} running"
        if self.scaling:
            text += ", scaling"
        limits = f"min {self.min_workers}" + ("" if self.max_workers is None else f", max {self.max_workers}")
        return f"{text} ({limits})"
