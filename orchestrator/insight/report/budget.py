"""Which steps' data enter the page, if not all of them fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, evenly spread, the first and the last among them."""
    if count >= len(steps):
        return list(steps)
    if count < 2:
        return list(steps[-count:]) if count else []
    last = len(steps) - 1
    return [steps[round(i * last / (count - 1))] for i in range(count)]


def fitting(steps: Sequence[int], size: Callable[[int], int], budget: int) -> list[int]:
    """The most steps, evenly spread, whose sizes add up to the budget; the last one in any case.

    Args:
        steps: Ascending.
        size: Size of a step's data in bytes.
        budget: In bytes.
    """
    low, high = 1, len(steps)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(map(size, spread(steps, middle))) <= budget:
            low = middle
        else:
            high = middle - 1
    return spread(steps, low) if steps else []
