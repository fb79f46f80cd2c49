"""Mathematical equality, by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from troupe.workers.rewards.functions import right_answers

# math-verify warns that its own timeout is disabled. It is disabled because a timeout must give a failed sample, as the
# timeout of the process does, whereas math-verify would return a wrong answer.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def numeric(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the response's final expression (the last boxed one, else the last named or found) equals a right answer.

    Both may be plain numbers, fractions, percentages or LaTeX: 1/2, 0.5 and \\frac{1}{2} are equal.

    Raises:
        ValueError: no answer is a mathematical expression.
    """
    answers = right_answers(answer, metadata)
    expected = [parse(f"${text}$", parsing_timeout=0, fallback_mode="no_fallback") for text in answers]
    if not any(expected):
        raise ValueError(f"the answer is not a mathematical expression: {answer[:80]!r}")
    # math-verify combines all boxes into one set; only the last box is the answer.
    found = parse(response[max(0, response.rfind("\\boxed")) :], parsing_timeout=0)
    return float(any(right and verify(right, found, timeout_seconds=0) for right in expected))
