"""Chooses the reward function of a first spec: the first one from which the data's own answers earn a reward of 1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.starter.choices import Earned
from troupe.workers.isolation.probe import ProbeFailed, ask

_TRIAL = "troupe.workers.rewards.trial:count_earned"
_MATHS = ("last_number", "numeric")
_ANY = "exact_match"
_OF_MATHS = re.compile(r"\d|\\[A-Za-z]")
"""A number or a LaTeX command; `numeric` takes any word for a symbol."""
_ANSWERS = 200
_ENOUGH = 0.95
_TIMEOUT_S = 120.0


def fitting_reward(answers: Sequence[Any]) -> Earned:
    """The first function from which nearly all answers earn 1, else the one with the most of them.

    Raises:
        UsageError: There are no answers, or the trial fails.
    """
    given = [right for right in answers if right not in (None, "", [])][:_ANSWERS]
    texts = [list(map(str, right if isinstance(right, list) else [right])) for right in given]
    if not texts:
        raise UsageError("--data: the column with the answer is empty")
    maths = sum(bool(_OF_MATHS.search(right[0])) for right in texts) >= _ENOUGH * len(texts)
    tried = (*_MATHS, _ANY) if maths else (_ANY,)
    try:
        counts = ask(_TRIAL, {"functions": tried, "answers": texts, "enough": _ENOUGH}, _TIMEOUT_S)
    except ProbeFailed as error:
        raise UsageError(f"--data: the answers cannot be tried: {error}") from None
    found = [Earned(function, earned, len(texts)) for function, earned in counts]
    return next((one for one in found if one.share >= _ENOUGH), max(found, key=lambda one: one.earned))
