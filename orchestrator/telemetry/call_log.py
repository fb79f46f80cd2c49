"""Every bounded call to a worker: which are open, since when and until when, and which have ended.

`ActorWorker` reports its calls here. What is open explains a run that waits; what has ended becomes the run's timeline.
A call costs two dict operations and two tuples.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from troupe.orchestrator.telemetry.timeline import OK, Span
from troupe.workers.contract.roles import Trainer, Watched, Worker

_MOST_SPANS = 200_000
"""Ended calls that are kept until `drain`."""
_PROBES = frozenset({Worker.health.__name__, Watched.watch.__name__, Trainer.save_status.__name__})
"""Methods whose successful calls are not kept: they ask, thousands of times, whether a worker lives or has written."""


class OpenCall(NamedTuple):
    """A call that has not ended."""

    worker: str
    """Role and index, as in `rollout-0`."""
    method: str
    since: float
    """Seconds since 1970."""
    timeout_s: float
    """Bound on the call; 0 if it has none."""
    detail: str
    """What the call is about: a prompt_uid, `version 7`; may be empty."""


class CallLog:
    """The calls of one run. It belongs to the event loop of the controller and takes no lock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        # Plain tuples: named ones cost three times as much, and most of them are never looked at.
        self._open: dict[int, tuple[str, str, float, float, str]] = {}
        self._ended: deque[tuple[str, str, float, float, str, str]] = deque(maxlen=_MOST_SPANS)

    def begin(self, worker: str, method: str, timeout_s: float, detail: str = "") -> int:
        """Records the start of a call; returns its number, for `end`."""
        call = next(self._numbers)
        self._open[call] = (worker, method, self._clock(), timeout_s, detail)
        return call

    def end(self, call: int, status: str = OK, detail: str = "") -> None:
        """Records the end of a call. `detail`: what only its result contains; if empty, `begin`'s is kept."""
        worker, method, since, _, known = self._open.pop(call)
        if status != OK or method not in _PROBES:
            self._ended.append((worker, method, since, self._clock(), status, detail or known))

    @contextmanager
    def during(self, worker: str, method: str, timeout_s: float, detail: str = "") -> Iterator[None]:
        """Records the block as a call."""
        call = self.begin(worker, method, timeout_s, detail)
        try:
            yield
        except BaseException as error:
            self.end(call, type(error).__name__)
            raise
        self.end(call)

    def open_calls(self) -> list[OpenCall]:
        """The calls that have not ended, the oldest first. May be called from any thread."""
        return [OpenCall(*call) for call in list(self._open.values())]  # a copy: calls begin and end concurrently

    def drain(self) -> list[Span]:
        """The calls that have ended since the last `drain`, in order of their ends.

        Of more than `_MOST_SPANS`, the last ones.
        """
        spans = [Span(*call) for call in self._ended]
        self._ended.clear()
        return spans
