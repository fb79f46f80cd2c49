"""Asynchronous successive halving (ASHA; Li et al. 2020, arXiv 1810.05934): which trials end early."""

from __future__ import annotations

import numpy as np

KEPT = 3
"""One of so many trials continues at each rung."""


class Halving:
    """The rungs: steps at which trials are compared. It decides as Ray Tune's `ASHAScheduler` with one bracket does."""

    def __init__(self, first: int, steps: int) -> None:
        """Rungs at step `first`, and at 3, 9, 27 ... times as many, before the end of `steps`."""
        rungs: list[int] = []
        while (rung := first * KEPT ** len(rungs)) <= steps:
            rungs.append(rung)
        self._rungs = {rung: dict[str, float]() for rung in reversed(rungs)}

    def stops(self, trial: str, step: int, value: float) -> bool:
        """Whether a trial ends, which has a value at a step (higher is better): it is below the best third of those
        that were at its rung before it. A trial counts once at each rung."""
        for rung, values in self._rungs.items():
            if step < rung or trial in values:
                continue
            below = bool(values) and value < float(np.percentile([*values.values()], 100 * (1 - 1 / KEPT)))
            values[trial] = value
            return below
        return False
