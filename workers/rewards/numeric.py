"""Reward for the mathematical answer that a response states, and the vote on the answers of a group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.rewards.answer_text import answer_part, last_box
from troupe.workers.rewards.functions import (
    choice,
    exact_match,
    exact_text,
    find_last_number,
    last_number,
    right_answers,
)
from troupe.workers.rewards.mathematics import LONGEST, TooCostly, parse_expression, same_expression
from troupe.workers.rewards.statements import chosen, same_words, spelled_out, stated, stated_words, words

_MATHEMATICAL = re.compile(r"[0-9\\∞π√]|^\W*[A-Za-z]\W*$|[A-Za-z] ?[-+*/^=<>≤≥] ?[A-Za-z(]|[A-Za-z]\([A-Za-z]\)")
_WORD = r"(?!(?:pi|sqrt|sin|cos|tan|log|exp|and|infinity|infty)\b)[A-Za-z]{3,}"
_TEXT = re.compile(
    # Words, which math-verify would read as a product of letters; a number may have a unit
    rf"(?!\W*[0-9][0-9.,/ ]*%?\s*[A-Za-z]+\W*$)[^\\]*\b{_WORD}[^\\]*"
    # Dates, telephone numbers, ratios, times, versions, and numbers to a base
    r"|[^\\A-Za-z]*[0-9](?:-[0-9]+){2,}|[0-9]{2,}-[0-9]+|[0-9]+(?::[0-9]+)+|[0-9]+(?:\.[0-9]+){2,}"
    r"|[0-9A-F]+_\{?[0-9]+\}?"
)
_CODE = re.compile(r"[0-9]+(?:-[0-9]+){2,}|[0-9]+(?::[0-9]+)+|[0-9A-F]+_\{?[0-9]+\}?")
_UNIT = re.compile(rf"(?<=[0-9])(?:(?:\s*\b{_WORD}\.?)+|\.)$")
_OPERATION = re.compile(r"\\(?:int|sum|prod|lim)(?![A-Za-z])|\\frac\{d\}")
"""What is left to compute is no answer, and takes sympy the longest."""
_BASE = re.compile(r"_\{?[0-9]+\}?$")
_LAYOUT = re.compile(r"\s|\{,\}|\\(?:[,;!:]|left|right|displaystyle)|(?<=\\)[dt](?=frac)")
_WORDS = re.compile(r"^\\(?:text|mathrm|textbf)\{([^\\{}]*)\}$")
_LONGEST_TEXT = 100

Said = tuple[str, bool]
"""A right answer, and whether it is a text rather than mathematics."""


def numeric(response: str, answer: str, metadata: dict[str, Any], *, opens_thought: bool = False) -> float:
    r"""1 if the response's final expression equals a right answer.

    Final is what the last <answer> tags hold, else the last \boxed{}, else the last expression that is named the
    answer, else the last one found. Thoughts do not count; a thought that does not end, or with `opens_thought` (the
    chat template opens it) a response without the end of one, gives 0. Answer and response may have plain numbers,
    fractions, percentages or LaTeX: 1/2, 0.5 and \frac{1}{2} are equal, and so are 3 1/2 and 3.5, 1.2e3,
    1.2 × 10^3 and 1200. Right answers that are words, dates, ratios or numbers to a base compare as texts, and so do
    those that would not be read whole in a response. A response that takes too much work to compare gives 0.

    Raises:
        ValueError: no answer is a mathematical expression, or one takes too much work.
    """
    right = [one for text in right_answers(answer, metadata) for one in _right(text)]
    if not right:
        raise ValueError(f"the answer is not a mathematical expression: {answer[:80]!r}")
    part, tagged = answer_part(response, opens_thought=opens_thought)
    said = list(stated(part, tagged))
    texts = stated_words(part) if any(is_text for _, is_text in right) else ""
    return float(
        any(_equal(one, other) for one in right for other in said)
        or any(is_text and same_words(words(one), texts) for one, is_text in right)
    )


def _right(text: str) -> list[Said]:
    """The forms of a right answer; of a solution that ends with `#### 7`, as in GSM8K, or with a box, of that end.
    Empty if it is no answer. Mathematics that would not be read whole in a response, as 10:30 AM, is also a text.
    Raises ValueError if reading it takes too much work."""
    text = text.rpartition("####")[2].strip()
    box, _ = last_box(text)
    text = (text if box is None else box).strip().strip("$").strip()
    text = _WORDS.sub(r"\1", text)
    if _TEXT.fullmatch(text.replace("\n", " ")) or not _MATHEMATICAL.search(text):
        return [(text, True)] if 0 < len(text) <= _LONGEST_TEXT else []
    text = _UNIT.sub("", spelled_out(text).strip())
    try:
        found = [] if parse_expression(text, max(LONGEST, len(text))) is None else [(text, False)]
    except (TooCostly, RecursionError):
        raise ValueError(f"the answer takes too much work to compare: {text[:80]!r}") from None
    is_read = _LAYOUT.sub("", text) in (_LAYOUT.sub("", one) for one in stated(text, tagged=False))
    return found if is_read or len(text) > _LONGEST_TEXT else [*found, (text, True)]


def _equal(right: Said, said: str) -> bool:
    text, is_text = right
    said = _UNIT.sub("", said)
    if (form := _LAYOUT.sub("", text)) == _LAYOUT.sub("", said):
        return True
    if is_text:
        plain = words(form).replace(" ", "")
        return words(said).replace(" ", "") in (plain, _BASE.sub("", plain))
    if _CODE.fullmatch(said) or (_OPERATION.search(said) and not _OPERATION.search(text)):
        return False
    try:
        expression = parse_expression(said, max(LONGEST, 2 * len(text)))
        return expression is not None and same_expression(parse_expression(text, max(LONGEST, len(text))), expression)
    except (TooCostly, Exception):  # nothing that a response has may fail its sample
        return False


def answer_classes(
    responses: list[str],
    answers: list[str],
    metadata: list[dict[str, Any]],
    *,
    reward: str = "",
    args: Mapping[str, Any] | None = None,
    opens_thought: bool = False,
) -> list[float]:
    """Number of the answer of each response to one prompt, or `NO_ANSWER`; the same answers have the same number.

    What the reward takes for the same right answer has the same number, and no wrong answer has it. Other answers are
    the same if the reward would take one for the other, or both for a third. A `reward` that compares no answers leaves
    them to be compared as mathematics if a right answer is mathematical, and else as texts.
    """
    right = right_answers(answers[0], metadata[0])
    if reward not in _STATED or reward == "numeric":
        reward = "numeric" if any(map(_is_mathematical, right)) else "choice"
    function, states = _STATED[reward]
    given = {"opens_thought": opens_thought, **(args or {})}

    def same(one: str, other: str) -> bool:
        return one == other or (reward == "numeric" and _equal((one, _CODE.fullmatch(one) is not None), other))

    classes: list[list[str]] = []
    keys: dict[str, str] = {}
    for response in dict.fromkeys(responses):
        said = states(response, right[0], given)
        earned = (f"\0{place}" for place, one in enumerate(right) if _earns(function, response, one, given))
        key = keys[response] = next(earned, said)
        if not key:
            continue
        equal = [found for found in classes if key in found or (key == said and any(same(one, key) for one in found))]
        classes = [found for found in classes if found not in equal] + [[key, *chain.from_iterable(equal)]]
    class_of = {key: place for place, found in enumerate(classes) for key in found}
    numbers: dict[int, float] = {}
    return [
        NO_ANSWER if not keys[response] else numbers.setdefault(class_of[keys[response]], float(len(numbers)))
        for response in responses
    ]


def _earns(function: Callable[..., Any], response: str, right: str, args: Mapping[str, Any]) -> bool:
    try:
        return function(response, right, {}, **args) == 1
    except ValueError:  # it is no answer of the reward's kind, but another one may be
        return False


def _is_mathematical(answer: str) -> bool:
    right = _right(answer) if re.search(r"[0-9\\]", answer) else []
    return any(not is_text for _, is_text in right)


def _number(text: str) -> str:
    number = find_last_number(text)
    return "" if number is None else str(number.normalize())


def _part(response: str, args: Mapping[str, Any]) -> tuple[str, bool]:
    return answer_part(response, opens_thought=args["opens_thought"])


_STATED: Mapping[str, tuple[Callable[..., float], Callable[[str, str, Mapping[str, Any]], str]]] = {
    "numeric": (numeric, lambda response, right, args: next(stated(*_part(response, args)), "")),
    "choice": (choice, lambda response, right, args: chosen(stated_words(_part(response, args)[0]), words(right))),
    "exact_match": (exact_match, lambda response, right, args: exact_text(response, **args)),
    "last_number": (last_number, lambda response, right, args: _number(_part(response, args)[0])),
}
"""The functions that compare answers, and the form of what a response states to each."""
