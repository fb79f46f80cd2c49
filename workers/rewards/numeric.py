"""Mathematical equality, by math-verify."""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

# math-verify warns that its own time-out is off. It is off because a late answer must be a failed sample, which the
# process's time-out gives, and not the wrong answer that math-verify would make of it.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def numeric(response: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 where the response's final expression (the last boxed one, else the last named or found) equals the answer.

    Both may be plain numbers, fractions, percentages or LaTeX: 1/2, 0.5 and \\frac{1}{2} are equal.

    Raises:
        ValueError: the answer is no expression.
    """
    expected = parse(f"${answer}$", parsing_timeout=0, fallback_mode="no_fallback")
    if not expected:
        raise ValueError(f"the answer is not a mathematical expression: {answer[:80]!r}")
    # math-verify makes one set of all the boxes; only the last one is the answer.
    found = parse(response[max(0, response.rfind("\\boxed")) :], parsing_timeout=0)
    return float(verify(expected, found, timeout_seconds=0))
