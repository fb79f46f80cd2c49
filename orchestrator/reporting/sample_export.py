"""Writes samples to a file of another format."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

_BATCH = 1024
"""Rows that are turned into Python objects at once."""


class Format(StrEnum):
    """Formats of an export."""

    jsonl = "jsonl"
    parquet = "parquet"
    csv = "csv"


def export_samples(table: pa.Table, form: Format, path: Path) -> None:
    """Writes the table, atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _WRITERS[form](table, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_jsonl(table: pa.Table, path: Path) -> None:
    """An object a line; nan and infinity become null, because JSON has neither."""
    with path.open("w", encoding="utf-8") as file:
        for batch in table.to_batches(max_chunksize=_BATCH):
            for row in batch.to_pylist():
                file.write(_json(row) + "\n")


def _write_parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def _write_csv(table: pa.Table, path: Path) -> None:
    """Columns with lists are JSON."""
    columns = [
        pa.array([None if value is None else _json(value) for value in column.to_pylist()], pa.string())
        if pa.types.is_nested(column.type)
        else column
        for column in table.columns
    ]
    csv.write_csv(pa.Table.from_arrays(columns, names=table.column_names), path)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value


_WRITERS: Mapping[Format, Callable[[pa.Table, Path], None]] = {
    Format.jsonl: _write_jsonl,
    Format.parquet: _write_parquet,
    Format.csv: _write_csv,
}
