"""Reward functions with a fault, for the recorded sick runs (`make_recorded.py`)."""

from __future__ import annotations

import random
import time
from typing import Any

_KEPT: list[bytearray] = []


def always_one(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """The same reward for every response."""
    return 1.0


def never(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A task that the model never solves."""
    return float(response == "a text that no model writes")


def _vowels(response: str) -> float:
    return sum(c in "aeiou" for c in response) / len(response) if response else 0.0


def fails_often(response: str, answer: str, metadata: dict[str, Any], *, share: float = 0.4) -> float:
    """Raises on a share of the responses, as a parser does that does not expect what a model writes."""
    if random.Random(response).random() < share:
        raise ValueError("no number in the response")
    return _vowels(response)


def slow(response: str, answer: str, metadata: dict[str, Any], *, seconds: float = 0.1) -> float:
    """Takes long, as a remote judge does."""
    time.sleep(seconds)
    return _vowels(response)


def rare_extreme(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A reward whose scale breaks for a few responses."""
    return _vowels(response) * (2000.0 if random.Random(response).random() < 0.01 else 1.0)


def leaking(response: str, answer: str, metadata: dict[str, Any], *, mib: int = 2) -> float:
    """Keeps memory of every call."""
    _KEPT.append(bytearray(b"x" * (mib * 2**20)))
    return _vowels(response)


def one_letter(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Can be hacked: pays for one repeated letter where diverse text was meant."""
    return response.count("a") / len(response) if response else 0.0
