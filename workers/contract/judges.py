"""What reward workers and judges say to each other."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from troupe.workers.contract.environments import Message

TEMPLATE_FIELDS = ("prompt", "response", "answer")
"""What a template contains besides columns of the data."""


def template_fields(template: str) -> list[str]:
    """The names in braces. Raises ValueError for braces that do not close."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


class JudgeGone(RuntimeError):
    """No judge worker runs at the moment, and one can start again: ask later."""


@dataclass(frozen=True)
class JudgeAnswer:
    """Answer to one question."""

    text: str = ""
    failure: str = ""
    """Why there is no answer; empty if there is one."""
    said: str = ""
    """Part of what came instead of an answer."""


def whole_words(text: str) -> str:
    """An answer that was cut, without its last word: of `Score: 10` the cut may have left `Score: 1`."""
    return re.sub(r"\S+\Z", "", text)


class Judge(Protocol):
    """Something that answers questions about responses."""

    @property
    def name(self) -> str:
        """The model and its settings: answers of judges with the same name are the same."""
        ...

    def ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question, each within the timeout. Raises JudgeGone."""
        ...
