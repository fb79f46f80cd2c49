"""The score in a judge's answer."""

from __future__ import annotations

import re

from troupe.workers.rewards.answer_text import plain, visible

_NUMBER = (
    r"(?P<score>-?[0-9]+(?:[.,][0-9]+)?)"
    r"(?:[`* (]{0,5}(?:(?:/|(?:points? )?(?:out )?of)[`* ]{0,5}(?P<most>[0-9]+(?:\.[0-9]+)?)|(?P<percent>%)))?"
)
_FORMS = [
    (re.compile(f"{before}(?P<number>{_NUMBER}){after}", re.IGNORECASE), bool(after))
    for before, after in (
        (r"score\W{0,5}[:=]\W{0,5}?", ""),
        (r"<score>\s*", r"\s*</score>"),
        (r"\brating\W{0,5}[:=]\W{0,5}?", ""),
        (r"<rating>\s*", r"\s*</rating>"),
        (r"\[\[\s*", r"\s*\]\]"),
        (r"\\boxed\{\s*", r"\s*\}"),
        (r"\b(?:score|rating) is[ *`]{1,5}", ""),
    )
]
"""Forms of a score, and whether a form closes behind the number. The first one that an answer has counts."""
_CONTINUED = re.compile(
    r"(?:e[-+]?(?=[0-9])|(?:[^\w\n.([{]|_|\.(?=[0-9])|\.{2,}|\b(?:or|to|and|bis|through|until|even|maybe|perhaps)\b)*+)"
    r"(?:[0-9]+|[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2079\u2150-\u215e])",
    re.IGNORECASE,
)
"""What follows a number that is no score alone: the end of a range, the rest of a sum or of a fraction. Other numbers
may follow in brackets, behind the end of a sentence and behind words."""


class JudgeError(ValueError):
    """The arguments of a judge cannot be used, or it gave no score."""


def read_score(answer: str, low: float, high: float) -> float:
    """The last score in an answer, behind its thought.

    Raises:
        JudgeError: there is no score, a range or a calculation, or one that is not on the scale from low to high.
    """
    text = plain(visible(answer))
    found = ((list(pattern.finditer(text)), closed) for pattern, closed in _FORMS)
    last, closed = next(((matches[-1], closed) for matches, closed in found if matches), (None, False))
    if last is None:
        raise JudgeError("no score in its answer")
    score, most = _number(last["score"]), 100.0 if last["percent"] else float(last["most"] or high)
    continued = None if closed else _CONTINUED.match(text, last.end())
    if not low <= score <= high or most != high or continued:
        written = text[last.start("number") : continued.end() if continued else last.end("number")]
        raise JudgeError(f"a score of {written} is not on the scale from {low:g} to {high:g}")
    return score


def _number(text: str) -> float:
    """A number with a decimal point, or a decimal comma; three digits behind a comma are thousands."""
    whole, comma, digits = text.partition(",")
    return float(f"{whole}.{digits}" if comma and len(digits) != 3 else whole + digits)
