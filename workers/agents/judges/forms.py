"""Forms of a judge's question: which responses it shows, how the answer is written, and how it is read.

A form is a row of `FORMS`, by the name of `compare` in a judge's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from troupe.workers.agents.judges.scores import read_better, read_score, read_scores

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


def _each(samples: int, shift: int, opponents: int) -> Iterable[Order]:
    return ((one,) for one in range(samples))


def _together(samples: int, shift: int, opponents: int) -> Iterable[Order]:
    yield (*range(shift, samples), *range(shift))


def _pairs(samples: int, shift: int, opponents: int) -> Iterable[Order]:
    """Each sample with those behind it in a ring, in both orders."""
    behind = min((opponents + 1) // 2 or samples, samples - 1)
    pairs = ((one, (one + step) % samples) for one in range(samples) for step in range(1, behind + 1))
    return dict.fromkeys(order for pair in pairs for order in (pair, pair[::-1]))


def _beside_baseline(samples: int, shift: int, opponents: int) -> Iterable[Order]:
    return (order for one in range(samples) for order in ((one, BASELINE), (BASELINE, one)))


def _score(answer: str, responses: int, low: float, high: float) -> Sequence[float]:
    return [(read_score(answer, low, high) - low) / (high - low)]


def _scores(answer: str, responses: int, low: float, high: float) -> Sequence[float]:
    return [(score - low) / (high - low) for score in read_scores(answer, responses, low, high)]


def _better(answer: str, responses: int, low: float, high: float) -> Sequence[float]:
    return read_better(answer)


_WHICH = (
    "Say which of the two responses is better. End your answer with a line `Better: A`, `Better: B` or `Better: tie`."
)
FORMS = {
    "": Form(_each, "", f"End your answer with a line `Score: N`, where N is {SCALE}.", _score),
    "group": Form(
        _together,
        "1",
        "Compare the responses with each other, and score each of them. End your answer with a line `Score K: N` for "
        f"each response K, where N is {SCALE}.",
        _scores,
    ),
    "pairs": Form(_pairs, "AB", _WHICH, _better),
    "baseline": Form(_beside_baseline, "AB", _WHICH, _better),
}
"""The forms by `compare`; the empty name is the score of one response."""


def shown(texts: Sequence[str], form: Form) -> str:
    """The responses of a question, each in an element with its name."""
    if not form.labels:
        return texts[0]
    names = form.labels if form.labels.isalpha() else [str(number) for number in range(1, len(texts) + 1)]
    parts = (f"<response_{name}>\n{text}\n</response_{name}>" for name, text in zip(names, texts, strict=True))
    return "\n\n".join(parts)
