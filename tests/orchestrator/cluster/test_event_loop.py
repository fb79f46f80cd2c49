"""Timeouts of many waits with one timer per timeout, and rare garbage collections."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clock import VirtualLoop, on_virtual_time
from tests.conftest import count_frozen
from troupe.orchestrator.cluster import event_loop
from troupe.orchestrator.cluster.event_loop import rare_collections, within

HEAPS = """
import ctypes, threading
from troupe.orchestrator.cluster.event_loop import share_heap

def allocate():
    kept.append(libc.malloc(2**16))
    barrier.wait()

share_heap()
libc, kept, barrier = ctypes.CDLL(None), [], threading.Barrier(8)
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, stream)
libc.fclose(stream)
"""


def test_threads_share_a_heap() -> None:
    """With one for each, what a thread has freed stays with its heap."""
    said = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True, check=True).stdout
    assert len(re.findall("<heap nr=", said)) == 1


async def _answer(after_s: float, value: int = 0) -> int:
    await asyncio.sleep(after_s)
    return value


async def _end_of_wait(bound_s: float, after_s: float, begin_s: float = 0.0) -> tuple[float, bool]:
    """Time at which the wait ends, and whether it has its answer."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(begin_s)
    try:
        assert await within(bound_s, _answer(after_s, 7)) == 7
    except TimeoutError:
        return loop.time(), False
    return loop.time(), True


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 5]), st.integers(0, 12), st.integers(0, 12)),
        min_size=1,
        max_size=30,
    )
)
def test_every_wait_ends_with_its_answer_or_at_its_timeout(waits: list[tuple[int, int, int]]) -> None:
    """Waits overlap in any way. Timeouts are whole seconds and answers come at half seconds: they never coincide."""

    async def run() -> None:
        ends = await asyncio.gather(*(_end_of_wait(bound, after + 0.5, begin) for bound, after, begin in waits))
        for (bound, after, begin), (ended, answered) in zip(waits, ends, strict=True):
            assert answered == (after + 0.5 < bound)
            assert ended == pytest.approx(begin + min(bound, after + 0.5), abs=1e-6)
        assert all(not others for others in event_loop._by_loop[asyncio.get_running_loop()].values())

    on_virtual_time(run())


def test_ten_thousand_waits_have_one_timer() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        never = loop.create_future()
        waits = [asyncio.create_task(within(60.0, asyncio.shield(never))) for _ in range(10_000)]
        await asyncio.sleep(0)
        assert loop.timers == 1
        never.set_result(3)
        assert await asyncio.gather(*waits) == [3] * 10_000
        assert loop.timers == 1

    on_virtual_time(run())


async def test_a_timeout_cancels_the_awaitable_and_not_the_caller() -> None:
    awaited = asyncio.ensure_future(_answer(60.0))
    with pytest.raises(TimeoutError):
        await within(0.01, awaited)
    assert awaited.cancelled()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert await within(5.0, _answer(0.0, 4)) == 4


async def test_a_cancellation_of_the_caller_is_not_a_timeout() -> None:
    task = asyncio.create_task(within(5.0, _answer(60.0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_are_passed_to_the_caller() -> None:
    async def fail() -> None:
        raise ValueError("not like this")

    with pytest.raises(ValueError, match="not like this"):
        await within(5.0, fail())


def test_a_closed_loop_is_freed() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(within(60.0, _answer(0.0)))
    loop.close()
    closed = weakref.ref(loop)
    del loop
    gc.collect()
    assert closed() is None


class _Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


async def test_new_cycles_are_collected_on_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other objects are allocated, so Python's own thresholds would not trigger a collection."""
    monkeypatch.setattr(event_loop, "_EVERY_S", 0.001)
    async with rare_collections():
        cycle = weakref.ref(_Cycle())
        async with asyncio.timeout(10):
            while cycle() is not None:
                await asyncio.sleep(0.001)


async def test_thresholds_are_restored_and_the_collecting_task_ends() -> None:
    before, tasks = gc.get_threshold(), asyncio.all_tasks()
    with pytest.raises(ValueError, match="not like this"):
        async with rare_collections():
            assert gc.get_threshold() != before and count_frozen()
            raise ValueError("not like this")
    await asyncio.sleep(0)
    assert gc.get_threshold() == before
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("excluded", [False, True])
async def test_objects_that_the_caller_excluded_from_collection_stay_excluded(
    excluded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", count_frozen)
    gc.unfreeze()
    if excluded:
        gc.freeze()
    async with rare_collections():
        assert gc.get_freeze_count()
    assert bool(gc.get_freeze_count()) == excluded
    gc.freeze()
