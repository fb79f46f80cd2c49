"""Selects samples of a run by SQL.

DuckDB evaluates the SQL over the files of the run. It has access to no other file, loads no extension, and its
settings cannot be changed by a condition.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from troupe.orchestrator.errors import DataError, UsageError, nearest
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.samples import SAMPLES

_LONGEST = 2000
"""Characters of a condition."""
_TIES = ("step", "prompt_uid", "sample_index", "segment")
"""The order of samples whose sort columns are equal."""
_UNREADABLE = "reading the Arrow source failed: "
"""Beginning of DuckDB's error if a file cannot be read; any other error is about a condition."""
_HINTS = (
    (r"\bNone\b", "SQL tests for a missing value by IS NULL or IS NOT NULL"),
    (r"\bcontains\b(?!\s*\()", "SQL searches text by response LIKE '%text%'"),
    (r'"', "SQL writes text in single quotes, as in status = 'ok'"),
)
"""Patterns of conditions that are not SQL, and their SQL forms."""


@dataclass(frozen=True)
class SampleQuery:
    """Which samples."""

    step: int | None = None
    group: str | None = None
    """Number of a group of the step, from 0, or its prompt_uid."""
    where: str | None = None
    """An SQL expression over the columns of SAMPLES."""
    sort: str | None = None
    """Columns, separated by commas; descending with a leading `-`, or None for the order written."""
    limit: int | None = None


def select_samples(run: RunFolder, query: SampleQuery, columns: Sequence[str]) -> pa.Table:
    """At most `query.limit` samples that the query selects; reads only needed columns and files. Raises UsageError
    if there are none or the query is invalid; DataError if a file cannot be read."""
    with _connect() as connection, _explained(run):
        return _ordered(connection, run, query).project(", ".join(map(_quoted, columns))).to_arrow_table()


def count_samples(run: RunFolder, query: SampleQuery) -> int:
    """Number of samples that the query selects, without its limit. Raises as `select_samples`."""
    with _connect() as connection, _explained(run):
        return _matching(connection, run, query, _files(run, query.step)).count("*").fetchall()[0][0]


def open_samples(files: dict[int, Path]) -> ds.Dataset:
    """The files of these steps as a dataset with the columns of SAMPLES; what a file lacks is null. A file's name
    contains its step, so that files of other steps are not opened."""
    parquet, local = ds.ParquetFileFormat(), LocalFileSystem()
    step = SAMPLES.field("step").type
    # Nulls are possible in files of earlier versions, whatever the current schema.
    schema = pa.schema([field.with_nullable(True) for field in SAMPLES])
    fragments = [
        parquet.make_fragment(str(path), local, partition_expression=pc.field("step") == pa.scalar(number, step))
        for number, path in files.items()
    ]
    return ds.FileSystemDataset(fragments, schema, parquet, local)


def split_columns(text: str) -> list[str]:
    """Names of columns, separated by commas. Raises UsageError for one that does not exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        _require_column(name, "--columns")
    if not names:
        raise UsageError("--columns: name at least one column")
    return list(dict.fromkeys(names))


@contextmanager
def _connect() -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory that can open no file."""
    off = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    with duckdb.connect(":memory:", config={**off, "python_enable_replacements": False}) as connection:
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def _files(run: RunFolder, step: int | None) -> dict[int, Path]:
    files = run.sample_files()
    if step is not None and step not in files:
        numbers = list(files)
        known = f": there are those of {numbers[0]} to {numbers[-1]}" if numbers else ""
        raise UsageError(f"--step: there are no samples of step {step}{known}")
    if not files:
        raise UsageError(f"{run.path} has no samples: the run has none yet, or output.trajectories is false")
    return files if step is None else {step: files[step]}


