"""Seconds by part of code that does not measure itself: functions are replaced by ones that note how long they took."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Parts:
    """Seconds by part since they were last read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def noted(self, part: str) -> Iterator[None]:
        """What happens inside counts as `part`, also where it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - began

    def watch(self, owner: Any, name: str, part: str) -> None:
        """From now on a call of `owner.name` (a module's or a class's) counts as `part`."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.noted(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed)

    def read(self) -> dict[str, float]:
        """Seconds by part, and begin anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
