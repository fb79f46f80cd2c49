"""The page of answer forms has the tests' tables, and seconds of every one of the worst responses."""

from __future__ import annotations

import re

from docs.tooling import answer_page
from tests.workers.rewards.test_answers import HOSTILE, LONG

TEXT = answer_page.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_tables_of_the_tests() -> None:
    assert answer_page.written(TEXT, measured=False) == TEXT, "run `python -m docs.tooling.answer_page`"


def test_no_verdict_of_the_page_is_wrong_and_every_response_is_counted() -> None:
    tables = {"numeric": answer_page.numeric_forms(), "choice": answer_page.choice_forms()}
    for name, forms in tables.items():
        right, wrong = (sum(len(own[kind]) for own in forms.values()) for kind in ("right", "wrong"))
        assert f"| `{name}` | {right} | 0 | {wrong} | 0 |" in TEXT, "run `python -m docs.tooling.answer_page`"


def test_the_worst_responses_have_their_seconds_and_none_takes_a_second() -> None:
    (part,) = re.findall(r"<!-- seconds.*?<!-- end of seconds", TEXT, re.DOTALL)
    measured = [float(number) for number in re.findall(r" (\d+\.\d\d) (?=\|)", part)]
    assert len(measured) == 3 * len(HOSTILE | LONG) and max(measured) < 1
