"""Chooses the reward function of a first spec: one that right answers or programs earn, and wrong ones do not."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any

from troupe.orchestrator.data.readers import json_safe
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.starter.choices import Earned
from troupe.orchestrator.starter.tables import Table
from troupe.workers.isolation.probe import ProbeFailed, ask

_REWARDS = "troupe.workers.rewards.trials:count_earned"
_PROGRAMS_TRIAL = "troupe.workers.agents.sandbox.trials:try_programs"
_MATHS = ("last_number", "numeric")
_TEXTS = ("choice", "exact_match")
_OF_MATHS = re.compile(r"\d|\\[A-Za-z]")
"""A number or a LaTeX command; `numeric` takes any word for a symbol."""
_STATED = re.compile(r"####|\\(?:boxed|fbox)\b")
"""Ends a solution whose end is the answer."""
_PROGRAM = re.compile(r"^\s*\{\s*\"|\bdef \w|\blambda\b[^:\n]*:|\bprint\(|#include|:=")
"""A program, a formal proof, or an object as JSON."""
_LONGEST, _LONGEST_LATEX = 100, 200
_PLACEHOLDER = re.compile(r"proof|not\s?found|n/?a|none|null|nan|unknown|[-?.]*", re.IGNORECASE)
_LOOKS_TESTED = re.compile(r"\bassert\b|[\"']inputs?[\"']\s*:")
_CALLED = re.compile(r"(?:from solution import |\bassert (?:not )?(?=\w+\()|\"(?:fn|func)_name\": \")(\w+)")
_NOT_CALLED = frozenset({"candidate", *dir(builtins)})
_TESTED = re.compile("test|assert|input_output|verification|ground_truth|answer", re.IGNORECASE)
"""Names of columns that may have test cases."""
_BESIDE_TESTS = ("entry_point", "test_setup_code", "test_imports", "metadata")
_PROGRAMS = ("solutions", "solution", "canonical_solution", "code", "reference_solution", "gold_standard_solution")
_OPTIONS = ("choices", "options", "choices.text", "endings")
_WRONG_OPTION = "Incorrect Answer "
"""Begins the names of columns in GPQA."""
_ANSWERS, _TESTS = 200, 60
_ENOUGH, _TOLERABLE = 0.95, 0.8
_TIMEOUT_S = 120.0
_REMEDY = "name a column with short final answers or with tests, or write the spec with `judge` or a function of yours"

Row = Mapping[str, Any]
Fitting = tuple[dict[str, Any], Earned, str]
"""Columns, the function, and what to know of them."""


def fitting_reward(table: Table, prompt: str, columns: Sequence[str]) -> Fitting:
    """The first of the columns with comparable answers, and the function for them. Raises UsageError."""
    if others := [name for name in table.rows[0] if name.startswith(_WRONG_OPTION)]:
        return _with_options("Correct Answer", ["Correct Answer", *others], "")
    found = {column: list(_answers(table, column)) for column in columns}
    if not any(found.values()):
        raise UsageError("--data: the column with the answer is empty")
    other = {name: [right[0] for _, right in rows if not _is_compared(right[0])] for name, rows in found.items()}
    column = next((name for name, rows in found.items() if rows and len(other[name]) <= (1 - _ENOUGH) * len(rows)), "")
    if not column:
        name, (text, *_) = next((name, texts) for name, texts in other.items() if texts)
        raise UsageError(
            f"--data: {name} has programs or long texts, which no response repeats ({text[:60]!r}); {_REMEDY}"
        )
    given = [(row, right) for row, right in found[column] if not _PLACEHOLDER.fullmatch(right[0])]
    missing = len(table.rows) - len(given)
    note = f"{column} has no answer in {missing} of {len(table.rows)} rows (empty, proof, none, ...)" if missing else ""
    if len(given) < _ENOUGH * len(table.rows):
        raise UsageError(f"--data: {note}: leave such rows out")
    note = note and f"{note}."
    if named := _named_options(given, prompt):
        return _with_options(column, named, note)
    given = given[:_ANSWERS]
    maths = sum(bool(_OF_MATHS.search(right[0])) for _, right in given) / len(given)
    request = {
        "functions": _MATHS if maths >= _ENOUGH else _MATHS[1:] if maths > 0.5 else _TEXTS,
        "answers": [right for _, right in given],
        "prompts": [last_text(row.get(prompt)) for row, _ in given],
        "enough": _ENOUGH,
    }
    tried = [(Earned(name, earned, len(given)), paid) for name, earned, paid in _ask(_REWARDS, request)]
    safe = [one for one, paid in tried if not paid]
    best = next((one for one in safe if one.share >= _ENOUGH), max(safe, key=lambda one: one.earned, default=None))
    if best is None or best.share < _TOLERABLE:
        said = (f"{one.note}{f', and so does {paid}' if paid else ''}" for one, paid in tried)
        raise UsageError(f"--data: no reward function fits the answers in {column} ({'; '.join(said)}); {_REMEDY}")
    return {} if column == "answer" else {"answer": column}, best, note


def _with_options(answer: str, options: str | list[str], note: str) -> Fitting:
    """The columns of questions with options, whose answers are letters."""
    template = "{prompt}\n\nPut the letter of the right option in \\boxed{}."
    own = {} if answer == "answer" else {"answer": answer}
    return {**own, "options": options, "template": template}, Earned("choice"), note


def _answers(table: Table, column: str) -> Iterator[tuple[Row, list[str]]]:
    """The rows with an answer, and their right answers as texts; NaN is a missing one."""
    for row in table.rows:
        value = row.get(column)
        if value not in (None, "", []) and value == value:
            yield row, [str(one) for one in (value if isinstance(value, list) else [value])]


def _is_compared(text: str) -> bool:
    """Whether a response can have the answer, too: it is short, or its end is."""
    text = text.strip()
    short = len(text) <= _LONGEST_LATEX if "\\" in text else len(text) <= _LONGEST and "\n" not in text
    return bool(_STATED.search(text)) or (short and not _PROGRAM.search(text))


def _named_options(given: Sequence[tuple[Row, list[str]]], prompt: str) -> str:
    """The column with options that answers name by number or letter and that prompts do not have; empty without one."""
    for name in _OPTIONS:
        rows = [(row, list(map(str, row[name])), right[0]) for row, right in given if isinstance(row.get(name), list)]
        by_number = all(right.isdecimal() and int(right) < len(options) for _, options, right in rows)
        asked = all(option in last_text(row.get(prompt)) for row, options, _ in rows for option in options)
        if rows and not asked and (by_number or not any(right in options for _, options, right in rows)):
            return name
    return ""


def fitting_tests(table: Table, prompt: str) -> Fitting | None:
    """The columns that `python_tests` reads, and the function with what the data's programs earn; None without
    tests. Raises UsageError if cases cannot be used, programs do not earn 1, or wrong ones do."""
    rows = table.rows[:_TESTS]
    columns = [name for name in rows[0] if name != prompt and _TESTED.search(name)]
    columns = [name for name in columns if any(_LOOKS_TESTED.search(str(row.get(name))) for row in rows)]
    columns = [name for name in columns if name != "answer" or isinstance(rows[0][name], str)]  # or it has several
    if not columns:
        return None
    beside = [name for name in _BESIDE_TESTS if name in rows[0]]
    named = [name for name in (*columns, *beside, *_PROGRAMS) if name in rows[0]]
    given = [{name: json_safe(row.get(name)) for name in named} for row in rows]
    prompts = [last_text(row.get(prompt)) for row in rows]
    request = {"rows": given, "prompts": prompts, "tests": columns, "programs": _PROGRAMS}
    found = next(iter(_ask(_PROGRAMS_TRIAL, request)), None)
    if found is None:
        return None
    column, usable = found["column"], len(found["usable"])
    where = _told_apart(rows, found["usable"]) if usable < len(rows) else ""
    if usable < _TOLERABLE * len(rows) and not where:
        why = f"the test cases in {column} can be used for {usable} of the first {len(rows)} rows"
        why = f"{why}: keep such rows only, and other kinds of tasks in other files"
        raise UsageError(f"--data: {why}")
    earned = Earned("python_tests", found["earned"], found["tried"], {"tests": column})
    if found["paid"] or earned.share < 0.5:
        paid = f"{found['paid']} earns 1" if found["paid"] else earned.note
        raise UsageError(f"--data: the test cases in {column} do not tell right from wrong programs: {paid}")
    notes = [] if usable == len(rows) else [f"The test cases of {usable} of the first {len(rows)} rows can be used."]
    notes += [f"The others are left out: where {where}."] if where else []
    usable_rows = [(rows[place], prompts[place]) for place in found["usable"]]
    tests = ((f"{row[column]} {row.get('metadata', '')}", text) for row, text in usable_rows)
    calls = [(name, text) for cases, text in tests for name in _CALLED.findall(cases)[:1]]
    if unnamed := [name for name, text in calls if name not in text and name not in _NOT_CALLED]:
        notes.append(
            f"Warning: {len(unnamed)} prompts do not name the function that is tested ({unnamed[0]}): add it to them."
        )
    notes += [] if found["tried"] else ["The data have no reference program: no right program was tried."]
    place = {"metadata": beside} if column == "answer" else {"answer": None, "metadata": [column, *beside]}
    return place | ({"where": where} if where else {}), earned, " ".join(notes)


def _told_apart(rows: Sequence[Row], chosen: Sequence[int]) -> str:
    """A condition that these rows meet, and no other: one value of a column, the first that has one; else empty."""
    kept = set(chosen)
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        own = {value for place, value in enumerate(values) if place in kept and isinstance(value, str)}
        others = [value for place, value in enumerate(values) if place not in kept]
        if len(own) == 1 and not own.intersection(map(str, others)) and name.isidentifier() and not iskeyword(name):
            return f"{name} == {json.dumps(own.pop(), ensure_ascii=False)}"
    return ""


_ASKED = {
    "numeric": ("boxed", "{prompt}\n\nPut the final answer in \\boxed{}."),
    "python_tests": ("python", "{prompt}\n\nAnswer with a Python program in a ```python block."),
}


def asking(reward: Earned, prompts: Sequence[Any]) -> dict[str, str]:
    """The template that asks for the form that the reward reads, unless most prompts do."""
    if reward.function not in _ASKED:
        return {}
    word, template = _ASKED[reward.function]
    return {} if sum(word in str(one).lower() for one in prompts) > len(prompts) / 2 else {"template": template}


def last_text(prompt: Any) -> str:
    """The text of a prompt, or of its last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return str(last.get("content", last.get("value", "")) if isinstance(last, Mapping) else last)


def _ask(entry: str, request: Mapping[str, Any]) -> list[Any]:
    try:
        return ask(entry, request, _TIMEOUT_S)
    except ProbeFailed as error:
        raise UsageError(f"--data: the answers cannot be tried: {error}") from None
