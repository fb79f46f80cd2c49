"""Tries built-in reward functions before a first run; runs in child processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from troupe.workers.contract.rewards import is_solved
from troupe.workers.rewards.loading import load

_NONSENSE = "I do not know."
_BY_CHANCE = {"the answer of another row": 0.15, "an empty response": 0.0, "nonsense": 0.0, "the prompt": 0.5}
"""Wrong responses, and the part of the prompts at which they may happen to be right."""
_WRONG = 50
"""Prompts whose wrong responses are tried."""


def count_earned(request: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Yield each of several functions, the number of right answers to which it gives 1, and a kind of wrong responses
    that get it, or "", up to the first that tells them apart. The request has `functions` by name, `answers` (the right
    ones of each prompt), `prompts`, and `enough`, a part."""
    answers: list[list[str]] = request["answers"]
    for name in request["functions"]:
        function = load(name, {})
        earned = sum(_earns(function, right[0], right) for right in answers)
        paid = paid_wrong(
            answers, request["prompts"], lambda said, number, f=function: _earns(f, said, answers[number])
        )
        yield name, earned, paid
        if earned >= request["enough"] * len(answers) and not paid:
            return


def paid_wrong(right: Sequence[Sequence[str]], prompts: Sequence[str], earns: Callable[[str, int], bool]) -> str:
    """A kind of wrong responses to the first prompts that earns 1 more often than by chance; empty if none does."""
    given = list(enumerate(right[:_WRONG]))
    others = [next((one[0] for one in chain(right[n:], right) if one and one[0] not in own), "") for n, own in given]
    wrong = (others, [""] * len(given), [_NONSENSE] * len(given), prompts)
    for (kind, chance), said in zip(_BY_CHANCE.items(), wrong, strict=True):
        if sum(earns(said[number], number) for number, _ in given) > chance * len(given):
            return kind
    return ""


def _earns(function: Callable[..., Any], said: str, right: Sequence[str]) -> bool:
    """Whether an answer, as the data have it or in a box, earns 1."""
    metadata = {"right_answers": list(right)} if len(right) > 1 else {}
    try:
        return any(is_solved(function(text, right[0], metadata), 1.0) for text in (said, f"\\boxed{{{said}}}"))
    except (ValueError, IndexError):  # it does not read answers of this form, or there is none
        return False
