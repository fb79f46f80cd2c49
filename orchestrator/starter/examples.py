"""Tries the columns that a first spec names on the first rows of examples, with the reader of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.data.bad_rows import BadRow, SkippedRow
from troupe.orchestrator.data.calls import CALLED
from troupe.orchestrator.data.examples import example_reader
from troupe.orchestrator.data.pools import collect
from troupe.orchestrator.data.preferences import doubts
from troupe.orchestrator.data.readers import named_values
from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.spec.offline import columns, data_format
from troupe.orchestrator.spec.sources import Examples, ExampleSource

_SHOWN = 12
_TOOLS = ("tools", "functions")


def tools_column(algorithm: str, section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str | None:
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


def what_is_read(algorithm: str, section: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What a section of the spec reads of the first rows, and what it leaves out, one line for each.

    Raises:
        UsageError: No row can be used, or a column does not say what it is read as.
    """
    source: ExampleSource = TypeAdapter[Examples](ExampleSource).validate_python(section)
    format_ = data_format(OFFLINE_ALGORITHMS[algorithm].formats, source)
    fields = columns(format_, source)
    raw = (named_values(fields, f"row {number}", row) for number, row in enumerate(rows, start=1))
    try:
        found = collect(raw, example_reader(source, format_, plain=False), "data.train", "skip")
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    left_out = [f"{count} {kind}" for kind, count in found.skipped.items()]
    left_out += [f"{found.bad_rows} bad rows (the first: {found.problems[0]})"] if found.bad_rows else []
    notes = [f"Of the first {len(rows)} rows are left out: {', '.join(left_out)}."] if left_out else []
    notes += [f"Warning: {doubt}." for doubt in doubts(source.chosen, source.rejected, rows) if "chosen" in fields]
    read = set(fields.values())
    unread = [name for name in rows[0] if not any(one == name or one.startswith(f"{name}.") for one in read)]
    if unread:
        more = ", ..." if len(unread) > _SHOWN else ""
        notes.append(f"Columns that the spec does not read: {', '.join(unread[:_SHOWN])}{more}.")
    return tuple(notes)
