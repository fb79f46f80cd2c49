"""Process rewards: the steps that a reward function returns, and the tokens at which they end."""

from __future__ import annotations

import functools
import math
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

Step = tuple[int, float]
"""(end of the step, its reward)"""


@dataclass(frozen=True)
class Steps:
    """Rewards of the steps of one response, which a reward function may return instead of a number.

    ``Steps([(17, 1.0), (42, 0.0)])`` rewards ``response[:17]`` with 1 and ``response[17:42]`` with 0.
    """

    rewards: Sequence[Step]
    """(end, reward) of every step, at least one. Ends are increasing character positions from 1 to ``len(response)``.
    An empty response has one step that ends at 0."""
    outcome: float | None = None
    """Value of the whole response, for the metrics and for a component without `process`, or None for the mean of the
    steps' rewards."""


def as_number(value: Any) -> float | None:
    """The value as a float: a real number, a bool, or a numpy or torch value without dimensions; else None.

    Raises:
        OverflowError: an integer that no float can hold.
    """
    if not isinstance(value, Real) and getattr(value, "shape", None) == ():
        value = value.item()
    return float(value) if isinstance(value, Real) else None


def checked_steps(rewards: Iterable[object], length: int) -> tuple[Step, ...]:
    """The steps of a response of `length` characters, as plain numbers.

    Raises:
        ValueError: there are no steps; a step is not a position and a finite number; or it does not end after the
            previous step and within the response.
    """
    steps: list[Step] = []
    earliest = min(1, length)
    for number, step in enumerate(rewards, 1):
        position, value = step if isinstance(step, Sequence) and len(step) == 2 else (None, None)
        reward = as_number(value)
        if reward is None or not isinstance(position, Integral):
            raise ValueError(f"step {number} is not (end, reward): {reprlib.repr(step)}")
        end = int(position)
        if not math.isfinite(reward):
            raise ValueError(f"the reward of step {number} is not a finite number: {reward}")
        if not earliest <= end <= length:
            raise ValueError(f"step {number} ends at {end}; expected {earliest} to {length}")
        steps.append((end, reward))
        earliest = end + 1
    if not steps:
        raise ValueError("there are no steps")
    return tuple(steps)


def token_counts(ends: Sequence[int], text: str, ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Number of tokens up to and including the one at each of the increasing character positions in `ends`.

    The end of the text counts all tokens: the last step includes tokens that print nothing (end of sequence).

    Raises:
        ValueError: the tokens do not decode to the text.
    """
    if decode(ids) != text:
        raise ValueError("the response's tokens do not decode to its text")

    @functools.cache
    def shown(count: int) -> int:
        """Characters of the text that its first `count` tokens decode to, without a character that is cut in its bytes:
        the decoder's replacement for it differs from the text."""
        part = decode(ids[:count])
        if text.startswith(part):
            return len(part)
        pairs = enumerate(zip(part, text, strict=False))
        return next((place for place, (one, other) in pairs if one != other), len(text))

    # Decoding a prefix of the tokens is correct for every tokenizer, and the search needs few per step.
    counts: list[int] = []
    count = 0
    for end in ends:
        count = len(ids) if end == len(text) else bisect_left(range(len(ids)), end, lo=count, key=shown)
        counts.append(count)
    return counts
