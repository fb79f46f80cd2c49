"""Finds the rows that a user names: what kind of source they are, their first rows and their held-out part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.data.readers import TableSource, file_format, read_table
from troupe.orchestrator.data.remote import local_files
from troupe.orchestrator.errors import DataError, UsageError
from troupe.orchestrator.spec.locations import is_name, is_pattern, is_url
from troupe.orchestrator.starter.choices import GYM

HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
"""Names of the part of the data that is held out, the usual one first."""

_ROWS = 1000
"""Rows that are looked at."""
_NO_SPLIT = f"the data have no split called {', '.join(HELD_OUT[:-1])} or {HELD_OUT[-1]}"
_FORMS = (
    "a .jsonl, .json, .csv, .tsv or .parquet file, a pattern of files, a URL of either in an object store (s3://...), "
    f"a folder of the `datasets` library, a name on the Hugging Face hub (org/name or org/name:subset), or {GYM}TASK"
)

Section = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Where rows are, and the first of them."""

    section: Section
    """The source as a section of the spec, without its columns."""
    rows: Sequence[Mapping[str, Any]]
    """The first rows by column; the fields of a struct are columns with dotted names."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Columns that the user names, by field."""


def find_tables(data: str) -> tuple[Table, Table | None, str]:
    """The rows to train on, the held-out rows, and why there are none, of a file, a pattern, a folder or a name on
    the hub. Raises UsageError if there are no data or rows; HubError."""
    path = Path(data)
    if path.is_dir():
        return _folder(data)
    if path.is_file() or is_pattern(data) or is_url(data):
        return _files(data)
    name, _, subset = data.partition(":")
    if is_name(name) and not file_format(data):
        return _on_hub(name, subset or None)
    raise UsageError(f"--data: no such file: {data} ({_FORMS})")


def _files(data: str) -> tuple[Table, Table | None, str]:
    try:
        files = [path for path in local_files(data) if path.is_file()]
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    if not files:
        raise UsageError(f"--data: no file matches {data}")
    kinds = {file_format(path.name) for path in files}
    if len(kinds) > 1:
        raise UsageError(f"--data: {data} matches files of several formats: {', '.join(sorted(kinds))}")
    (kind,) = kinds
    if not kind:
        raise UsageError(f"--data: {data}: no reader reads this format; expected {_FORMS}")
    held_out = next(_siblings(data), None)
    other = None if held_out is None else _table({"kind": kind, "path": held_out})
    missing = f"no file beside {files[0].name} is its held-out part, as test.csv beside train.csv"
    return _table({"kind": kind, "path": data}), other, missing


def _siblings(data: str) -> Iterator[str]:
    """The same path, or URL, with the name of a held-out part instead of `train`, if such files exist."""
    place, *options = data.split("?", 1) if is_url(data) else [data]
    parts = place.split("/")
    for word in HELD_OUT:
        for at in range(len(parts) - 1, max(len(parts) - 3, -1), -1):
            name = re.sub(r"(?<![a-z])train(?![a-z])", word, parts[at], count=1)
            found = "?".join(["/".join([*parts[:at], name, *parts[at + 1 :]]), *options])
            with suppress(DataError):
                if name != parts[at] and any(one.is_file() for one in local_files(found)):
                    yield found


def _folder(data: str) -> tuple[Table, Table | None, str]:
    """A folder of the `datasets` library, with one split or several."""
    splits = [path.name for path in Path(data).iterdir() if (path / "state.json").is_file()]
    if not splits and not (Path(data) / "state.json").is_file():
        raise UsageError(f"--data: {data} is no folder of the `datasets` library; expected {_FORMS}")
    held_out = next((word for word in HELD_OUT if word in splits), None)
    train = {} if not splits else {"split": "train" if "train" in splits else min(splits)}
    section = {"kind": "datasets", "path": data}
    other = None if held_out is None else _table(section | {"split": held_out})
    return _table(section | train), other, _NO_SPLIT


def _on_hub(name: str, subset: str | None) -> tuple[Table, Table | None, str]:
    """A dataset on the hub; downloads the first file of each split."""
    from troupe.orchestrator.hub.resolve import NoFiles, with_files
    from troupe.orchestrator.spec.sources import HubFiles

    section: Section = {"kind": "hub", "name": name} | ({"subset": subset} if subset else {})

    def part(split: str) -> Table:
        source = with_files(HubFiles(kind="hub", name=name, subset=subset, split=split), 1)
        return Table(section | {"split": split}, _rows(source, name))

    try:
        train = part("train")
    except NoFiles as error:
        hint = f"; write --data {name}:SUBSET" if error.field == "subset" else ""
        raise UsageError(f"--data: {error}{hint}") from None
    for split in HELD_OUT:
        with suppress(NoFiles):
            return train, part(split), ""
    return train, None, _NO_SPLIT


def _table(section: Section) -> Table:
    try:
        source = TypeAdapter[TableSource](TableSource).validate_python(section)
    except ValidationError as error:
        raise UsageError(f"--data: {error.errors()[0]['msg']}") from None
    return Table(section, _rows(source, str(section["path"])))


def _rows(source: TableSource, name: str) -> list[dict[str, Any]]:
    """The first rows of a source. Raises UsageError if one cannot be read, or there is none."""
    rows: list[dict[str, Any]] = []
    try:
        for row in islice(read_table(source, None, "data.train"), _ROWS):
            if row.error:
                raise UsageError(f"--data: {row.origin}: {row.error}")
            rows.append(dict(_flat(row.values)))
    except DataError as error:
        raise UsageError(f"--data: {error}") from None
    if not rows:
        raise UsageError(f"--data: {name} has no rows")
    return rows


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Columns and values, the fields of a struct under dotted names."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
