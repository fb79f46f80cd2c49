"""Writes samples to a file of another format."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

_BATCH = 1024
"""Rows that are written at once."""

Write = Callable[[pa.Table], object]
"""Writes a part of the samples."""


class Format(StrEnum):
    """Formats of an export."""

    jsonl = "jsonl"
    parquet = "parquet"
    csv = "csv"


def export_samples(samples: pa.RecordBatchReader, form: Format, path: Path) -> int:
    """Writes the samples, atomically and a part at a time. Raises OSError, and what reading the samples raises.

    Returns:
        The number of rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    rows = 0
    try:
        with _WRITERS[form](unfinished, samples.schema) as write:
            for part in _parts(samples):
                write(part)
                rows += part.num_rows
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return rows


def _parts(samples: pa.RecordBatchReader) -> Iterator[pa.Table]:
    """Tables of `_BATCH` rows and up to one batch more: a batch may have few rows."""
    waiting: list[pa.RecordBatch] = []
    for batch in samples:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= _BATCH:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


@contextmanager
def _jsonl(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """An object a line; nan and infinity become null, because JSON has neither."""
    with path.open("w", encoding="utf-8") as file:
        yield lambda part: file.writelines(_json(row) + "\n" for row in part.to_pylist())


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield writer.write_table


@contextmanager
def _csv(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """Columns with lists are JSON."""
    flat = pa.schema([field.with_type(pa.string()) if pa.types.is_nested(field.type) else field for field in schema])

    def flattened(part: pa.Table) -> pa.Table:
        columns = [
            pa.array([None if value is None else _json(value) for value in column.to_pylist()], pa.string())
            if pa.types.is_nested(column.type)
            else column
            for column in part.columns
        ]
        return pa.Table.from_arrays(columns, schema=flat)

    with csv.CSVWriter(path, flat) as writer:
        yield lambda part: writer.write_table(flattened(part))


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


_WRITERS: Mapping[Format, Callable[[Path, pa.Schema], AbstractContextManager[Write]]] = {
    Format.jsonl: _jsonl,
    Format.parquet: _parquet,
    Format.csv: _csv,
}
