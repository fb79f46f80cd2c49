"""Process rewards: what a reward function returns to judge a response step by step, and the tokens its steps end at."""

from __future__ import annotations

import functools
import math
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

Step = tuple[int, float]
"""(where the step ends, its reward)"""


@dataclass(frozen=True)
class Steps:
    """Rewards of the steps of one response, which a reward function may return in place of a number.

    ``Steps([(17, 1.0), (42, 0.0)])`` rewards ``response[:17]`` with 1 and ``response[17:42]`` with 0.
    """

    rewards: Sequence[Step]
    """(end, reward) of every step, at least one. Ends are character positions that rise, from 1 to ``len(response)``;
    an empty response has one step, which ends at 0."""
    outcome: float | None = None
    """The value of the whole response, for the metrics and for a component without `process`; None: the mean of the
    steps' rewards."""


def checked_steps(rewards: Iterable[object], length: int) -> tuple[Step, ...]:
    """The steps of a response of `length` characters, as plain numbers.

    Raises:
        ValueError: there is none; one is not a position and a finite number; or one does not end after the step before
            it and within the response.
    """
    steps: list[Step] = []
    earliest = min(1, length)
    for number, step in enumerate(rewards, 1):
        pair = tuple(step) if isinstance(step, Sequence) else ()
        if len(pair) != 2 or not isinstance(pair[0], Integral) or not isinstance(pair[1], Real):
            raise ValueError(f"step {number} is not (end, reward): {reprlib.repr(step)}")
        end, reward = int(pair[0]), float(pair[1])
        if not math.isfinite(reward):
            raise ValueError(f"the reward of step {number} is not a finite number: {reward}")
        if not earliest <= end <= length:
            raise ValueError(f"step {number} ends at {end}; it can end from {earliest} to {length}")
        steps.append((end, reward))
        earliest = end + 1
    if not steps:
        raise ValueError("there is no step")
    return tuple(steps)


def token_counts(ends: Sequence[int], text: str, ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """For each of the rising character positions in `ends`: tokens of the response up to and with the one it falls in.

    A position behind the text's last character stands for all tokens: those after it print nothing (end of sequence),
    and the last step is theirs too.

    Raises:
        ValueError: the tokens do not decode to the text.
    """
    if decode(ids) != text:
        raise ValueError("the response's tokens do not decode to its text")

    @functools.cache
    def shown(count: int) -> int:
        """Characters of the text that its first `count` tokens show. A character of which they hold some bytes only is
        not among them: what a decoder puts in its place is not what stands in the text."""
        part = decode(ids[:count])
        if text.startswith(part):
            return len(part)
        pairs = enumerate(zip(part, text, strict=False))
        return next((place for place, (one, other) in pairs if one != other), len(text))

    # Decoding the response's first tokens is right for every kind of tokenizer, and a search does it few times a step.
    counts: list[int] = []
    count = 0
    for end in ends:
        count = len(ids) if end == len(text) else bisect_left(range(len(ids)), end, lo=count, key=shown)
        counts.append(count)
    return counts
