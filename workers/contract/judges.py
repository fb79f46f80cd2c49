"""What reward workers and judges say to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from troupe.workers.contract.environments import Message


def is_file(baseline: str) -> bool:
    """Whether a baseline is a file with stored answers, not a column."""
    return baseline.endswith((".parquet", ".jsonl"))


class JudgeGone(RuntimeError):
    """No judge worker runs at the moment, and one can start again: ask later."""


class Question(NamedTuple):
    """A question about responses, as a conversation."""

    messages: list[Message]
    number: int = 0
    """Of several answers to it, which one is wanted."""


class AnswerToken(NamedTuple):
    """A token of an answer, and the likeliest ones in its place."""

    text: str
    logprobs: Mapping[str, float]
    """Log-probs of tokens in its place, by their text."""


@dataclass(frozen=True)
class JudgeAnswer:
    """Answer to one question."""

    text: str = ""
    failure: str = ""
    """Why there is no answer; empty if there is one."""
    said: str = ""
    """Part of what came instead of an answer."""
    tokens: tuple[AnswerToken, ...] = ()
    """Its tokens if their log-probs were asked for, else empty."""


def whole_words(text: str) -> str:
    """An answer that was cut, without its last word: of `Score: 10` the cut may have left `Score: 1`."""
    return re.sub(r"\S+\Z", "", text)


class Judge(Protocol):
    """Something that answers questions about responses."""

    @property
    def name(self) -> str:
        """The model and its settings: answers of judges with the same name are the same."""
        ...

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question, each within the timeout. Raises JudgeGone."""
        ...


class JudgeLink(Judge, Protocol):
    """The judge workers of a run, whose model may play games."""

    async def turn(self, question: Question, timeout_s: float) -> JudgeAnswer:
        """The answer to one question within the timeout, without a thread that waits for it. Raises JudgeGone."""
        ...
