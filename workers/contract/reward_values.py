"""Sums and comparisons of rewards that rounding does not change: 0.7 + 0.2 + 0.1 is 1.

Processes of user code import this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

TOLERANCE = 1e-9
"""Largest difference of equal rewards: of numbers above 1, as a share of them."""


def total(values: Iterable[float]) -> float:
    """The sum of rewards, rounded once; not finite if one of them is not or if they are too large."""
    given = tuple(values)
    try:
        return math.fsum(given)
    except (OverflowError, ValueError):
        return sum(given)


def is_solved(value: float, solved_at: float) -> bool:
    """Whether a reward is at least `solved_at`, to rounding."""
    return value >= solved_at - TOLERANCE * max(1.0, abs(solved_at))


def differ(values: Iterable[float]) -> bool:
    """Whether some rewards are not all equal."""
    given = tuple(values)
    low, high = min(given, default=0.0), max(given, default=0.0)
    return high - low > TOLERANCE * max(1.0, abs(low), abs(high))
