"""The workers and services of a run, once its workers are started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.pools.queues import Queues
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.telemetry.console import Console


class Observer(Protocol):
    """Observes the run from a thread (`orchestrator/insight/why/observer.py`)."""

    queues: Callable[[], Queues]
    """Work that waits for engines; called from any thread."""


@dataclass(frozen=True)
class RunContext:
    """The workers and services of a run."""

    cluster: Cluster
    launcher: WorkerLauncher
    workers: Workers
    console: Console
    stop: asyncio.Event
    """Set when the run must save and exit."""
    observer: Observer | None = None
    """Answers `troupe why`."""
