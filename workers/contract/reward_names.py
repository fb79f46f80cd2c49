"""Names of the built-in reward functions. The processes of user code import them, and not pydantic."""

from __future__ import annotations

ENVIRONMENT_REWARD = "environment"
"""Name of the reward component that the environment gives, the sum over an episode's turns."""

JUDGE_REWARD = "judge"
"""Name of the reward component that a language model gives."""

NO_ANSWER = -1.0
"""Number in a vote of a response that states no answer."""

REWARD_FUNCTIONS = (
    ENVIRONMENT_REWARD,
    JUDGE_REWARD,
    "exact_match",
    "last_number",
    "numeric",
    "regex",
    "length",
    "overlong",
    "reasoning_gym",
    "letter_share",
    "equations",
    "python_tests",
)
"""Names of the built-in reward functions. `workers/rewards/loading.py` has each one's module."""

STEP_FUNCTIONS = (ENVIRONMENT_REWARD, "letter_share", "equations")
"""Built-in reward functions that can return process rewards."""

RIGHT_OR_WRONG = ("exact_match", "last_number", "numeric", "regex", "reasoning_gym", "python_tests")
"""Built-in reward functions whose value is 1 if the response is right, and less if it is not."""
