"""Which engine is given a group, and who waits for one, against fakes."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from orchestrator.engine_pool import Engine, EnginePool
from orchestrator.errors import EnginesLost, WorkerDied
from orchestrator.handles import together
from tests.fakes import BOUNDS, FakeEngine, FakeHandle, FakeTable, fake_pool
from workers.messages import GroupRequest, GroupSummary


def pool_of(engines: int, max_load: int) -> EnginePool:
    fakes = [FakeEngine(f"rollout-{i}", random.Random(i)) for i in range(engines)]
    return fake_pool(fakes, replace(BOUNDS, max_load=max_load, restarts=0))


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


@dataclass
class StepwiseEngine:
    """Its samples finish one by one, when the test says so."""

    left: dict[str, int] = field(default_factory=dict)
    """Unfinished samples of each group."""
    ended: dict[str, asyncio.Event] = field(default_factory=dict)

    async def generate(self, request: GroupRequest, prompts: object) -> tuple[GroupSummary, FakeTable]:
        uid = request.prompt_uid
        self.left[uid], self.ended[uid] = request.samples, asyncio.Event()
        await self.ended[uid].wait()
        del self.left[uid]
        ahead = sum(request.samples - left for left in self.left.values())
        return GroupSummary(uid, 0, "rollout-0", (), 0.0, finished_ahead=ahead), FakeTable("rollouts", (uid,))

    def finish_one(self, uid: str) -> bool:
        """Finish a sample of this group; whether it was the last."""
        self.left[uid] -= 1
        if not self.left[uid]:
            self.ended[uid].set()
        return not self.left[uid]


async def test_samples_free_their_places_before_their_group_is_finished() -> None:
    """An engine of 16 places is full although samples of a group finish at different times, and never gets too much."""
    engine, size, places = StepwiseEngine(), 4, 16
    bounds = replace(BOUNDS, max_load=places + 2 * size)
    held = Engine(FakeHandle("rollout-0", engine), "host")
    pool = EnginePool([held], FakeEngine, bounds)  # pyright: ignore[reportArgumentType]  # nobody is replaced
    prompts = FakeTable("prompts", ())

    async def group(uid: str) -> None:
        given = await pool.acquire(size)
        try:
            await pool.generate(GroupRequest(uid, 0, 0, size, 0), prompts, given)
        finally:
            await pool.release(given, size)

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(group(f"p{i}")) for i in range(200)]
    await settle()
    rng, full, taken = random.Random(3), 0, 0
    while len(engine.ended) < len(tasks):
        unfinished = sum(engine.left.values())
        assert unfinished <= held.load <= bounds.max_load
        full, taken = full + (unfinished >= places), taken + 1
        running = [uid for uid, left in engine.left.items() for _ in range(left)][:places]
        if engine.finish_one(rng.choice(running)):
            await settle()
            assert held.load == sum(engine.left.values())
            assert held.load > bounds.max_load - size or len(engine.ended) == len(tasks)  # what was free is given away
    assert full / taken > 0.9
    while engine.left:
        engine.finish_one(next(iter(engine.left)))
        await settle()
    await asyncio.gather(*tasks)
    assert (held.outstanding, held.load) == (0, 0)


async def test_what_an_engine_said_before_a_call_failed_counts_no_more() -> None:
    pool = pool_of(1, 8)
    engine = await pool.acquire(8)
    engine.finished_ahead = 4
    await pool.report_failure(engine, WorkerDied(engine.name, "generate", "lost on the way"))
    assert engine.load == 8


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
