"""Concurrent calls to many workers."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from troupe.orchestrator.cluster.worker_group import gather_all


async def test_gather_all_yields_to_other_tasks_and_raises_the_first_error() -> None:
    started: list[int] = []
    seen: list[int] = []

    async def call(number: int) -> int:
        started.append(number)
        await asyncio.sleep(0)
        if number == 3:
            raise ValueError("three")
        return number

    async def observe() -> None:
        while True:
            seen.append(len(started))
            await asyncio.sleep(0)

    observer = asyncio.create_task(observe())
    assert await gather_all(call(number) for number in range(100, 300)) == list(range(100, 300))
    assert max(after - before for before, after in itertools.pairwise(seen)) < 50
    with pytest.raises(ValueError, match="three"):
        await gather_all(call(number) for number in range(200))
    observer.cancel()
    assert await gather_all(call(number) for number in (7,)) == [7] and await gather_all([]) == []
