"""Timers of coroutines: how long they keep the event loop busy."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from troupe.workers.telemetry.timing import Parts


class LoopParts(Parts):
    """Parts of functions and of coroutines, which can be looked at in between."""

    @property
    def so_far(self) -> dict[str, float]:
        """The seconds by part, without resetting them."""
        return dict(self._seconds)

    def watch_coroutine(self, owner: Any, name: str, part: str) -> None:
        """As `watch`, for a coroutine function: the time that it keeps the event loop busy, without its waits."""
        function: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(self, part, function(*args, **kwargs))

        setattr(owner, name, wrapper)


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
