"""Timers for code that does not time itself: functions are wrapped to record how long they run."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class Parts:
    """Seconds by named part, accumulated since the last `read`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: of wall time, or of the CPU time of a thread, or of a process that does one thing at a time."""
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @property
    def so_far(self) -> dict[str, float]:
        """The seconds by part, without resetting them."""
        return dict(self._seconds)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the context to `part`, also where it raises."""
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + self._clock() - began

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Add the time of every further call of `owner.name` to `part`; `owner` is a module, a class or an object."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.timed(part):
                return function(*args, **kwargs)

        setattr(owner, name, wrapper)

    def watch_coroutine(self, owner: Any, name: str, part: str) -> None:
        """As `watch`, for a coroutine function: the time that it keeps the event loop busy, without its waits."""
        function: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(self, part, function(*args, **kwargs))

        setattr(owner, name, wrapper)

    def read(self) -> dict[str, float]:
        """Return the seconds by part and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class _Steps(Awaitable[Any]):
    """A coroutine that is timed from one wait to the next."""

    def __init__(self, parts: Parts, part: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._parts = parts
        self._part = part
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._coroutine.__await__()
        error: BaseException | None = None
        while True:
            try:
                with self._parts.timed(self._part):
                    wait = next(steps) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            error = None
            try:
                yield wait
            except BaseException as raised:
                error = raised
