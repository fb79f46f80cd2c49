"""Tries built-in reward functions on the right answers of a user's data; runs in a child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from troupe.workers.contract.rewards import is_solved
from troupe.workers.rewards.loading import load


def count_earned(request: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """How many right answers earn 1 from each of several functions, up to the first that gives nearly all 1.

    Args:
        request: `functions` by name, `answers` (the right ones of each prompt), and `enough`, a part of them.
    """
    answers = request["answers"]
    for name in request["functions"]:
        function = load(name, {})
        earned = sum(_earns(function, right) for right in answers)
        yield name, earned
        if earned >= request["enough"] * len(answers):
            return


def _earns(function: Callable[..., Any], right: Sequence[str]) -> bool:
    """Whether the first right answer, as the data have it or in a box, earns 1."""
    metadata = {"right_answers": list(right)} if len(right) > 1 else {}
    try:
        return any(is_solved(function(text, right[0], metadata), 1.0) for text in (right[0], f"\\boxed{{{right[0]}}}"))
    except (ValueError, IndexError):  # it does not read answers of this form, or there is none
        return False
