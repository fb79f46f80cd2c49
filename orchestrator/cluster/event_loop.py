"""The controller's event loop at the scale of thousands of engines: cheap timeouts, rare collections, one heap.

Timeouts. Waits with the same timeout expire in the order in which they began, so one timer per timeout value is enough:
the oldest wait's. asyncio keeps a cancelled timer until half of all timers are cancelled, and then scans all of
them: with one timer for each call to 16 000 engines that blocked the loop for 50 ms
(`python -m benchmarks.controller_scale`).

Garbage collections. Thousands of groups in flight consist of several hundred thousand objects that live as long as a
group, and reference counting frees nearly all of them. With Python's defaults, repeated scans of these objects took a
third of the controller's time, in pauses of half a second. Python triggers a collection by allocations minus
deallocations: while the two are equal it does not collect for a long time, and then scans tens of thousands of new
objects at once. The youngest generations are therefore also collected at a fixed interval.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_Waits = dict[asyncio.Timeout, float]
"""Waits with one timeout in the order in which they began, each with its deadline (time of the loop)."""

_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Waits]] = WeakKeyDictionary()
"""Running waits by event loop and timeout; every timeout in it has a timer."""


async def within(timeout_s: float, answer: Awaitable[T]) -> T:
    """Awaits `answer`; after `timeout_s` seconds it is cancelled. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as wait:
        waits = _enter(loop, timeout_s, wait)
        try:
            return await answer
        finally:
            waits.pop(wait, None)


def _enter(loop: asyncio.AbstractEventLoop, timeout_s: float, wait: asyncio.Timeout) -> _Waits:
    """Registers a wait that begins now; returns all waits with the same timeout."""
    by_timeout = _by_loop.setdefault(loop, {})
    waits = by_timeout.get(timeout_s)
    deadline = loop.time() + timeout_s
    if waits is None:
        waits = by_timeout[timeout_s] = {}
        loop.call_at(deadline, _expire, loop, timeout_s)
    waits[wait] = deadline
    return waits


def _expire(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    """Ends the waits with this timeout that are past their deadline; reschedules itself for the oldest of the rest."""
    waits, now = _by_loop[loop][timeout_s], loop.time()
    while waits:
        wait, deadline = next(iter(waits.items()))
        if deadline > now:
            loop.call_at(deadline, _expire, loop, timeout_s)
            return
        del waits[wait]
        wait.reschedule(now)
    del _by_loop[loop][timeout_s]


_THRESHOLDS = (5_000, 2, 100_000)
"""Net allocations before a collection of the youngest generation, its collections before one of the middle generation
(a few milliseconds), and those, counting ours, before a full collection."""
_EVERY_S = 0.1
"""Interval of our collections; each takes a millisecond if 100 groups end per second."""
_YOUNG = 1
"""The generation that our own collections include: objects that survived at most one collection."""


_M_ARENA_MAX = -8
"""Parameter of glibc's mallopt: the most heaps of a process."""


def share_heap() -> None:
    """Makes the threads of this process allocate from one glibc heap. With one each, which keeps what it frees, a
    driver grows by 4 MiB in 100 steps."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@asynccontextmanager
async def rare_collections() -> AsyncIterator[None]:
    """Makes collections rare inside the block, and scans nothing that exists at its start. At the end these objects
    are scanned again, unless the caller had excluded objects, from which they cannot be told apart."""
    before, excluded = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    collector = asyncio.create_task(_collect_young())
    try:
        yield
    finally:
        collector.cancel()
        gc.set_threshold(*before)
        if not excluded:
            gc.unfreeze()


async def _collect_young() -> None:
    """Collects the young generations at a fixed interval until it is cancelled."""
    while True:
        await asyncio.sleep(_EVERY_S)
        gc.collect(_YOUNG)


_SUBMITTED_AT_ONCE = 16
"""Calls submitted in one iteration of the event loop."""


async def gather_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of calls that run concurrently, submitted in order. The first error cancels the others and is raised.
    After every few of thousands of submissions other tasks run."""
    rest = iter(calls)
    first = list(itertools.islice(rest, 2))
    if len(first) == 1:
        return [await first[0]]  # one call needs no task
    results: dict[int, T] = {}

    def keep(number: int, task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            results[number] = task.result()  # the task is released while others still run

    submitted = 0
    try:
        async with asyncio.TaskGroup() as group:
            for submitted, call in enumerate(itertools.chain(first, rest), 1):
                group.create_task(call).add_done_callback(partial(keep, submitted))
                if submitted % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(1, submitted + 1)]
