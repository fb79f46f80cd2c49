"""Which samples of a group give the same answer."""

from __future__ import annotations

from typing import Any

import pytest

from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.rewards.numeric import answer_classes

NONE = int(NO_ANSWER)


def classes(responses: list[str], answer: str, **metadata: Any) -> list[int]:
    count = len(responses)
    return [int(number) for number in answer_classes(responses, [answer] * count, [metadata] * count)]


def test_mathematical_answers_are_the_same_where_math_verify_finds_them_equal() -> None:
    responses = [
        r"so \boxed{\frac{1}{2}}",
        "The answer is 0.5",
        "<think>2, or 3?</think> <answer>1/2</answer>",
        "50 \\boxed{3}",
        "I do not know.",
        "3",
        "<think>is it 3",
    ]
    assert classes(responses, r"\frac{1}{2}") == [0, 0, 0, 1, NONE, 1, NONE]


def test_numbers_are_read_as_the_reward_reads_them() -> None:
    assert classes(["3 1/2", "3.5", "1.2e3", "1200"], "3.5") == [0, 0, 1, 1]


def test_any_right_answer_may_say_that_answers_are_mathematical() -> None:
    assert classes(["7", "7.0"], "seven", right_answers=["seven", "7"]) == [0, 0]


def test_other_answers_are_the_same_where_their_texts_are() -> None:
    """Read as LaTeX, "Paris" and "pairs" would be the same product."""
    responses = ["<answer>Paris</answer>", "<answer> paris. </answer>", r"\boxed{PARIS}", "Pairs", "  ", "pairs."]
    assert classes(responses, "Paris") == [0, 0, 0, 1, NONE, 1]


@pytest.mark.parametrize("answer", ["12", r"\pi"])
def test_what_counts_as_mathematical(answer: str) -> None:
    assert classes([f"${answer}$", f"\\boxed{{{answer}}}"], answer) == [0, 0]
