"""What every sink does, and what it needs to know about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

Metrics = Mapping[str, object]
"""Metrics by name; a few are text (`kind`)."""


class MetricSink(Protocol):
    """Destination of a run's metrics."""

    def write(self, step: int, metrics: Metrics, /) -> None:
        """Record one step's metrics. Does not block for longer than a write to a file."""
        ...

    def close(self) -> None:
        """Release resources; no write follows."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are recorded."""

    folder: Path
    name: str = ""
    resume_at: int = 0
    """Steps that the run has completed. Records of later steps are dropped if possible; at 0, all."""
    project: str = "troupe"
    """Project (wandb) or experiment (MLflow) of the run."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The resolved spec."""

    @property
    def keep_through(self) -> int:
        """Last step whose records stay; -1: none."""
        return self.resume_at if self.resume_at > 0 else -1


def numbers(metrics: Metrics) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
