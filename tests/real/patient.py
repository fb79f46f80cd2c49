"""A reward function with which an endless run leaves most of the processors to workers that start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
"""In which a worker finds this module."""
REWARD = "roles.reward.functions=[{name: 'tests.real.patient:vowels'}]"
"""Override of a spec."""
_WAIT_S = 0.02


def vowels(response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Share of vowels in the response, after a wait: a second or so for the samples of a step."""
    time.sleep(_WAIT_S)
    return sum(letter in "aeiou" for letter in response) / max(1, len(response))
