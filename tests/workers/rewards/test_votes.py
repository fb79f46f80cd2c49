"""Which samples of a group give the same answer."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from troupe.workers.contract.rewards import NO_ANSWER
from troupe.workers.rewards.numeric import answer_classes, numeric

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


def test_letters_vote_as_the_reward_reads_them() -> None:
    responses = ["A", "(A)", "The answer is A.", "B", "b) Rome", r"\boxed{\text{B}}", "", "<think>A"]
    assert classes(responses, "B") == [0, 0, 0, 1, 1, 1, NONE, NONE]


def test_a_vote_is_transitive_in_every_order() -> None:
    """5% is the answers 5 and 0.05, which are not equal."""
    for responses in permutations(["5%", "5", "0.05", "7"]):
        found = dict(zip(responses, classes(list(responses), "9"), strict=True))
        assert found["5%"] == found["5"] == found["0.05"] != found["7"]


@pytest.mark.parametrize("right", ["5", "0.05"])
def test_what_the_reward_pays_is_never_one_answer_with_what_it_does_not_pay(right: str) -> None:
    responses = ["5%", "5", "0.05", "x = 5", "0.050", "7", "east"]
    found = classes(responses, right)
    paid = {found[place] for place, response in enumerate(responses) if numeric(response, right, {}) == 1}
    assert len(paid) == 1
    assert not paid & {found[place] for place, response in enumerate(responses) if numeric(response, right, {}) == 0}


@pytest.mark.parametrize(
    ("reward", "args", "expected"),
    [
        ("exact_match", {}, [0, 1, 2, 3]),
        ("exact_match", {"ignore_case": True}, [0, 0, 1, 2]),
        ("choice", {}, [0, 0, 0, 1]),
        ("numeric", {}, [0, 0, 0, 1]),
        ("last_number", {}, [NONE, NONE, NONE, NONE]),
        ("judge", {}, [0, 0, 0, 1]),
    ],
)
def test_the_vote_has_the_equality_of_the_reward(reward: str, args: dict[str, Any], expected: list[int]) -> None:
    responses = ["Yes", "yes", "The answer is yes.", "No"]
    found = answer_classes(responses, ["yes"] * 4, [{}] * 4, reward=reward, args=args)
    assert [int(number) for number in found] == expected
