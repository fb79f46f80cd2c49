"""Bounds on tens of thousands of waits at once, without a timer of the event loop for each.

Waits with the same bound end in the order in which they began, so one timer a bound is enough: that of the oldest wait.
asyncio keeps a timer that was cancelled until half of all timers are, and then goes through all of them: with one for
each call to 16 000 engines that held up the loop for 50 ms (`python -m benchmarks.controller_scale`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_Waits = dict[asyncio.Timeout, float]
"""Waits of one bound in the order in which they began, each with the loop's time at which it is over."""

_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Waits]] = WeakKeyDictionary()
"""Waits that are under way, by event loop and bound; a bound that is here has a timer."""


async def within(bound_s: float, answer: Awaitable[T]) -> T:
    """Await `answer`, at most `bound_s` seconds.

    Raises TimeoutError when they are over; what was awaited is cancelled then.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as wait:
        waits = _enter(loop, bound_s, wait)
        try:
            return await answer
        finally:
            waits.pop(wait, None)


def _enter(loop: asyncio.AbstractEventLoop, bound_s: float, wait: asyncio.Timeout) -> _Waits:
    """Watch a wait that begins now; returns those it is among."""
    bounds = _by_loop.setdefault(loop, {})
    waits = bounds.get(bound_s)
    over = loop.time() + bound_s
    if waits is None:
        waits = bounds[bound_s] = {}
        loop.call_at(over, _end_overdue, loop, bound_s)
    waits[wait] = over
    return waits


def _end_overdue(loop: asyncio.AbstractEventLoop, bound_s: float) -> None:
    """End the waits of this bound whose time is over; come again for the oldest of the others."""
    waits, now = _by_loop[loop][bound_s], loop.time()
    while waits:
        wait, over = next(iter(waits.items()))
        if over > now:
            loop.call_at(over, _end_overdue, loop, bound_s)
            return
        del waits[wait]
        wait.reschedule(now)
    del _by_loop[loop][bound_s]
