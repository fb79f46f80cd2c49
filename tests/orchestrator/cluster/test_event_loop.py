"""Bounds of many waits by one timer each: who is ended, when, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import deadlines
from orchestrator.deadlines import within
from tests.clock import VirtualLoop, on_virtual_time


async def _answer(after_s: float, value: int = 0) -> int:
    await asyncio.sleep(after_s)
    return value


async def _ended_at(bound_s: float, after_s: float, begin_s: float = 0.0) -> tuple[float, bool]:
    """When the wait ended, and whether it had its answer."""
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
def test_every_wait_ends_with_its_answer_or_at_its_bound(waits: list[tuple[int, int, int]]) -> None:
    """Whatever begins and ends meanwhile. (Bounds are whole seconds; answers come half a second beside them.)"""

    async def run() -> None:
        ends = await asyncio.gather(*(_ended_at(bound, after + 0.5, begin) for bound, after, begin in waits))
        for (bound, after, begin), (ended, answered) in zip(waits, ends, strict=True):
            assert answered == (after + 0.5 < bound)
            assert ended == pytest.approx(begin + min(bound, after + 0.5), abs=1e-6)
        assert all(not others for others in deadlines._by_loop[asyncio.get_running_loop()].values())

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


async def test_what_was_awaited_is_cancelled_and_the_caller_goes_on() -> None:
    awaited = asyncio.ensure_future(_answer(60.0))
    with pytest.raises(TimeoutError):
        await within(0.01, awaited)
    assert awaited.cancelled()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert await within(5.0, _answer(0.0, 4)) == 4


async def test_a_cancellation_from_outside_stays_one() -> None:
    task = asyncio.create_task(within(5.0, _answer(60.0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_pass() -> None:
    async def refuse() -> None:
        raise ValueError("not like this")

    with pytest.raises(ValueError, match="not like this"):
        await within(5.0, refuse())


def test_a_loop_that_is_closed_is_let_go_of() -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(within(60.0, _answer(0.0)))
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
