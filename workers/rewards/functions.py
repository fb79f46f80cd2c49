"""Reward functions that need only the standard library.

A reward function is called as ``f(response, answer, metadata, **args) -> float | Steps``. ``metadata`` is the prompt's
JSON object and, under the key ``sample``, facts about the sample: ``{"response_tokens": int, "finish_reason": "stop" |
"length", "messages": [...]}``. If several answers are right, they are the list ``metadata["right_answers"]``, and
``answer`` is the first of them. A function that cannot score a response raises; it does not return 0.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Literal

from troupe.workers.rewards.answer_text import answer_part, plain
from troupe.workers.rewards.results import Steps
from troupe.workers.rewards.statements import same_words, stated_words, words

# A minus directly after a digit is a subtraction ("7-5"), not a sign; commas count only between groups of three.
_NUMBER = re.compile(
    r"(?:(?<![0-9])-)?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.)}])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)

Metadata = dict[str, Any]


def right_answers(answer: str, metadata: Metadata) -> list[str]:
    """Every right answer of a prompt."""
    return metadata.get("right_answers") or [answer]


def exact_match(
    response: str,
    answer: str,
    metadata: Metadata,
    *,
    strip: bool = True,
    ignore_case: bool = False,
    opens_thought: bool = False,
) -> float:
    """1 if the response, or what its last <answer> tags hold, equals a right answer; thoughts do not count.

    `strip` ignores surrounding white space, `ignore_case` ignores case, and `opens_thought` is as for `last_number`.
    """
    said = exact_text(response, strip=strip, ignore_case=ignore_case, opens_thought=opens_thought)
    whole = exact_form(response, strip, ignore_case) if not opens_thought else said
    right = [exact_form(text, strip, ignore_case) for text in right_answers(answer, metadata)]
    return float(said in right or whole in right)


def exact_text(response: str, *, strip: bool = True, ignore_case: bool = False, opens_thought: bool = False) -> str:
    """The text that `exact_match` compares."""
    return exact_form(answer_part(response, opens_thought=opens_thought)[0], strip, ignore_case)


def exact_form(text: str, strip: bool, ignore_case: bool) -> str:
    """The text without what `exact_match` ignores."""
    text = text.strip() if strip else text
    return text.casefold() if ignore_case else text


def choice(response: str, answer: str, metadata: Metadata, *, opens_thought: bool = False) -> float:
    r"""1 if the response states a right answer as text, or the letter of one: "The answer is B.", (B), \text{B}, B) 7.

    That is what the last <answer> tags hold, else the last \boxed{}, else what is named the answer, else the last line;
    without regard to case, formatting, white space and a full stop. Thoughts do not count, as for `numeric`.
    """
    said = stated_words(answer_part(response, opens_thought=opens_thought)[0])
    return float(any(same_words(words(text), said) for text in right_answers(answer, metadata)))


def find_last_number(text: str) -> Decimal | None:
    """The last integer or decimal of a text, also with an exponent (1.2e3).

    Thousands separators are removed; a typographic minus is a minus.
    """
    numbers = _NUMBER.findall(plain(text))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def parse_number(text: str) -> Decimal | None:
    """The text as one number; None if it is anything else."""
    text = plain(text).strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def last_number(response: str, answer: str, metadata: Metadata, *, opens_thought: bool = False) -> float:
    """1 if the last number of the response equals a right answer as a number (5.0 is 5).

    It is the last inside the last <answer> tags, if there are some. Thoughts do not count; a thought that does not
    end, or with `opens_thought` (the chat template opens it) a response without the end of one, gives 0.

    Raises:
        ValueError: no answer is one number.
    """
    expected = [parse_number(text.rpartition("####")[2]) for text in right_answers(answer, metadata)]
    numbers = [number for number in expected if number is not None]
    if not numbers:
        raise ValueError(f"the answer is not a number: {answer[:80]!r}")
    part, _ = answer_part(response, opens_thought=opens_thought)
    return float(find_last_number(part) in numbers)


def regex(response: str, answer: str, metadata: Metadata, *, pattern: str, full: bool = True) -> float:
    """1 if `pattern` matches the whole response (`full`) or any part of it: a format reward."""
    match = re.fullmatch(pattern, response) if full else re.search(pattern, response)
    return float(match is not None)


Unit = Literal["characters", "words", "tokens"]


def _size(response: str, metadata: Metadata, unit: Unit) -> int:
    if unit == "characters":
        return len(response)
    if unit == "words":
        return len(response.split())
    if unit == "tokens":
        return int(metadata["sample"]["response_tokens"])
    raise ValueError(f"unit must be characters, words or tokens, not {unit!r}")


def length(
    response: str, answer: str, metadata: Metadata, *, target: int, tolerance: int, unit: Unit = "characters"
) -> float:
    """1 at `target`, falling linearly on both sides to 0 at `tolerance` away from it."""
    if tolerance <= 0:
        raise ValueError(f"tolerance must be positive, not {tolerance}")
    return max(0.0, 1.0 - abs(_size(response, metadata, unit) - target) / tolerance)


def overlong(
    response: str, answer: str, metadata: Metadata, *, limit: int, buffer: int, unit: Unit = "tokens"
) -> float:
    """0 up to `limit - buffer`, falling linearly to -1 at `limit`.

    The soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).
    """
    if buffer <= 0:
        raise ValueError(f"buffer must be positive, not {buffer}")
    excess = _size(response, metadata, unit) - (limit - buffer)
    return -min(1.0, max(0.0, excess / buffer))


def letter_share(
    response: str, answer: str, metadata: Metadata, *, letters: str, ignore_case: bool = False, every: int = 0
) -> float | Steps:
    """Share of the response's characters that are in `letters`; 0 for an empty response. A dense
    reward for tests.

    With `every`, each chunk of that many characters is a step with its own share (the last one may be shorter), and the
    share of the whole response is the outcome.
    """
    wanted = frozenset(letters.casefold() if ignore_case else letters)

    def share(text: str) -> float:
        return sum((c.casefold() if ignore_case else c) in wanted for c in text) / len(text) if text else 0.0

    if not every:
        return share(response)
    if every < 0:
        raise ValueError(f"every must not be negative, got {every}")
    starts = range(0, max(1, len(response)), every)
    steps = [(min(start + every, len(response)), share(response[start : start + every])) for start in starts]
    return Steps(steps, outcome=share(response))
