"""Mathematical equality, by math-verify: of a response and the right answers, and among the responses of a group.

`answer_classes` finds the samples of a group that give the same answer, for the vote of all of them (maj@k). The answer
of a sample is what the last <answer> tags of the visible response (the part behind its thought) hold. It is a
mathematical one if a right answer of the prompt is: it has a digit or a LaTeX command, and math-verify parses it.
Then it is the last box of that text, else the expression that `numeric` would read in it, and two are the same if
math-verify finds them equal, in the order of the samples. Otherwise it is the content of the last box, else all of the
text, and two are the same if they are equal but for case, white space and a final full stop.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from unicodedata import normalize

from math_verify import parse, verify

from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.rewards.answer_text import answer_part, last_box, plain
from troupe.workers.rewards.functions import right_answers

# math-verify warns that its own timeout is disabled. It is disabled because a timeout must give a failed sample, as the
# timeout of the process does, whereas math-verify would return a wrong answer.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_NAMES = re.compile("答案|答え|정답")
_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_BORDERS = re.compile(rf"(?<=[{_CJK}])(?=[-+$\\(]?[0-9])|(?<=[0-9])(?=[{_CJK}])")
_EMPHASIS = re.compile(r"(?<![\w*`])([*`]{1,3}|_{1,3})(?=\S)([^*`\n]{1,500}?)(?<=\S)\1(?![\w*`])")
_COLON = re.compile(r"(?<=[^\W\d])(\s*:\**)(?=[^\s/*])")
_BRACKETS = re.compile(r"(?<![\w\\)])[(\[]\s*(-?[0-9][0-9.,/]*)\s*[)\]](?!\s*[\w(])")
_MATHEMATICAL = re.compile(r"[0-9\\]")
"""math-verify would read a word as a product of its letters."""


def numeric(response: str, answer: str, metadata: dict[str, Any], *, opens_thought: bool = False) -> float:
    r"""1 if the response's final expression equals a right answer.

    Final is what the last <answer> tags hold, else the last \boxed{}, else the last expression that is named the
    answer, else the last one found. Thoughts do not count; a thought that does not end, or with `opens_thought` (the
    chat template opens it) a response without the end of one, gives 0. Answer and response may have plain numbers,
    fractions, percentages or LaTeX: 1/2, 0.5 and \frac{1}{2} are equal, and so are 3 1/2 and 3.5, 1.2e3,
    1.2 × 10^3 and 1200.

    Raises:
        ValueError: no answer is a mathematical expression.
    """
    expected = [_parsed_answer(text) for text in right_answers(answer, metadata)]
    if not any(expected):
        raise ValueError(f"the answer is not a mathematical expression: {answer[:80]!r}")
    part, tagged = answer_part(response, opens_thought=opens_thought)
    return float(any(_equal(expected, found) for found in _expressions(_spelled_out(part), tagged)))


def _ascii(text: str) -> str:
    return normalize("NFKC", text).replace("\N{FRACTION SLASH}", "/").replace("\N{MINUS SIGN}", "-")


def _improper(found: re.Match[str]) -> str:
    whole, part, parts = (int(number) for number in found.groups())
    return f"{whole * parts + part}/{parts}" if part < parts else found[0]


_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # Long white space, which takes the patterns of math-verify seconds: their time grows with its square
    (re.compile(r"\s{3,}"), lambda found: "\n\n" if "\n" in found[0] else " "),
    # 1.000,5 and 3{,}5
    (
        re.compile(r"(?<![0-9.,])([0-9]{1,3}(?:\.[0-9]{3})+),([0-9]+)(?![0-9.,])"),
        lambda found: found[1].replace(".", "") + "." + found[2],
    ),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9])"), "."),
    # ####7, 90°, 2π and √16
    (re.compile(r"(?<=##)(?=[-+.0-9])"), " "),
    (re.compile(r"(?<!\s)\s*°\s*[CF]?(?![A-Za-z])"), r"^\\circ "),
    (re.compile("π"), r"\\pi "),
    (re.compile(r"√\s*([0-9]+)"), r"\\sqrt{\1}"),
    # 3½ and 2³
    (re.compile("[¼-¾⅐-⅞]"), lambda found: f" {_ascii(found[0])}"),
    (re.compile(r"(?<=[\w)])[⁻⁰¹²³⁴-⁹]+"), lambda found: f"^{{{_ascii(found[0])}}}"),
    # 3 × 10^8 and 3·10^{-8}
    (
        re.compile(
            r"(?<![\w.,^/*×·}])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s?(?:[×·x*]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?"
            r"(?:\{([-+]?[0-9]{1,2})\}|([-+]?[0-9]{1,2}))(?![\w.]*[0-9])"
        ),
        lambda found: format(Decimal(f"{found[1]}e{found[2] or found[3]}"), "f"),
    ),
    # US$7, ~7 and \textbf{7}
    (re.compile(r"\b(?:US|AU|NZ|CA|HK|SG)\\?\$\s?(?=[0-9])"), ""),
    (re.compile(r"(?:^|(?<=\s))~(?=\.?[0-9])"), ""),
    (re.compile(r"\\(?:math(?:bf|rm|it|sf)|text(?:bf|it)|bm)\{\s*(-?[0-9][0-9.,/]*)\s*\}"), r"\1"),
    # +7 and minus 7, unless they are added to or taken from something before them
    (
        re.compile(
            r"(?:^|(?<=[\n:=${(\[>])|(?<=[:=${(\[] )|(?<=[a-z]{2} ))(\+|minus |negative )(?=\.?[0-9])", re.IGNORECASE
        ),
        lambda found: "" if found[1] == "+" else "-",
    ),
    # 1.2e3, .5 and 3 1/2
    (
        re.compile(r"(?<![\w.])([0-9]+(?:\.[0-9]+)?|\.[0-9]+)[eE]([-+]?[0-9]{1,2})(?![\w.]*[0-9])"),
        lambda found: format(Decimal(found[0]), "f"),
    ),
    (re.compile(r"(?<![\w.)}])(?=\.[0-9])"), "0"),
    (re.compile(r"(?<![\w.,/^])([0-9]{1,15}) ([0-9]{1,15})/([0-9]{1,15})(?![\w/])"), _improper),
)
"""Forms of numbers that math-verify does not read, with what it reads."""


def _spelled_out(text: str) -> str:
    """Plain text, with numbers in forms that math-verify does not read written out."""
    text = plain(text)
    for form, written_out in _FORMS:
        text = form.sub(written_out, text)
    return text


def _equal(expected: list[Any], found: Any) -> bool:
    return any(right and verify(right, found, timeout_seconds=0) for right in expected)


def _stated(part: str, tagged: bool) -> Any:
    """The expression that a response states: the first that `numeric` would compare, or None if it states none.

    Args:
        part: The part of the response with its answer.
        tagged: Whether it stood inside of <answer> tags.
    """
    return next((found for found in _expressions(_spelled_out(part), tagged) if found), None)


def _parsed_answer(text: str) -> Any:
    """A right answer; of a solution that ends with `#### 7`, as in GSM8K, or with a box, that end."""
    text = _spelled_out(text).rpartition("####")[2].strip()
    box, _ = last_box(text)
    inner = (text if box is None else box).strip().strip("$").strip()
    return parse(f"${inner}$", parsing_timeout=0, fallback_mode="no_fallback")


def _expressions(text: str, tagged: bool) -> Iterator[Any]:
    """What the text may mean: the box alone, or the text as formula (inside of tags) and as prose."""
    box, before = last_box(text)
    if box is not None:
        # math-verify combines all boxes into one set; only the last box is the answer.
        yield parse(f"\\boxed{{{box.strip().rstrip('.')}}}", parsing_timeout=0)
        return
    prose = _EMPHASIS.sub(r"\2", _NAMES.sub(" answer ", before).replace("\\$", "$"))
    prose = _COLON.sub(r"\1 ", _BORDERS.sub(" ", prose))
    if tagged and "$" not in text and "\n" not in text.strip():
        yield parse(f"${text.strip()}$", parsing_timeout=0)
    # A number in brackets is a reference more often than an answer: it counts if nothing else does.
    found = parse(prose, parsing_timeout=0)
    yield found
    if all(isinstance(one, str) for one in found):
        yield parse(_BRACKETS.sub(r" \1 ", prose), parsing_timeout=0)


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
    return _MATHEMATICAL.search(answer) is not None and bool(_parsed_answer(answer))


def _textual(texts: list[str]) -> list[float]:
    numbers: dict[str, float] = {}
    found = []
    for text in texts:
        box, _ = last_box(text)
        form = " ".join(plain(text if box is None else box).casefold().split()).removesuffix(".").rstrip()
        found.append(numbers.setdefault(form, float(len(numbers))) if form else NO_ANSWER)
    return found


def _mathematical(parts: list[tuple[str, bool]]) -> list[float]:
    classes: list[Any] = []
    known: dict[tuple[str, bool], float] = {}
    for part in parts:
        if part in known:
            continue
        expression = _stated(*part)
        if expression is None:
            known[part] = NO_ANSWER
            continue
        equal = (number for number, first in enumerate(classes) if verify(first, expression, timeout_seconds=0))
        number = next(equal, len(classes))
        if number == len(classes):
            classes.append(expression)
        known[part] = float(number)
    return [known[part] for part in parts]
