"""What a run has at its disposal, once its workers are started."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.insight.why.observer import RunObserver
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.telemetry.console import Console


@dataclass(frozen=True)
class RunContext:
    """What a run has at its disposal."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    console: Console
    stop: asyncio.Event
    """Set when the run must save and exit."""
    observer: RunObserver | None = None
    """Answers `troupe why`."""
