"""reasoning-gym's own scorers, applied to the final answer instead of the whole text."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from troupe.workers.contract.imports import gym_factory
from troupe.workers.rewards.answer_text import answer_part, last_box, visible
from troupe.workers.rewards.functions import find_last_number, parse_number

Entry = dict[str, Any]

importlib.import_module("sympy")  # before the first score, which has a timeout
_FACTORY = gym_factory()
_NAMED = re.compile(r"\banswer(?:\s+is\b\s*:?|\s*[:=])\s*", re.IGNORECASE)

# Families whose scorer evaluates the answer as Python ("python": `eval`; "sympy": `parse_expr`, which is `eval` too).
# The model's text must never be executed, so they get an answer only if it is a plain literal or formula.
EVALUATED = {
    "binary_matrix": "python",
    "countdown": "sympy",
    "intermediate_integration": "sympy",
    "n_queens": "python",
    "polynomial_multiplication": "sympy",
    "puzzle24": "sympy",
    "simple_integration": "sympy",
    "spiral_matrix": "python",
    "string_insertion": "python",
}
_FORMULA_CALLS = frozenset(
    ("Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "log", "sin", "sinh", "sqrt", "tan", "tanh")
)
_FORMULA_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Name,
    ast.Load,
    ast.Tuple,
    ast.List,
)

_TRUSTED: set[str] = set()  # families whose scorer accepted an entry's answer, and refused nonsense
_NONSENSE = "banana"
_FENCED = re.compile(
    "|".join(
        rf"(?:^[ \t]*{fence}[^\n{fence[0]}]{{0,40}}|{fence}[\w+#.-]{{0,40}}[ \t]*)\n(.*?)\n?[ \t]*{fence}"
        for fence in ("```", "~~~")
    ),
    re.DOTALL | re.MULTILINE,
)
"""A block. Within a line, only a language may follow what opens it."""


def final_answer(response: str, expected: str | None) -> str:
    """The final answer of a response, in the form of `expected`.

    It is what the last \\boxed{} in the last <answer> tags holds, or one of them does, or what follows the last "the
    answer is"; without any of these the whole text if `expected` has several lines or is None, otherwise the last line.
    If `expected` is a number, it is the last number in that text.
    """
    lines = expected is None or "\n" in expected.strip()
    named = _NAMED.split(response)
    part, tagged = answer_part(response)
    box, _ = last_box(part)
    marked = tagged or box is not None
    if marked:
        text = (part if box is None else box).strip()
    elif len(named) > 1:
        text = named[-1].strip() if lines else named[-1].strip().partition("\n")[0].strip()
    else:
        text = response.strip() if lines else response.strip().rpartition("\n")[2].strip()
    fences = _FENCED.findall(text if marked or (len(named) > 1 and lines) else response)
    if fences:
        text = max(fences[-1], key=len).strip("\n")
        text = text if lines else text.strip().rpartition("\n")[2].strip()
    if expected is None:
        return text
    if (wanted := parse_number(expected)) is not None:
        number = find_last_number(text)
        # In the spelling of the expected number, so that a scorer that compares text accepts 5.0 for 5.
        return "" if number is None else expected.strip() if number == wanted else str(number)
    text = text.strip("*").strip()
    return text if expected.rstrip().endswith(".") else text.rstrip(".")


def is_formula(text: str, strings: bool = False) -> bool:
    """Whether evaluating a text as a Python expression is limited to arithmetic.

    True for numbers, names, operators, lists and calls of a few mathematical functions; string constants only with
    `strings` (sympy evaluates strings again).
    """
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    constants = (int, float, str) if strings else (int, float)
    for node in nodes:
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, constants):
                return False
        elif isinstance(node, ast.Call):
            if node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in _FORMULA_CALLS:
                return False
        elif not isinstance(node, _FORMULA_NODES):
            return False
    return True


def _same_numbers(given: str, entry: Entry) -> bool:
    numbers = [int(number) for number in re.findall(r"\b[0-9]+\b", given)]
    return sorted(numbers) == sorted(entry["metadata"]["numbers"])


def _close(given: str, entry: Entry) -> bool:
    right = float(Fraction(entry["answer"].replace(",", "")))
    return math.isclose(float(Fraction(given.replace(",", ""))), right, rel_tol=1e-3)


_ALSO: dict[str, Callable[[str, Entry], bool]] = {
    "coin_flip": _close,
    "game_of_life_halting": lambda given, entry: given.casefold() == entry["answer"].casefold(),
    "puzzle24": _same_numbers,
}
"""What a scorer does not look at: differences of small probabilities, the text, which numbers are used."""
_OF_TUPLES = ("arc_agi", "rearc")
"""Families whose scorer compares tuples, which JSON has turned into lists."""


@functools.cache
def _scorer(family: str) -> Callable[[str, Entry], float]:
    """The family's scorer, which gives 0 for an answer that it raises on."""
    scorer: Any = _FACTORY.get_score_answer_fn(family)

    def score(given: str, entry: Entry) -> float:
        if family in _OF_TUPLES:
            output = tuple(map(tuple, entry["metadata"]["output"]))
            entry = {**entry, "metadata": {**entry["metadata"], "output": output}}
        try:
            value = float(scorer(given, entry))
            return 0.0 if value == 1.0 and family in _ALSO and not _ALSO[family](given, entry) else value
        except Exception:
            return 0.0

    return score


def _check(family: str, entry: Entry) -> None:
    """Verify once, if the entry has an answer, that the scorer accepts it and refuses nonsense. Raises ValueError if it
    does not."""
    expected = entry["answer"]
    if family in _TRUSTED or expected is None:
        return
    if _scorer(family)(_NONSENSE, entry) >= 1.0:
        raise ValueError(f"the scorer of {family!r} accepts any answer")
    if _scorer(family)(expected, entry) < 1.0:
        raise ValueError(f"the scorer of {family!r} does not accept the answer that its entry names")
    _TRUSTED.add(family)


def is_credit_for_containing(score: float, given: str, expected: str) -> bool:
    """Whether a score below 1 is the fraction of the answer that the expected text covers. Many families fall back to
    this score, so that "15" scores 0.5 when "5" is correct."""
    pairs = ((given, expected), (given.replace(",", ""), expected.replace(",", "")))
    return score < 1.0 and any(right in left and math.isclose(score, len(right) / len(left)) for left, right in pairs)


def reasoning_gym(response: str, answer: str, metadata: dict[str, Any], *, opens_thought: bool = False) -> float:
    """Score of the response's final answer, behind its thought, by the scorer of the task's family.

    A thought that does not end, or with `opens_thought` (the chat template opens it) a response without the end of one,
    has no answer.

    `metadata["recipe"]` is the family, and `metadata["entry"]` the generated item: question, answer and metadata.
    Raises KeyError if `recipe` or `entry` is missing, and ValueError if the family is unknown, or its scorer does not
    accept the entry's answer, or accepts any.
    """
    entry: Entry = metadata["entry"]
    family: str = metadata["recipe"]
    expected: str | None = entry["answer"]
    _check(family, entry)
    given = final_answer(visible(response, opens_thought=opens_thought), expected)
    kind = EVALUATED.get(family)
    if kind and (expected is None or given != expected.strip()) and not is_formula(given, strings=kind == "python"):
        return 0.0
    score = _scorer(family)(given, entry)
    if expected is not None and is_credit_for_containing(score, given, expected.strip()):
        return 0.0
    return score
