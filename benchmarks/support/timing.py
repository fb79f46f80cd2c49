"""Timers for code that does not time itself: functions are wrapped to record how long they run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Parts:
    """Seconds by named part, accumulated since the last `read`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: of wall time, or of the CPU time of a thread, or of a process that does one thing at a time."""
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the time of the context to `part`, also if it raises."""
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

    def read(self) -> dict[str, float]:
        """Return the seconds by part and reset them."""
        seconds, self._seconds = self._seconds, {}
        return seconds
