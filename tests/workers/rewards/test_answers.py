"""What responses state as their answer, in tables of right and wrong ones; and the work that the worst of them take."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from troupe.workers.rewards import mathematics
from troupe.workers.rewards.functions import choice, exact_match
from troupe.workers.rewards.mathematics import TooCostly, bounded_work, parse_expression
from troupe.workers.rewards.numeric import numeric
from troupe.workers.rewards.statements import stated, stated_words


def rows(name: str, kind: str) -> list[Any]:
    """Pairs of a response and an answer, the `right` or the `wrong` ones of a table."""
    table = json.loads(Path(__file__).with_name(name).read_text("utf-8"))
    found = [(response, row["answer"]) for row in table for response in row[kind]]
    assert len(set(found)) == len(found)
    return [pytest.param(*one, id=f"{one[1]!r}-{one[0]!r}") for one in found]


def test_the_tables_have_hundreds_of_right_and_of_wrong_responses() -> None:
    assert len(rows("answers.json", "right")) >= 220
    assert len(rows("answers.json", "wrong")) >= 220
    assert len(rows("choices.json", "right")) + len(rows("choices.json", "wrong")) >= 80


@pytest.mark.parametrize(("response", "answer"), rows("answers.json", "right"))
def test_numeric_pays_for_a_right_answer_in_every_form(response: str, answer: str) -> None:
    assert numeric(response, answer, {}) == 1


@pytest.mark.parametrize(("response", "answer"), rows("answers.json", "wrong"))
def test_numeric_pays_for_no_wrong_answer(response: str, answer: str) -> None:
    assert numeric(response, answer, {}) == 0


@pytest.mark.parametrize(("response", "answer"), rows("choices.json", "right"))
def test_a_choice_is_read_in_every_form(response: str, answer: str) -> None:
    assert choice(response, answer, {}) == 1


@pytest.mark.parametrize(("response", "answer"), rows("choices.json", "wrong"))
def test_another_choice_earns_nothing(response: str, answer: str) -> None:
    assert choice(response, answer, {}) == 0


@pytest.mark.parametrize(
    ("response", "reward"), [("<think>No</think> Yes", 1), ("<answer>Yes</answer>", 1), ("Yes", 1), ("<think>Yes", 0)]
)
def test_exact_match_compares_what_stands_behind_the_thought(response: str, reward: float) -> None:
    assert exact_match(response, "Yes", {}) == reward
    assert exact_match("so Yes", "Yes", {}, opens_thought=True) == 0


HOSTILE = {
    "tower": "9^{9^{9^9}}",
    "factorial": "1000000!",
    "factorials": "7!!!!!!!!!!",
    "sum": r"\sum_{k=1}^{10^9}\frac{1}{k}",
    "product": r"\prod_{k=1}^{10^6} k",
    "integral": r"\int_0^1 \sin(x^2)e^{x^3}\ln(x+1) dx",
    "binomial": r"\binom{1000000}{500000}",
    "gamma": r"\Gamma(1000000)",
    "floor": r"\lfloor 10^{4000}\pi \rfloor",
    "braces": "{" * 500 + "7" + "}" * 500,
    "brackets": "(" * 500 + "7" + ")" * 500,
    "powers": "x^" * 150 + "x",
    "indices": "a_{" * 25 + "2" + "}" * 25,
    "bars": "|" * 30 + "x" + "|" * 30,
    "fractions": r"\frac{" * 4000,
    "letters": "x" * 10_000,
    "nested fractions": r"\frac{1}{1+" * 12 + "1" + "}" * 12,
    "more nested fractions": r"\frac{1}{1+" * 40 + "1" + "}" * 40,
    "roots": r"\sqrt{2+" * 100 + "2" + "}" * 100,
    "matrix": r"\begin{pmatrix}" + r"\\".join(["&".join("1" * 200)] * 200) + r"\end{pmatrix}",
    "set": r"\{" + ",".join(map(str, range(100_000))) + r"\}",
    "set that is parsed": r"\{" + ",".join(map(str, range(90))) + r"\}",
    "intervals": r"\cup".join(f"({n},{n + 1})" for n in range(2000)),
    "exponent": "2^{1000000000}",
    "exponents": "10^{10^{10}}",
    "large product": r"\prod_{k=1}^{10^8} k",
    "double factorial": "100000!!",
    "logarithm": r"\log(10^{10^{10}})",
    "sine": r"\sin(10^{50})",
    "tangents": r"\tan(\tan(\tan(\tan(10^{40}))))",
    "residue": r"7^{10^9} \bmod 13",
    "limit": r"\lim_{x\to 0}\frac{\sin x}{x^{50}}",
    "polynomial": "(x+1)^{1000}",
    "variables": "+".join(f"x_{{{n}}}" for n in range(40)),
    "radicals": r"\sqrt{2}+\sqrt{3}+\sqrt{5}+\sqrt{7}+\sqrt{11}+\sqrt{13}",
    "equation": "x^{100}+x^{99}=x^{98}",
    "complex power": "(1+i)^{10000}",
    "signs": r"\pm" * 60 + "1",
}
_PARTS = [
    *("ab ", "3", "²", "-", "(", "\n", "\\", "$3", "1,", "(1,", "1/", "1:", "1e", "x^", "3!", "*a", "1 and ", "1 1/2 "),
    *(r"0.\overline{3}", r"\text{a}", r"\boxed{3", "<think>", "<answer>", "the answer is ", "#### 3\n", "答案是3"),
    *(r"\begin{matrix}", "A. a\n", "not 3 but "),
]
LONG = {part: part * (1_000_000 // len(part)) for part in _PARTS} | {"1 2 3": " ".join(map(str, range(16_000)))}
"""Responses of a million characters, of one part each; and 16,000 counted numbers."""


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_answer_that_is_costly_to_judge_is_wrong(text: str) -> None:
    assert numeric(f"\\boxed{{{text}}}", "11", {}) == 0
    assert numeric(f"The answer is {text}.", "x^2-1", {}) == 0


@pytest.mark.parametrize("text", LONG.values(), ids=map(repr, LONG))
def test_a_response_of_a_million_characters_is_read_in_proportional_time(text: str) -> None:
    """It would take minutes otherwise."""
    assert numeric(text, "11/13", {}) == 0
    assert choice(text, "B", {}) == 0


@pytest.mark.parametrize(("at", "reward"), [(40_000, 1), (60_000, 0)])
def test_a_long_response_is_read_at_its_end(at: int, reward: float) -> None:
    assert numeric("The answer is 11/13. " + "ab " * (at // 3), "11/13", {}) == reward


@pytest.mark.parametrize("kind", ["tower", "factorial", "binomial", "braces", "brackets", "powers", "bars", "letters"])
def test_what_takes_exponential_time_is_refused_before_it_is_computed(kind: str) -> None:
    with pytest.raises(TooCostly):
        parse_expression(HOSTILE[kind])


def test_a_right_answer_that_is_costly_to_judge_fails_the_sample() -> None:
    with pytest.raises(ValueError, match="takes too much work"):
        numeric("7", "9^{9^{9^9}}", {})


def test_work_is_bounded_and_the_profiler_before_it_is_kept() -> None:
    before = sys.getprofile()
    with pytest.raises(TooCostly), bounded_work(100):
        for _ in range(200):
            consume(iter(()))
    assert sys.getprofile() is before


def test_a_comparison_gives_up_after_a_bound_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    right, said = parse_expression("x^2-1"), parse_expression("(x-1)(x+1)")
    monkeypatch.setattr(mathematics.bounded_work.__wrapped__, "__defaults__", (50,))  # pyright: ignore
    with pytest.raises(TooCostly):
        mathematics.same_expression(right, said)


def calls(text: str) -> int:
    """Calls, of C functions too, that reading a text takes."""
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        consume(stated(text, False))
        stated_words(text)
    finally:
        sys.setprofile(None)
    return count


def consume(found: Iterator[str]) -> None:
    for _ in found:
        pass


@pytest.mark.parametrize(
    "part", ["1 ", "1, ", "1 + ", "(", "(1 ", "$ a ", "$1$ ", "answer is 1 ", "1:", r"\frac{", "*a "]
)
def test_reading_takes_work_in_proportion_to_the_length_of_a_response(part: str) -> None:
    assert calls(part * 2000) <= 2.2 * calls(part * 1000) + 200
