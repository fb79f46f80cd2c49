"""A process reward for calculations: every equation in a response is a step, verified by arithmetic.

No text of the model is executed: numbers, the four operations and parentheses are parsed and evaluated as fractions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from troupe.workers.rewards.results import Step, Steps

_LONGEST = 200
"""Longest chain of equations that is parsed, in characters; limits the numbers, the nesting and the time."""
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
_CHAIN = re.compile(rf"(?:{_NUMBER}|[-+*/^%=() \t])+")
_TOKEN = re.compile(rf"{_NUMBER}|\S")
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
_SIGN = "sign"

Items = list[Fraction | str]
"""Alternating operands and operators."""


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
    levels: list[Items] = [[]]
    for token in _TOKEN.finditer(text):
        symbol, level = token.group(), levels[-1]
        if symbol == "(":
            levels.append([])
        elif symbol == ")" or symbol[0].isdigit():
            value = _value(levels.pop()) if symbol == ")" else Fraction(symbol.replace(",", ""))
            if value is None or not levels:
                return None
            signed = levels[-1][-1:] == [_SIGN]
            levels[-1][len(levels[-1]) - signed :] = [-value if signed else value]
        elif symbol == "-" and len(level) % 2 == 0:
            # A minus followed by a space is not a sign but the rest of "x - 2".
            if text[token.end() : token.end() + 1].isspace():
                return None
            level.append(_SIGN)
        else:
            level.append(symbol)
    return _value(levels[0]) if len(levels) == 1 else None


def _value(items: Items) -> Fraction | None:
    """Value of operands and operators, products before sums; None if they do not alternate."""
    terms: list[Fraction] = []
    operator: Fraction | str = "+"
    for place, item in enumerate(items):
        if place % 2:
            operator = item
        elif isinstance(item, str):
            return None
        elif operator in ("+", "-"):
            terms.append(item if operator == "+" else -item)
        elif operator == "*":
            terms[-1] *= item
        elif operator == "/" and item:
            terms[-1] /= item
        else:
            return None
    return sum(terms, Fraction(0)) if len(items) % 2 else None


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
