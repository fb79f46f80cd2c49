"""Virtual time: a clock that a test sets, and an event loop whose waits take no real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    """Advances the virtual time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time that counts the timers set on it."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self.timers = 0
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._virtual.now

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        """Set a timer and count it."""
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


def on_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion on virtual time: no bound depends on how busy the machine is."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
