"""Expressions of conditions, test cases and equations are evaluated within bounds."""

from __future__ import annotations

import ast
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from troupe.workers.contract.expressions import evaluate

NAMES = {
    "n": 3,
    "day": datetime(2026, 11, 29),
    "before": datetime(2026, 11, 28),
    "price": Decimal("1.50"),
    "words": ["a", "b"],
}


def value(text: str) -> Any:
    return evaluate(ast.parse(text, mode="eval").body, NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2**100000 % 7", 2**100000 % 7),
        ("1.5**n + 2 * n // 4", 1.5**3 + 1),
        ("len([0] * 10**6) + len('ab' * n)", 10**6 + 6),
        ("words + ['c'] == ['a', 'b', 'c']", True),
        ("sum([words, words], []) == words * 2", True),
        ("sum([1, 2], n) + round(2.567, 1) + round(1234, -2) + round(2.5)", 6 + 2.6 + 1200 + 2),
        ("day - before", timedelta(days=1)),
        ("price * 2", Decimal("3.00")),
        ("{1, 2} - {2}", {1}),
    ],
)
def test_what_conditions_and_test_cases_compute(text: str, expected: Any) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("9**9**9", "n**(10**6)", "(-9)**9**9", "2**1000000 * 2**1000000"),
        *("'x' * 10**9", "10**9 * [0]", "[[0] * 1000] * 10000", "[[[0] * 1000] * 1000] * 1000"),
        *("(words * 1000) * 10**6", "sum([['a'] * 1000] * 1000, [])"),
        *("'%999999999d' % n", "words % n", "words * 2.0", "words - words"),
    ],
)
def test_nothing_large_is_computed(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large|too long|too many"):
        value(text)


def test_an_integer_is_rounded_to_no_power_of_ten_that_is_too_large() -> None:
    assert value("round(5, -10**9)") == 0 and value("round(5, 10**9)") == 5
