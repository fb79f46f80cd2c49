"""The engine pool against fakes: the choice of an engine, waiting for one, and engine failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.clock import on_virtual_time
from tests.fakes import FakeEngine, FakeTable, FaultyEngine, FaultyWorker, fake_pool, pool_spec
from troupe.orchestrator.errors import EnginesLost, WorkerDied, WorkerRaised, WorkerTimeout
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.workers.contract.messages import GroupRequest, GroupSummary, WorkerHealth


def pool_of(engines: int, max_load: int) -> EnginePool:
    fakes = [FaultyEngine(f"rollout-{i}", random.Random(i)) for i in range(engines)]
    return fake_pool(fakes, pool_spec(max_load=max_load, restarts=0))


async def test_acquire_returns_the_least_loaded_engine() -> None:
    pool = pool_of(3, 8)
    rng, held = random.Random(5), list[Engine]()
    for _ in range(200):
        if held and (len(held) == 12 or rng.random() < 0.5):
            pool.release(held.pop(rng.randrange(len(held))), 2)
        else:
            least = min(engine.outstanding for engine in pool.workers)
            held.append(await pool.acquire(2))
            assert held[-1].outstanding == least + 2
    assert sum(engine.outstanding for engine in pool.workers) == 2 * len(held)


async def test_waiting_callers_are_served_in_order_and_within_the_load_limit() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    served: list[str] = []

    async def acquire(name: str, samples: int) -> None:
        await pool.acquire(samples)
        served.append(name)

    tasks = [asyncio.create_task(acquire(name, 2)) for name in "abc"]
    await asyncio.sleep(0)
    pool.release(engine, 2)
    await asyncio.sleep(0)
    assert served == ["a"] and engine.outstanding == 4
    pool.release(engine, 4)
    await asyncio.gather(*tasks)
    assert served == ["a", "b", "c"] and engine.outstanding == 4


class StepwiseEngine(FakeEngine):
    """An engine whose samples finish one at a time, when the test calls `finish_one`."""

    def __init__(self) -> None:
        super().__init__("rollout-0")
        self.unfinished: dict[str, int] = {}
        """Unfinished samples of each group."""
        self.ended: dict[str, asyncio.Event] = {}

    async def generate(
        self, request: GroupRequest, prompts: object, finished: Any = None
    ) -> tuple[GroupSummary, FakeTable]:
        uid = request.prompt_uid
        self.unfinished[uid], self.ended[uid] = request.samples, asyncio.Event()
        await self.ended[uid].wait()
        del self.unfinished[uid]
        ahead = sum(request.samples - count for count in self.unfinished.values())
        return GroupSummary(uid, 0, "rollout-0", (), 0.0, finished_ahead=ahead), FakeTable("rollouts", (uid,))

    def finish_one(self, uid: str) -> bool:
        """Finish a sample of this group. Returns whether it was the last one."""
        self.unfinished[uid] -= 1
        if not self.unfinished[uid]:
            self.ended[uid].set()
        return not self.unfinished[uid]


async def test_finished_samples_free_their_slots_before_their_group_ends() -> None:
    """An engine of 16 slots stays full and within its limit although samples of a group finish at different times."""
    engine, size, slots = StepwiseEngine(), 4, 16
    held = Engine(FaultyWorker("rollout-0", engine), "host")
    pool = EnginePool([held], FaultyEngine, pool_spec(slots + 2 * size), PoolWeights())  # pyright: ignore[reportArgumentType]  # no engine is replaced
    prompts = FakeTable("prompts", ())

    async def group(uid: str) -> None:
        acquired = await pool.acquire(size)
        try:
            await pool.generate(GroupRequest(uid, 0, 0, size, 0), prompts, acquired)
        finally:
            pool.release(acquired, size)

    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(group(f"p{i}")) for i in range(200)]
    await settle()
    rng, full, taken = random.Random(3), 0, 0
    while len(engine.ended) < len(tasks):
        unfinished = sum(engine.unfinished.values())
        assert unfinished <= held.load <= pool.dispatch.max_load
        full, taken = full + (unfinished >= slots), taken + 1
        running = [uid for uid, count in engine.unfinished.items() for _ in range(count)][:slots]
        if engine.finish_one(rng.choice(running)):
            await settle()
            assert held.load == sum(engine.unfinished.values())
            assert held.load > pool.dispatch.max_load - size or len(engine.ended) == len(tasks)  # no free slots
    assert full / taken > 0.9
    while engine.unfinished:
        engine.finish_one(next(iter(engine.unfinished)))
        await settle()
    await asyncio.gather(*tasks)
    assert (held.outstanding, held.load) == (0, 0)


async def test_a_failed_call_resets_the_finished_samples_of_its_engine() -> None:
    pool = pool_of(1, 8)
    engine = await pool.acquire(8)
    engine.finished_ahead = 4
    await pool.report_failure(engine, WorkerDied(engine.name, "generate", "lost on the way"))
    assert engine.load == 8


async def test_an_engine_assigned_to_a_cancelled_caller_is_free_again() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    cancelled, waiting = asyncio.create_task(pool.acquire(4)), asyncio.create_task(pool.acquire(4))
    await asyncio.sleep(0)
    pool.release(engine, 4)  # assigned to `cancelled`, which has not run since
    cancelled.cancel()
    assert await waiting is engine
    assert cancelled.cancelled() and engine.outstanding == 4


async def test_all_waiting_callers_fail_when_the_last_engine_is_lost() -> None:
    pool = pool_of(1, 4)
    engine = await pool.acquire(4)
    waiting = [asyncio.create_task(pool.acquire(4)) for _ in range(3)]
    await asyncio.sleep(0)
    engine.handle.kill()
    await pool.report_failure(engine, WorkerDied("rollout-0", "generate", "killed"))
    for task in waiting:
        with pytest.raises(EnginesLost, match="no rollout engine is left"):
            await task


async def _engine(name: str) -> Engine:
    return Engine(FaultyWorker(name, FaultyEngine(name, random.Random(0))), "host")


@pytest.mark.parametrize(("failures", "serves"), [(2, True), (3, False)])
def test_a_replacement_that_does_not_start_is_started_again_while_the_budget_lasts(failures: int, serves: bool) -> None:
    """As on a node that is lost with its engine, which Ray finds out later."""

    async def scenario() -> None:
        starts = 0

        async def spawn(name: str) -> Engine:
            nonlocal starts
            starts += 1
            if starts <= failures:
                raise WorkerDied(name, "start", "the node is gone")
            return await _engine(name)

        pool = EnginePool([await _engine("rollout-0")], spawn, pool_spec(max_load=8, restarts=3), PoolWeights())
        held = await pool.acquire(4)
        waiting = asyncio.create_task(pool.acquire(8))
        held.handle.kill()
        await pool.report_failure(held, WorkerDied("rollout-0", "generate", "killed"))
        if serves:
            assert (await waiting).name == "rollout-0"
        else:
            with pytest.raises(EnginesLost, match=r"3 of 3 restarts used.*last loss: .*the node is gone"):
                await waiting
        assert starts == min(failures + 1, 3) and not pool.starting

    on_virtual_time(scenario())


async def lose(pool: EnginePool, fault: str) -> None:
    """The only engine of the pool dies; waits until its replacement, if there is one, serves."""
    (engine,) = pool.workers
    engine.handle.kill()
    error = WorkerDied(engine.name, "health", f"the process has ended: {fault}", fault)
    await pool.lose(engine, error)
    while pool.starting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("first", "second", "groups", "ends"),
    [
        ("ValueError: x", "ValueError: x", 0, True),
        ("ValueError: x", "ValueError: x", 1, False),
        ("ValueError: x", "ValueError: y", 0, False),
        ("", "", 0, False),
    ],
)
async def test_a_replacement_that_dies_of_the_same_fault_before_a_first_group_ends_the_run(
    first: str, second: str, groups: int, ends: bool
) -> None:
    fakes = [FaultyEngine("rollout-0", random.Random(0))]
    pool = fake_pool(fakes, pool_spec(max_load=8, restarts=3))
    await lose(pool, first)
    for _ in range(groups):
        held = await pool.acquire(2)
        await pool.generate(GroupRequest("p", 0, 0, 2, 0), FakeTable("prompts", ()), held)
        pool.release(held, 2)
    await lose(pool, second)
    if ends:
        with pytest.raises(EnginesLost, match=r"rollout-0 died like the engine .* first group: .*ValueError: x"):
            await pool.acquire(2)
    else:
        assert (await pool.acquire(2)).name == "rollout-0"
    assert pool.budget.total == (1 if ends else 2)


class _SilentEngine(FakeEngine):
    """An engine whose process is occupied: it answers no probe in time."""

    async def health(self) -> WorkerHealth:
        raise WorkerTimeout(self.name, "health", "no answer in time")


@pytest.mark.parametrize(("transferring", "serves"), [(True, True), (False, False)])
async def test_missed_probes_do_not_count_while_weights_are_transferred(transferring: bool, serves: bool) -> None:
    engine = Engine(FaultyWorker("rollout-0", _SilentEngine("rollout-0")), "host")
    pool = EnginePool([engine], _engine, pool_spec(restarts=0), PoolWeights())
    if transferring:
        await pool.weights.lock.acquire()
    for _ in range(pool.spec.failures.health_misses + 1):
        await pool.probe_all()
    assert (engine in pool.workers) is serves


async def test_an_engine_that_dies_during_a_transfer_is_lost_at_once() -> None:
    pool = pool_of(1, 4)
    (engine,) = pool.workers
    engine.handle.kill()
    await pool.weights.lock.acquire()
    await pool.probe_all()
    assert engine not in pool.workers


class _ClosedEngine(FakeEngine):
    """An engine that an update has closed, until the next one opens it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.closed = True
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def health(self) -> WorkerHealth:
        closed = self.closed
        self.asked.set()
        await self.answers.wait()
        if closed:
            raise WorkerRaised(self.name, "health", "rollout-0 is closed: a weight update failed")
        return await super().health()


