"""Names, sums and comparisons of rewards. Processes of user code import this module, and not pydantic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any

ENVIRONMENT_REWARD = "environment"
"""Name of the reward component that the environment gives, the sum over an episode's turns."""

JUDGE_REWARD = "judge"
"""Name of the reward component that a language model gives."""

REWARD_MODEL = "reward_model"
"""Name of the reward component that a reward model gives, and of the only model of a role."""

COMBINATIONS: Mapping[str, Callable[[Sequence[float], float], float]] = {
    "product": lambda values, _: math.prod(values),
    "gate": lambda values, _: values[-1] if min(values[:-1]) > 0 else 0.0,
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "mean": lambda values, _: fmean(values),
    "mean_minus_variance": lambda values, coef: fmean(values) - coef * pvariance(values),
    "mean_minus_std": lambda values, coef: fmean(values) - coef * math.sqrt(pvariance(values)),
}
"""Reward components made of the values of others, and a coefficient. `gate` is the last value if all others are above
0, and 0 if not. `min` and `mean_minus_variance` of several reward models are WCO and UWO (arXiv 2310.02743)."""
PENALIZED = ("mean_minus_variance", "mean_minus_std")
"""The combinations that read the coefficient."""

CONSISTENCY = "consistency"
"""Name of what a judge that compares in both orders says of itself: the share in which both orders agree."""

NO_ANSWER = -1.0
"""Number in a vote of a response that states no answer."""

SHIPPED = {
    "exact_match": "troupe.workers.rewards.functions:exact_match",
    "choice": "troupe.workers.rewards.functions:choice",
    "last_number": "troupe.workers.rewards.functions:last_number",
    "numeric": "troupe.workers.rewards.numeric:numeric",
    "regex": "troupe.workers.rewards.functions:regex",
    "length": "troupe.workers.rewards.functions:length",
    "overlong": "troupe.workers.rewards.functions:overlong",
    "reasoning_gym": "troupe.workers.rewards.gym:reasoning_gym",
    "letter_share": "troupe.workers.rewards.functions:letter_share",
    "equations": "troupe.workers.rewards.equations:equations",
    "python_tests": "troupe.workers.agents.interface:python_tests",
}
"""The built-in functions of a response, by their names."""

REWARD_FUNCTIONS = (ENVIRONMENT_REWARD, JUDGE_REWARD, REWARD_MODEL, *SHIPPED, *COMBINATIONS)
"""Names of the built-in reward functions."""

STEP_FUNCTIONS = (ENVIRONMENT_REWARD, "letter_share", "equations")
"""Built-in reward functions that can return process rewards."""

RIGHT_OR_WRONG = ("choice", "exact_match", "last_number", "numeric", "regex", "reasoning_gym", "python_tests")
"""Built-in reward functions whose value is 1 if the response is right, and less if it is not."""


COMPARED = ("choice", "exact_match", "last_number", "numeric")
"""Built-in reward functions that compare the answer of a response with the right one."""


TOLERANCE = 1e-9
"""Largest difference of equal rewards: of numbers above 1, as a share of them."""


LARGEST = 1e15
"""Largest size of a reward. Advantages, losses and gradients are float32: their squares overflow from 1e19 on."""


@dataclass(frozen=True)
class Feedback:
    """A reward with a text about the response, which reward functions and environments may return instead of a number.

    ``Feedback(0.0, "test 3 of 5 failed: expected 7, got 8")``. A teacher reads the text as `{feedback}`
    (`roles.teacher.NAME.prompt`).
    """

    reward: Any
    """A number, or `Steps` of a reward function."""
    text: str
    """Empty if there is nothing to say."""


def not_usable(value: float) -> str:
    """Why a reward cannot be trained on; empty if it can."""
    if not math.isfinite(value):
        return f"not a finite number: {value}"
    return "" if abs(value) <= LARGEST else f"too large: {value:g} (at most {LARGEST:g}, because losses are float32)"


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
