"""Which engine is given a group, and who waits for one, against fakes."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from orchestrator.engine_pool import Engine, EnginePool
from orchestrator.errors import EnginesLost, WorkerDied
from orchestrator.handles import together
from tests.fakes import BOUNDS, FakeEngine, fake_pool


def pool_of(engines: int, max_outstanding: int) -> EnginePool:
    fakes = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(engines)]
    return fake_pool(fakes, replace(BOUNDS, max_outstanding=max_outstanding, restarts=0))


async def test_the_engine_with_least_to_do_comes_first() -> None:
    pool = pool_of(3, 8)
    rng, held = random.Random(5), list[Engine]()
    for _ in range(200):
        if held and (len(held) == 12 or rng.random() < 0.5):
            await pool.release(held.pop(rng.randrange(len(held))), 2)
        else:
            least = min(engine.outstanding for engine in pool.engines)
            held.append(await pool.acquire(2))
            assert held[-1].outstanding == least + 2
    assert sum(engine.outstanding for engine in pool.engines) == 2 * len(held)


async def test_who_waits_longest_is_served_first_and_only_as_far_as_there_is_room() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    served: list[str] = []

    async def ask(name: str, samples: int) -> None:
        await pool.acquire(samples)
        served.append(name)

    tasks = [asyncio.create_task(ask(name, 2)) for name in "abc"]
    await asyncio.sleep(0)
    await pool.release(engine, 2)
    await asyncio.sleep(0)
    assert served == ["a"] and engine.outstanding == 4
    await pool.release(engine, 4)
    await asyncio.gather(*tasks)
    assert served == ["a", "b", "c"] and engine.outstanding == 4


async def test_room_given_to_one_who_has_just_gone_is_free_again() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    gone, next_one = asyncio.create_task(pool.acquire(4)), asyncio.create_task(pool.acquire(4))
    await asyncio.sleep(0)
    await pool.release(engine, 4)  # booked for `gone`, which has not run since
    gone.cancel()
    assert await next_one is engine
    assert gone.cancelled() and engine.outstanding == 4


async def test_everybody_who_waits_is_told_when_the_last_engine_is_lost() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    waiting = [asyncio.create_task(pool.acquire(4)) for _ in range(3)]
    await asyncio.sleep(0)
    engine.handle.kill()
    await pool.report_failure(engine, WorkerDied("rollout-0", "generate", "killed"))
    for task in waiting:
        with pytest.raises(EnginesLost, match="no rollout engine is left"):
            await task


async def test_calls_to_very_many_workers_let_others_go_on_and_end_with_the_first_error() -> None:
    begun: list[int] = []
    seen: list[int] = []

    async def call(number: int) -> int:
        begun.append(number)
        await asyncio.sleep(0)
        if number == 3:
            raise ValueError("three")
        return number

    async def other() -> None:
        while True:
            seen.append(len(begun))
            await asyncio.sleep(0)

    looker = asyncio.create_task(other())
    assert await together(call(number) for number in range(100, 300)) == list(range(100, 300))
    assert max(after - before for before, after in itertools.pairwise(seen)) < 50
    with pytest.raises(ValueError, match="three"):
        await together(call(number) for number in range(200))
    looker.cancel()
    assert await together(call(number) for number in (7,)) == [7] and await together([]) == []
