"""Bounds on calls, derived from the durations of earlier calls of the same method.

A worker runs one call at a time: a call that is made while others are open waits for these first, and may take as long
as all of them together. The duration of a call includes such a wait, unless it waits for a call without a bound
(a checkpoint): it is then neither bounded nor measured.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from troupe.orchestrator.errors import WorkerTimeout

FACTOR = 10
"""Times the longest call before that a call may take."""
_ENOUGH = 5
"""Measured calls of a method that are needed to bound the next one."""


class AdaptiveTimeouts:
    """Durations of the calls of one group of workers, by method."""

    def __init__(self, hung_s: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        """`hung_s`: seconds that every call may take, however short the earlier ones were."""
        self._hung_s = hung_s
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._longest: dict[str, float] = {}
        self._open: list[float] = []
        """Bounds of the open calls; infinite if a call has none."""

    @property
    def idle(self) -> bool:
        return not self._open

    @contextmanager
    def occupied(self, bound_s: float = math.inf) -> Iterator[None]:
        """The workers have a call in the block, with this bound."""
        self._open.append(bound_s)
        try:
            yield
        finally:
            self._open.remove(bound_s)

    @contextmanager
    def bounded(self, method: str, timeout_s: float) -> Iterator[float]:
        """The bound on the call in the block: `timeout_s`, or less if earlier calls were faster. A call that exceeds
        it may have been slow only: the next one may take `FACTOR` times as long."""
        own_s, before_s, began = self._bound(method), sum(self._open), self._clock()
        bound_s = min(timeout_s, own_s + before_s)
        try:
            with self.occupied(own_s):
                yield bound_s
        except WorkerTimeout as error:
            if bound_s >= timeout_s:
                raise
            reason = f"{FACTOR} times the longest such call before was {FACTOR * self._longest[method]:.3g} s"
            self._longest[method] = max(own_s, self._longest[method])
            raise WorkerTimeout(error.worker, error.method, f"{error.detail}: {reason} (failures.hung_s)") from error
        if before_s < math.inf:
            self._calls[method] += 1
            self._longest[method] = max(self._clock() - began, self._longest.get(method, 0.0))

    def _bound(self, method: str) -> float:
        """Bound on the call itself, or infinity while too few calls are known."""
        return max(self._hung_s, FACTOR * self._longest[method]) if self._calls[method] >= _ENOUGH else math.inf
