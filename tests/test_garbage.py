"""The collector inside a run: new cycles go soon, old objects are not looked through, and all is as before after it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from orchestrator import garbage
from orchestrator.garbage import rare_collections


class _Knot:
    def __init__(self) -> None:
        self.me = self


async def test_new_cycles_are_collected_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any object being made meanwhile that Python's own rounds would count."""
    monkeypatch.setattr(garbage, "_EVERY_S", 0.001)
    async with rare_collections():
        knot = weakref.ref(_Knot())
        async with asyncio.timeout(10):
            while knot() is not None:
                await asyncio.sleep(0.001)


async def test_thresholds_come_back_and_the_rounds_end() -> None:
    before, tasks = gc.get_threshold(), asyncio.all_tasks()
    with pytest.raises(ValueError, match="not like this"):
        async with rare_collections():
            assert gc.get_threshold() != before and gc.get_freeze_count()
            raise ValueError("not like this")
    await asyncio.sleep(0)
    assert gc.get_threshold() == before and not gc.get_freeze_count()
    assert asyncio.all_tasks() == tasks
