"""Forms of a judge's question, and the scores in its answer: which responses it shows, and how the answer is read.

A form is a row of `FORMS`, by the name of `compare` in a judge's arguments.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from troupe.workers.contract.environments import cut
from troupe.workers.contract.judges import JudgeAnswer
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


_OF_RESPONSE = re.compile(r"score[\W_]{0,5}(?P<number>[0-9]+)(?=\W{0,5}[:=])", re.IGNORECASE)
_BETTER = re.compile(
    r"\bbetter\W{0,5}[:=]\W{0,5}(?:response[ _]?)?(?P<named>A|B|tie|both)\b|\[\[(?P<boxed>A|B|C|tie)\]\]", re.IGNORECASE
)
"""Forms of a comparison. A third letter is a tie in the form of MT-Bench."""
_LONGEST = 2000
"""Characters of a judge's reasons."""
_SHARES = {"a": (1.0, 0.0), "b": (0.0, 1.0)}


class JudgeError(ValueError):
    """The arguments of a judge cannot be used, or it gave no score."""


def read_score(answer: str, low: float, high: float) -> float:
    """The last score in an answer, behind its thought. Raises JudgeError if there is no score, a range or a
    calculation, or one that is not on the scale from low to high."""
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


def reasons_in(answer: str) -> str:
    """The text of an answer about one response, behind its thought, without its scores and at most `_LONGEST`
    characters long."""
    text = plain(visible(answer))
    for pattern, _ in _FORMS:
        text = pattern.sub("", text)
    lines = (line.rstrip() for line in text.splitlines())
    return cut("\n".join(line for line in lines if re.search(r"\w", line)), _LONGEST)


def read_scores(answer: str, responses: int, low: float, high: float) -> list[float]:
    """The last score of each of several responses, `Score 1: N` and so on. Raises JudgeError."""
    text = plain(visible(answer))
    found = list(_OF_RESPONSE.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    parts = {int(match["number"]): text[match.end() : end] for match, end in zip(found, ends, strict=False)}
    if missing := [number for number in range(1, responses + 1) if number not in parts]:
        raise JudgeError(f"no score of response {missing[0]} in its answer")
    if len(parts) > responses:
        raise JudgeError(f"a score of response {max(parts)}, of {responses}")
    return [read_score(f"Score{parts[number]}", low, high) for number in range(1, responses + 1)]


def read_better(answer: str) -> tuple[float, float]:
    """The points of responses A and B: 1 for the better one, half for both in a tie. Raises JudgeError."""
    found = list(_BETTER.finditer(plain(visible(answer))))
    if not found:
        raise JudgeError("it does not say which response is better")
    return _SHARES.get((found[-1]["named"] or found[-1]["boxed"]).lower(), (0.5, 0.5))


def expected_score(answer: JudgeAnswer, low: float, high: float) -> float:
    """The mean of the scores that the answer could have, by the log-probs of the token of its score. G-Eval, arXiv
    2303.16634, sec. 2. Scores are digits, each of which is one token. Raises JudgeError if the answer has no score, or
    the log-probs of its token are missing."""
    texts = [token.text for token in answer.tokens]

    def score(place: int, text: str) -> float | None:
        try:
            return read_score("".join([*texts[:place], text, *texts[place + 1 :]]), low, high)
        except JudgeError:
            return None

    for place, token in reversed(list(enumerate(answer.tokens))):
        # The token decides the score if another digit in its place is another score.
        if not token.text.strip().isdigit() or score(place, f"{low:g}") == score(place, f"{high:g}"):
            continue
        shares = defaultdict[float, float](float)
        for text, logprob in token.logprobs.items():
            if (value := score(place, text)) is not None:
                shares[value] += math.exp(min(0.0, logprob))
        if total := sum(shares.values()):
            return sum(value * share for value, share in shares.items()) / total
    raise JudgeError("no log-probs of a score in its answer")


def _number(text: str) -> float:
    """A number with a decimal point, or a decimal comma; three digits behind a comma are thousands."""
    whole, comma, digits = text.partition(",")
    return float(f"{whole}.{digits}" if comma and len(digits) != 3 else whole + digits)


BASELINE = -1
"""Stands for the baseline's answer among the samples of a group."""
SCALE = "a number from {low:g} to {high:g}"

Order = tuple[int, ...]
"""Samples in the order in which a question shows them."""


@dataclass(frozen=True)
class Form:
    """One form of question."""

    orders: Callable[[int, int, int], Iterable[Order]]
    """From the number of samples, the turn among several answers as a share of the samples, and the most opponents of
    each (0: all), to the questions of that turn."""
    labels: str
    """Names of the responses in a question, letters, `1` for numbers, or empty for one without a name."""
    how: str
    """How the judge writes its answer."""
    points: Callable[[str, int, float, float], Sequence[float]]
    """From an answer, the number of responses and the scale to the points of each, from 0 to 1. Raises JudgeError."""


def _pairs(samples: int, shift: int, opponents: int) -> Iterable[Order]:
    """Each sample with those behind it in a ring, in both orders."""
    behind = min((opponents + 1) // 2 or samples, samples - 1)
    pairs = ((one, (one + step) % samples) for one in range(samples) for step in range(1, behind + 1))
    return dict.fromkeys(order for pair in pairs for order in (pair, pair[::-1]))


def _on_scale(scores: Iterable[float], low: float, high: float) -> Sequence[float]:
    return [(score - low) / (high - low) for score in scores]


_WHICH = (
    "Say which of the two responses is better. End your answer with a line `Better: A`, `Better: B` or `Better: tie`."
)
FORMS = {
    "": Form(
        lambda samples, *_: ((one,) for one in range(samples)),
        "",
        f"End your answer with a line `Score: N`, where N is {SCALE}.",
        lambda answer, _, *scale: _on_scale([read_score(answer, *scale)], *scale),
    ),
    "group": Form(
        lambda samples, shift, _: [(*range(shift, samples), *range(shift))],
        "1",
        "Compare the responses with each other, and score each of them. End your answer with a line `Score K: N` for "
        f"each response K, where N is {SCALE}.",
        lambda answer, responses, *scale: _on_scale(read_scores(answer, responses, *scale), *scale),
    ),
    "pairs": Form(_pairs, "AB", _WHICH, lambda answer, *_: read_better(answer)),
    "baseline": Form(
        lambda samples, *_: (order for one in range(samples) for order in ((one, BASELINE), (BASELINE, one))),
        "AB",
        _WHICH,
        lambda answer, *_: read_better(answer),
    ),
}
"""The forms by `compare`; the empty name is the score of one response."""


def shown(texts: Sequence[str], form: Form) -> str:
    """The responses of a question, each in an element with its name."""
    if not form.labels:
        return texts[0]
    names = form.labels if form.labels.isalpha() else [str(number) for number in range(1, len(texts) + 1)]
    parts = (f"<response_{name}>\n{text}\n</response_{name}>" for name, text in zip(names, texts, strict=True))
    return "\n\n".join(parts)
