"""Work that waits for the engines of a run, as `troupe why` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineQueue:
    """Work that the driver has sent to one engine."""

    name: str
    state: str
    outstanding: int
    """Samples that the engine has not returned."""


@dataclass(frozen=True)
class Queues:
    """Engines, and the work that waits for them."""

    engines: tuple[EngineQueue, ...] = ()
    starting: tuple[str, ...] = ()
    waiting: int = 0
    """Groups that wait for an engine with room."""
