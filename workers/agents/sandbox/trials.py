"""Tries test cases before a first run, with the programs of the data; runs in a child process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from troupe.workers.agents.sandbox.python_tests import has_tests, python_tests
from troupe.workers.rewards.trials import paid_wrong

_PROGRAMS, _REFERENCES, _CASES = 8, 3, 10
"""Rows whose programs are tried, programs of a row, and their test cases."""


def try_programs(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the column with test cases that most rows have, and what right and wrong programs earn; nothing without
    one.

    The request has `rows`, by column, the names of columns that may have `tests` and `programs`, and `prompts`. The
    answer has `column`, `usable` (places of the rows whose cases can be used), `earned` of `tried` rows with programs,
    and `paid`, a kind of wrong programs that earns 1, or "".
    """
    rows = list(zip(request["rows"], request["prompts"], strict=True))
    usable = {
        name: [place for place, (row, _) in enumerate(rows) if has_tests(row.get(name), row)]
        for name in request["tests"]
    }
    column = max(usable, key=lambda name: len(usable[name]), default="")
    if not usable.get(column):
        return
    tried = [rows[place] for place in usable[column][:_PROGRAMS]]

    def passes(program: str, number: int) -> bool:
        row, _ = tried[number]
        answer = str(row[column]) if column == "answer" else ""
        try:
            return python_tests(program, answer, row, tests=column, max_cases=_CASES) == 1.0
        except (ValueError, TimeoutError):
            return False

    right = [list(_references(row, request["programs"], prompt)) for row, prompt in tried]
    earned = sum(any(passes(program, number) for program in programs) for number, programs in enumerate(right))
    counts = {"usable": usable[column], "earned": earned, "tried": sum(map(bool, right))}
    yield {"column": column, "paid": paid_wrong(right, [prompt for _, prompt in tried], passes), **counts}


def _references(row: Mapping[str, Any], columns: Sequence[str], prompt: str) -> Iterator[str]:
    """The first reference programs of a row, also as the continuation of its prompt (HumanEval)."""
    for name in columns:
        value = row.get(name)
        with suppress(ValueError):  # a program is no JSON
            value = json.loads(value) if isinstance(value, str) else value
        programs = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]
        if programs:
            yield from chain.from_iterable((one, prompt + one) for one in programs[:_REFERENCES])
            return
