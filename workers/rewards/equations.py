"""A process reward for calculations: every equation in a response is a step, verified by arithmetic.

No text of the model is executed: numbers, the four operations and parentheses are parsed and evaluated as fractions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, pairwise
from typing import Any

from troupe.workers.contract import expressions
from troupe.workers.rewards.results import Step, Steps

_LONGEST = 200
"""Longest chain of equations that is parsed, in characters; limits the numbers, the nesting and the time."""
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_CHAIN = re.compile(rf"(?:{_NUMBER}|[-+*/^%=() \t])+")
_NO_SIGN = re.compile(r"(?:^|[-+*/(])\s*(?:\+|-[-+\s])")
"""A sign that begins no number: a plus, one of several, or a minus before a space, which is the rest of "x - 2"."""
_OPERATION = re.compile(r"[0-9)][ \t]*[-+*/]")

# Other spellings of supported symbols. Replacements keep the length of the text, so that positions stay valid.
_CHARACTERS = str.maketrans({"×": "*", "⋅": "*", "·": "*", "÷": "/", "−": "-", "$": " "})
_SPELLINGS = (
    (re.compile(r"\\(?:times|cdot)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\[()\[\]]"), ";"),  # LaTeX formula delimiters
    (re.compile(r"(?<=[0-9)])[ \t]*[xX](?=[ \t]*[0-9(])"), "*"),
    (re.compile(r"^[ \t]*(?:[-*+]|[0-9]+[.)])[ \t]+", re.MULTILINE), ""),  # list item marker
    (re.compile(r"(?<=[0-9)])\*\*(?=[-0-9(])"), "^"),  # a power, which is not supported
    (re.compile(r"\*\*"), ""),  # bold
)


@dataclass(frozen=True)
class Equation:
    """The two sides of an equals sign."""

    left: str
    right: str
    end: int
    """Position after the right side."""


def equations(
    response: str,
    answer: str,
    metadata: dict[str, Any],
    *,
    right: float = 1.0,
    wrong: float = 0.0,
    tolerance: float = 0.0,
) -> Steps:
    """Steps of the response, one per equation.

    Equations consist of numbers, + - * / (also x, ×, ÷) and parentheses; `2 + 3 = 5 = 10 / 2` is two equations. Ignored
    are equations with other symbols or letters, without an operation (`3 = 3`), and repeated ones. A response without
    an equation is one step with reward 0.

    Args:
        response: The response.
        answer: Unused.
        metadata: Unused.
        right: Reward of a true equation.
        wrong: Reward of a false equation.
        tolerance: Maximum difference between the sides of a true equation.
    """
    steps: list[Step] = []
    seen: set[tuple[str, str]] = set()
    for equation in find_equations(response):
        values = evaluate(equation.left), evaluate(equation.right)
        key = "".join(equation.left.split()), "".join(equation.right.split())
        if values[0] is None or values[1] is None or key in seen:
            continue
        seen.add(key)
        steps.append((equation.end, right if abs(values[0] - values[1]) <= tolerance else wrong))
    return Steps(steps or [(len(response), 0.0)])


def find_equations(text: str) -> Iterator[Equation]:
    """Candidate equations, in order: at least one side has an operation."""
    text = text.translate(_CHARACTERS)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(lambda match, plain=plain: plain.ljust(len(match.group())), text)
    for chain in _CHAIN.finditer(text):
        if len(chain.group()) > _LONGEST or _is_torn(chain):
            continue
        for left, right in pairwise(re.finditer("[^=]+", chain.group())):
            equation = Equation(
                _without_opening(left.group()),
                closed := _without_closing(right.group()),
                chain.start() + right.start() + len(closed),
            )
            if _OPERATION.search(equation.left) or _OPERATION.search(equation.right):
                yield equation


def evaluate(text: str) -> Fraction | None:
    """Value of an arithmetic expression; None if the text is not an expression or divides by zero."""
    numbers = [Fraction(number.replace(",", "")) for number in re.findall(_NUMBER, text)]
    place = count()
    named = re.sub(_NUMBER, lambda _: f"n{next(place)}", text.strip())
    try:
        if _NO_SIGN.search(named):
            return None
        names = {f"n{place}": number for place, number in enumerate(numbers)}
        value = expressions.evaluate(ast.parse(named, mode="eval").body, names, _compute)
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):  # () and (1, 2) are no numbers
        return None
    return value if isinstance(value, Fraction) else None


def _compute(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if not isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        raise ValueError("not one of the four operations")
    return expressions.BINARY[type(op)](left, right)


def _is_torn(chain: re.Match[str]) -> bool:
    """Whether the chain is part of something else, such as f(2) + 1 = 3, x2 + 1 = 3, 1 + 2 = 3x or 1 + 2 = 3,5."""
    before, after = chain.string[: chain.start()][-1:], chain.string[chain.end() : chain.end() + 2]
    first, last = chain.group()[0], chain.group()[-1]
    opened = not first.isspace() and (_is_word(before) or before in (".", ","))
    return opened or (not last.isspace() and (_is_word(after[:1]) or (after[:1] in (".", ",") and after[1:].isdigit())))


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _without_opening(side: str) -> str:
    """The left side without parentheses that close after the equation, as in (2 + 3 = 5)."""
    side = side.strip()
    for _ in range(side.count("(") - side.count(")")):
        side = side.removeprefix("(").lstrip()
    return side


def _without_closing(side: str) -> str:
    """The right side without parentheses that open before the equation."""
    side = side.rstrip()
    for _ in range(side.count(")") - side.count("(")):
        side = side.removesuffix(")").rstrip()
    return side
