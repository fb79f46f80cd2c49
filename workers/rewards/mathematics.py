"""Equality of mathematical expressions, by math-verify and sympy within a bound of work.

sympy evaluates what it is given: a tower of powers or a sum to 10^9 would take minutes. `TooCostly` is raised before
such numbers are computed, from the size that they would have, and else after `WORK` calls of Python functions, which is
the same on every machine. math-verify's own bound is a time: the speed of the machine would decide rewards.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.grader import get_pct_val, is_assignment_relation, is_equation, take_last_relation
from sympy import (
    Eq,
    Expr,
    FiniteSet,
    Float,
    I,
    Integer,
    Interval,
    MatrixBase,
    Number,
    Pow,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    binomial,
    factorial,
    factorial2,
    gamma,
    subfactorial,
)
from sympy.core.relational import Relational

# math-verify warns that its timeout is disabled.
logging.getLogger("math_verify").setLevel(logging.ERROR)

WORK = 600_000
"""Calls of Python functions that reading or comparing expressions may take; most take a few thousand, and the first of
their kind up to 270,000, because ANTLR caches what it has seen."""
LONGEST = 300
"""Characters of an expression that are parsed."""
_NESTED = (
    (re.compile(r"[(\[|]"), 8),
    (re.compile(r"\{"), 40),
    (re.compile(r"\^|_"), 16),
    (
        re.compile(
            r"\\[dt]?binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*(?:[0-9]{4}|[!^])|\\choose.*[0-9]{4}|\\Gamma[^)]*(?:[0-9]{4}|[!^])"
        ),
        0,
    ),
)
"""How often an expression may have what takes the parser exponential time, or what the parser evaluates."""
_PLAIN = re.compile(r"(-?)([0-9]{1,60})(?:(\.[0-9]{1,60})|/([0-9]{1,60}))?(\s?\\?%)?")
_IMAGINARY = re.compile(r"(?<=[0-9])i(?![A-Za-z])")
_MOST_BITS = 60_000
"""Of an integer; 2006! has 19,000."""
_FACTORIALS = (binomial, factorial, factorial2, gamma, subfactorial)
_CONFIG = (LatexExtractionConfig(),)
_POINTS = ("0.7316", "-1.2931", "2.4177")
_DIGITS = 50
_SAME = Float(10, _DIGITS) ** (12 - _DIGITS)
_DECIMALS = Float("1e-6", _DIGITS) * (1 + Float("1e-9", _DIGITS))


class TooCostly(BaseException):
    """An expression needs more work than allowed. No `Exception`: sympy and math-verify catch those."""


@contextmanager
def bounded_work(calls: int = WORK) -> Iterator[None]:
    """Raises TooCostly after so many calls of functions."""
    left, before = calls, sys.getprofile()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= event == "call"
        if left < 0:
            raise TooCostly

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


@lru_cache(maxsize=256)
def parse_expression(text: str, longest: int = LONGEST) -> Any:
    """The expression that LaTeX or plain mathematics stands for, or None if it is none. Raises TooCostly if it is
    longer than `longest`, too deep, or has numbers that are too large."""
    if number := _PLAIN.fullmatch(text):
        sign, whole, decimals, divisor, percent = number.groups()
        value = Float(f"{whole}{decimals}", _DIGITS) if decimals else Rational(int(whole), int(divisor or 1))
        value = -value if sign else value
        return value * UnevaluatedExpr(Rational(1, 100)) if percent else value
    if len(text) > longest or any(len(mark.findall(text)) > most for mark, most in _NESTED):
        raise TooCostly
    with bounded_work():
        found = parse(f"${_IMAGINARY.sub(' i', text)}$", _CONFIG, fallback_mode="no_fallback", parsing_timeout=0)
        if found and _bits(found[0]) > _MOST_BITS:
            raise TooCostly
    return found[0] if found else None


def same_expression(right: Any, said: Any) -> bool:
    """Whether two parsed expressions are equal.

    Numbers without decimals are equal if they are exactly. One with decimals is equal to others to six decimals, if
    both have decimals and are below 1 to six digits, and to three digits if it is below 0.001. Lists, sets, intervals
    and matrices of numbers are equal if their numbers are; expressions with variables if they are at several points.
    Raises TooCostly if this cannot be told with the work that is allowed.
    """
    with bounded_work():
        if is_equation(said) and not is_equation(right):
            said = take_last_relation(said).rhs
        elif is_assignment_relation(right) and not is_equation(said):
            right = take_last_relation(right).rhs
        return _same(right, said)


def _same(right: Any, said: Any) -> bool:
    right, said = _complex(right), _complex(said)
    if isinstance(right, Expr) and isinstance(said, Expr):
        return _same_number(right, said) if _is_number(right) and _is_number(said) else _same_formula(right, said)
    if isinstance(right, Relational) and isinstance(said, Relational):
        return _same_relation(right, said)
    ours, theirs = _numbers(right), _numbers(said)
    if ours is None or theirs is None:
        return verify(right, said, allow_set_relation_comp=True, timeout_seconds=0)
    kinds = [_ends(one) for one in (right, said)]
    if len(ours) != len(theirs) or (kinds[0] != kinds[1] and None not in kinds):
        return False
    if any(isinstance(kind, tuple) and True in kind for kind in kinds) and None in kinds:
        return False  # an interval that has its ends is no list
    if isinstance(right, FiniteSet) and isinstance(said, FiniteSet):
        left = list(theirs)
        for number in ours:
            match = next((place for place, other in enumerate(left) if _same_number(number, other)), None)
            if match is None:
                return False
            del left[match]
        return True
    return all(map(_same_number, ours, theirs))


def _complex(value: Any) -> Any:
    """The value with the imaginary unit for i, if it has no other variable."""
    only = value.free_symbols if isinstance(value, Expr) else ()
    return value.subs(dict.fromkeys(only, I)) if [*map(str, only)] == ["i"] else value


def _ends(value: Any) -> tuple[Any, ...] | None:
    """What two collections of the same numbers may differ in, or None for a list or a set."""
    if isinstance(value, Interval):
        return (not value.left_open, not value.right_open)
    return tuple(value.shape) if isinstance(value, MatrixBase) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number) and not value.has(Symbol)


def _numbers(value: Any) -> tuple[Any, ...] | None:
    """The numbers that a list, set, interval or matrix consists of, or None if it is none or has anything else."""
    if isinstance(value, Interval):
        parts = (value.start, value.end)
    elif isinstance(value, MatrixBase):
        parts = tuple(value.flat())
    elif isinstance(value, FiniteSet | Tuple):
        parts = tuple(vars(value).get("_unsorted_args", value.args))
    else:
        return None
    parts = tuple(map(_complex, parts))
    return parts if all(map(_is_number, parts)) else None


def _same_number(right: Any, said: Any) -> bool:
    """Whether two numbers are equal; a percentage may be given as its number, or as the share."""
    shares = get_pct_val(right), get_pct_val(said)
    if shares[0] is not None and shares[1] is not None:
        return _same_number(*shares)
    if (shares[0] is not None or shares[1] is not None) and _same_number(
        right if shares[0] is None else shares[0], said if shares[1] is None else shares[1]
    ):
        return True
    right, said = right.doit(), said.doit()
    if isinstance(right, Rational) and isinstance(said, Rational):
        return right == said
    if right == said or right.is_infinite or said.is_infinite:
        return bool(right == said)
    decimals = right.has(Float), said.has(Float)
    given = all(isinstance(one, Integer) or has for one, has in zip((right, said), decimals, strict=True))
    right, said = right.evalf(_DIGITS), said.evalf(_DIGITS)
    difference, size = abs(right - said), max(abs(right), abs(said))
    if not any(decimals):
        return bool(difference <= _SAME * max(size, _SAME))
    return bool(difference <= _DECIMALS * min(1, size if given else 1000 * size))


def _values(value: Any) -> list[Any]:
    """Values of a formula at a few points."""
    symbols = sorted(value.free_symbols, key=str)
    # Multiplied by a number that depends on the name, so that no two variables have the same values
    places = {
        one: 1 + Rational(sum((n + 1) * ord(char) for n, char in enumerate(one.name)) % 997, 997) for one in symbols
    }
    return [
        value.subs({one: Rational(point) * places[one] for one in symbols}).doit().evalf(_DIGITS) for point in _POINTS
    ]


def _same_formula(right: Any, said: Any) -> bool:
    pairs = list(zip(_values(right), _values(said), strict=True))
    if all(_is_number(one) and isinstance(one.evalf(), Expr) for pair in pairs for one in pair):
        return all(_same_number(*pair) for pair in pairs)
    return verify(right, said, timeout_seconds=0)


def _same_relation(right: Any, said: Any) -> bool:
    """Whether both relations compare the same but for a common factor: x < 7 is 2x < 14."""
    kinds = [type(one) if isinstance(one, Eq) or one.rel_op == "!=" else ("=" in one.rel_op) for one in (right, said)]
    if kinds[0] != kinds[1]:
        return False
    sides = [
        _values(one.lhs - one.rhs if not isinstance(kind, bool) else one.gts - one.lts)
        for one, kind in zip((right, said), kinds, strict=True)
    ]
    if not all(_is_number(value) and value != 0 for side in sides for value in side):
        return verify(right, said, timeout_seconds=0)
    factors = [a / b for a, b in zip(*sides, strict=True)]
    return all(_same_number(factors[0], factor) for factor in factors[1:]) and (
        not isinstance(kinds[0], bool) or bool(factors[0] > 0)
    )


def _bits(value: Any) -> float:
    """Bits of the largest integer that evaluating an expression computes, at most."""
    if isinstance(value, Number):
        return max(value.p.bit_length(), value.q.bit_length()) if isinstance(value, Rational) else 64.0
    parts = [_bits(part) for part in getattr(value, "args", ())]
    if isinstance(value, Pow):
        return parts[0] * 2.0 ** min(parts[1], 64.0)
    if isinstance(value, _FACTORIALS):
        return parts[0] * 2.0 ** min(parts[0], 64.0)
    return max(sum(parts), 1.0) if isinstance(value, Expr) else max(parts, default=1.0)