def _matching(
    connection: duckdb.DuckDBPyConnection, run: RunFolder, query: SampleQuery, files: dict[int, Path]
) -> duckdb.DuckDBPyRelation:
    samples = connection.from_arrow(open_samples(files))
    if query.group is not None:
        samples = samples.filter(f"prompt_uid = {_literal(_group_uid(run, query.step, query.group))}")
    if query.where is None:
        return samples
    if len(query.where) > _LONGEST:
        raise UsageError(f"--where: the condition is longer than {_LONGEST} characters")
    try:
        return samples.filter(query.where)
    except (duckdb.Error, UnicodeError) as error:
        raise _refusal(error, query.where) from None


def _ordered(connection: duckdb.DuckDBPyConnection, run: RunFolder, query: SampleQuery) -> duckdb.DuckDBPyRelation:
    """The samples that the query selects, with all columns."""
    files, order = _files(run, query.step), _order(query.sort)
    samples = _matching(connection, run, query, files)
    if order and query.limit is not None:
        # The order on the keys alone first: then only files with a row of the result are read in full.
        steps = samples.order(order).limit(query.limit).project("step").fetchall()
        samples = _matching(connection, run, query, {step: files[step] for step in sorted({row[0] for row in steps})})
    samples = samples.order(order) if order else samples
    return samples if query.limit is None else samples.limit(query.limit)


def _group_uid(run: RunFolder, step: int | None, group: str) -> str:
    """The prompt_uid of a group, which is given by its number in the step, or as it is."""
    if not group.isdecimal():
        return group
    if step is None:
        raise UsageError("--group: a number counts the groups of one step: name it with --step")
    uids = run.samples(step, ["prompt_uid"])["prompt_uid"].unique().to_pylist()
    if int(group) >= len(uids):
        raise UsageError(f"--group: step {step} has groups 0 to {len(uids) - 1}")
    return str(uids[int(group)])


def _order(text: str | None) -> str:
    """The terms of ORDER BY; empty if no column is named."""
    terms: list[str] = []
    for part in (text or "").split(","):
        name = part.strip().removeprefix("-").strip()
        if name:
            _require_column(name, "--sort")
            if pa.types.is_nested(SAMPLES.field(name).type):
                raise UsageError(f"--sort: {name} is a list for each sample, which has no order")
            terms.append(f"{_quoted(name)} {'DESC' if part.strip().startswith('-') else 'ASC'} NULLS LAST")
    return ", ".join([*terms, *_TIES] if terms else [])


def _require_column(name: str, option: str) -> None:
    if name not in SAMPLES.names:
        raise UsageError(f"{option}: {_unknown(name, SAMPLES.names)}")


def _unknown(name: str, names: Iterable[str]) -> str:
    hint = nearest(name, names)
    return f"there is no column {name!r}{hint and f': {hint}'}"


def _quoted(name: str) -> str:
    return f'"{name}"'


def _literal(value: object) -> str:
    text = str(value).replace("'", "''")
    return f"'{text}'"


@contextmanager
def _explained(run: RunFolder) -> Iterator[None]:
    """Raises UsageError or DataError instead of an error of DuckDB or Arrow."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        problem = _first_line(error)
        if isinstance(error, duckdb.Error) and not problem.startswith(_UNREADABLE):
            raise _refusal(error, "") from None
        raise DataError(f"{run.path}: the samples cannot be read: {problem.removeprefix(_UNREADABLE)}") from error


def _refusal(error: Exception, condition: str) -> UsageError:
    problem = _first_line(error)
    if unknown := re.match('Referenced column "(.*)" not found', problem):
        problem = _unknown(unknown[1], SAMPLES.names)
    hints = (hint for pattern, hint in _HINTS if re.search(pattern, condition))
    return UsageError("; ".join([f"--where: {problem}", *list(hints)[:1]]))


def _first_line(error: Exception) -> str:
    """DuckDB's message, without the kind of the error and the line of the query."""
    return re.sub(r"^[\w ]+ Error: ", "", str(error).strip().partition("\n")[0])
