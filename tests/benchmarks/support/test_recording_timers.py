"""Timers of coroutines."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.support.recording_timers import LoopParts
from tests.clock import Clock


class Loop:
    """Work on an event loop that spends the clock's time itself, and waits for others that do."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def _other(self) -> None:
        self.clock.now += 100.0

    async def work(self, fails: bool) -> str:
        self.clock.now += 1.0
        await asyncio.gather(self._other(), self._other())
        self.clock.now += 2.0
        if fails:
            raise ValueError("as planned")
        return "done"

    async def wait(self) -> None:
        await asyncio.sleep(1000)


async def test_a_coroutine_is_timed_without_its_waits_and_passes_results_and_errors() -> None:
    clock = Clock()
    parts, loop = LoopParts(clock), Loop(clock)
    parts.watch_coroutine(loop, "work", "work")
    parts.watch_coroutine(loop, "wait", "wait")
    assert await loop.work(False) == "done"
    with pytest.raises(ValueError, match="as planned"):
        await loop.work(True)
    waiting = asyncio.ensure_future(loop.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert parts.so_far == {"work": 6.0, "wait": 0.0}
