"""Throughput of the engines: tokens per second of the time in which at least one of them has a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GenerationMeter:
    """Counts tokens, and the time in which groups are being generated.

    Other parts of a step, such as the updates of synchronous training, do not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active = 0
        self._since = 0.0
        """Beginning of the current stretch with groups, or the last reading in it."""
        self._seconds = 0.0
        self._tokens = 0

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The context in which one group is generated."""
        if self._active == 0:
            self._since = self._clock()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self._seconds += self._clock() - self._since

    def add(self, tokens: int) -> None:
        """Counts the tokens of a finished group."""
        self._tokens += tokens

    def read(self) -> float:
        """Tokens per second since the last reading, or 0 if nothing was generated.

        Tokens of unfinished groups count in the reading in which their group finishes.
        """
        now = self._clock()
        seconds = self._seconds + (now - self._since if self._active else 0.0)
        tokens, self._tokens, self._seconds, self._since = self._tokens, 0, 0.0, now
        return tokens / seconds if seconds > 0 else 0.0
