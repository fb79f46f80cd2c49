"""Tries the columns that a first spec names on the first rows, with the reader of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow
from troupe.orchestrator.data.calls import CALLED
from troupe.orchestrator.data.examples import as_examples, example_reader
from troupe.orchestrator.data.pools import Collected, collect
from troupe.orchestrator.data.preferences import doubts
from troupe.orchestrator.data.prompts import read_prompt
from troupe.orchestrator.data.readers import named_values, prompt_fields, prompt_row
from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.spec.offline import columns, data_format
from troupe.orchestrator.spec.sources import DataSource, Examples, ExampleSource

_TOOLS = ("tools", "functions")
_COMPARED = 200
"""Rows in which the columns with responses are compared."""

Rows = Sequence[Mapping[str, Any]]


def tools_column(algorithm: str, section: Mapping[str, Any], rows: Rows) -> str | None:
    """The column with the tools of rows that call some, or None if calls are text, and so are the tools (Hermes)."""
    filled = (name for name in _TOOLS if any(row.get(name) not in (None, "", "[]", []) for row in rows))
    if (name := next(filled, None)) is None:
        return None
    source: ExampleSource = TypeAdapter[Examples](ExampleSource).validate_python({**section, "tools": name})
    format_ = data_format(OFFLINE_ALGORITHMS[algorithm].formats, source)
    read, fields = example_reader(source, format_, plain=False), columns(format_, source)
    for row in rows:
        with suppress(BadRow, SkippedRow, KeyError):
            if any(CALLED in response for response in read(named_values(fields, "", row))["responses"]):
                return name
    return None


def what_is_read(algorithm: str, section: Mapping[str, Any], rows: Rows) -> tuple[str, ...]:
    """What a section of the spec reads of the first rows, and what it leaves out, one line for each. Raises UsageError
    if no row can be used, or a column does not say what it is read as."""
    try:
        fields, found = _collected(algorithm, section, rows)
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    left_out = [f"{count} {kind}" for kind, count in found.skipped.items()]
    left_out += [f"{found.bad_rows} bad rows (the first: {found.problems[0]})"] if found.bad_rows else []
    notes = [f"Of the first {len(rows)} rows are left out: {', '.join(left_out)}."] if left_out else []
    if "chosen" in fields:
        notes += [f"Warning: {doubt}." for doubt in doubts(fields["chosen"], fields["rejected"], rows)]
    read = fields.values()
    unread = [name for name in rows[0] if name and not any(one == name or one.startswith(f"{name}.") for one in read)]
    return (*notes, *([f"Columns that the spec does not read: {', '.join(unread)}."] if unread else []))


def trained_characters(algorithm: str, section: Mapping[str, Any], rows: Rows) -> int:
    """The length of what the first rows would train, 0 if none can be used."""
    try:
        _, found = _collected(algorithm, section, rows[:_COMPARED])
    except DataError:
        return 0
    return sum(len(text) for row in found.rows for text in row["responses"])


def _collected(
    algorithm: str, section: Mapping[str, Any], rows: Rows
) -> tuple[Mapping[str, str], Collected[dict[str, Any]]]:
    """Column of each field that the section reads, and what a run reads of the rows. Raises DataError."""
    if algorithm in OFFLINE_ALGORITHMS:
        examples: ExampleSource = TypeAdapter[Examples](ExampleSource).validate_python(section)
        format_ = data_format(OFFLINE_ALGORITHMS[algorithm].formats, examples)
        fields, read = columns(format_, examples), example_reader(examples, format_, plain=False)
        join = partial(as_examples, examples)
    else:
        prompts: Any = TypeAdapter[DataSource](DataSource).validate_python(section)
        fields, join = prompt_fields(prompts), iter
        read = lambda raw: {"prompt": read_prompt(prompt_row(prompts, raw), prompts, plain=False)}  # noqa: E731
    raw = (named_values(fields, f"row {number}", row) for number, row in enumerate(rows, start=1))
    return fields, collect(join(raw), read, "data.train", "skip")
