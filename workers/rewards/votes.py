"""Which samples of a group give the same answer, for the vote of all of them (maj@k).

The answer of a sample is what the last <answer> tags of the visible response (the part behind its thought) hold. It is
a mathematical one if a right answer of the prompt is: it has a digit or a LaTeX command, and math-verify parses it.
Then it is the last box of that text, else the expression that `numeric` would read in it, and two are the same if
math-verify finds them equal, in the order of the samples. Otherwise it is the content of the last box, else all of the
text, and two are the same if they are equal but for case, white space and a final full stop.
"""

from __future__ import annotations

import re
from typing import Any

from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.rewards.answer_text import answer_part, last_box, plain
from troupe.workers.rewards.functions import right_answers

_MATHEMATICAL = re.compile(r"[0-9\\]")
"""math-verify would read a word as a product of its letters."""


def answer_classes(
    responses: list[str], answers: list[str], metadata: list[dict[str, Any]], *, opens_thought: bool = False
) -> list[float]:
    """Number of the answer of each response; the same number: the same answer; `NO_ANSWER`: it has none.

    Args:
        responses: Responses to one prompt.
        answers: The right answer, for each of them.
        metadata: Metadata of the prompt, for each of them.
        opens_thought: Whether the chat template opens the thought of a response.
    """
    parts = [answer_part(response, opens_thought=opens_thought) for response in responses]
    if any(map(_is_mathematical, right_answers(answers[0], metadata[0]))):
        return _mathematical(parts)
    return _textual([text for text, _ in parts])


def _is_mathematical(answer: str) -> bool:
    from troupe.workers.rewards.numeric import parsed_answer

    return _MATHEMATICAL.search(answer) is not None and bool(parsed_answer(answer))


def _textual(texts: list[str]) -> list[float]:
    numbers: dict[str, float] = {}
    found = []
    for text in texts:
        box, _ = last_box(text)
        form = " ".join(plain(text if box is None else box).casefold().split()).removesuffix(".").rstrip()
        found.append(numbers.setdefault(form, float(len(numbers))) if form else NO_ANSWER)
    return found


def _mathematical(parts: list[tuple[str, bool]]) -> list[float]:
    from troupe.workers.rewards.numeric import same, stated

    classes: list[Any] = []
    known: dict[tuple[str, bool], float] = {}
    for part in parts:
        if part in known:
            continue
        expression = stated(*part)
        if expression is None:
            known[part] = NO_ANSWER
            continue
        equal = (number for number, first in enumerate(classes) if same(first, expression))
        number = next(equal, len(classes))
        if number == len(classes):
            classes.append(expression)
        known[part] = float(number)
    return [known[part] for part in parts]