@pytest.mark.parametrize("answers_during_the_transfer", [True, False])
@pytest.mark.parametrize("opened", [True, False])
async def test_an_engine_that_a_transfer_has_closed_is_lost_only_if_the_transfer_does_not_open_it(
    opened: bool, answers_during_the_transfer: bool
) -> None:
    fake = _ClosedEngine("rollout-0")
    engine = Engine(FaultyWorker("rollout-0", fake), "host")
    pool = EnginePool([engine], _engine, pool_spec(restarts=0), PoolWeights())
    await pool.weights.lock.acquire()
    reported = asyncio.create_task(pool.report_failure(engine, WorkerRaised("rollout-0", "generate", "closed")))
    await fake.asked.wait()
    if answers_during_the_transfer:
        fake.answers.set()
        await asyncio.sleep(0.01)
    assert engine in pool.workers
    fake.closed = not opened
    pool.weights.lock.release()
    fake.answers.set()
    await reported
    assert (engine in pool.workers) is opened


async def test_an_engine_that_is_lost_after_the_end_of_the_run_is_not_replaced() -> None:
    fakes = [FaultyEngine("rollout-0", random.Random(0))]
    pool = fake_pool(fakes, pool_spec(restarts=1))
    (engine,) = pool.workers
    await pool.close()
    await pool.lose(engine, WorkerDied("rollout-0", "generate", "the process is gone"))
    assert (pool.starting, pool.workers, pool.budget.total) == ([], [], 0)
