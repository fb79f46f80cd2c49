"""Selects samples of a run: which rows, in which order, which columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from troupe.orchestrator.errors import DataError, UsageError, nearest
from troupe.orchestrator.reporting.run_folder import RunFolder
from troupe.orchestrator.reporting.sample_filter import parse_filter
from troupe.workers.contract.samples import SAMPLES

_BATCH = 1024
"""Most rows of a batch."""


@dataclass(frozen=True)
class SampleQuery:
    """Which samples."""

    step: int | None = None
    group: str | None = None
    """Number of a group of the step, from 0, or its prompt_uid."""
    where: str | None = None
    """A condition (`sample_filter`)."""
    sort: str | None = None
    """Columns, separated by commas; descending with a leading `-`. None: as they were written."""
    limit: int | None = None


def select_samples(run: RunFolder, query: SampleQuery, columns: Sequence[str]) -> pa.Table:
    """These columns of the samples that the query selects, at most `query.limit` of them.

    Only the columns that are needed are read, and only files that may hold a row of the result.

    Raises:
        UsageError: The run has no samples, or the query is not valid.
        DataError: A file cannot be read.
    """
    data, rule = open_samples(run), _filter(run, query)
    keys = _sort_keys(query.sort)
    try:
        if not keys:
            scanner = data.scanner(columns=list(columns), filter=rule)
            return scanner.to_table() if query.limit is None else scanner.head(query.limit)
        if query.limit is not None:
            # The order on the keys alone first: then only files with a row of the result are read in full.
            first = _sorted(data, rule, ["step", *(name for name, _ in keys)], keys).slice(0, query.limit)
            steps = pc.field("step").isin(first["step"].unique())
            rule = steps if rule is None else rule & steps
        return _sorted(data, rule, [*columns, *(name for name, _ in keys)], keys).slice(0, query.limit).select(columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{run.path}: the samples cannot be read: {error}") from error


def stream_samples(run: RunFolder, query: SampleQuery, columns: Sequence[str]) -> pa.RecordBatchReader:
    """As `select_samples`, but batch by batch: a whole store need not fit into memory, unless it is to be sorted.

    A file that cannot be read raises DataError when its batch is due.
    """
    if query.sort or query.limit is not None:
        return select_samples(run, query, columns).to_reader()
    # Few files ahead: their rows hold lists of tokens, and writing is slower than reading.
    scanner = open_samples(run).scanner(
        columns=list(columns), filter=_filter(run, query), batch_size=_BATCH, batch_readahead=2, fragment_readahead=1
    )

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from scanner.to_batches()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{run.path}: the samples cannot be read: {error}") from error

    return pa.RecordBatchReader.from_batches(scanner.projected_schema, batches())


def _sorted(
    data: ds.Dataset, rule: pc.Expression | None, columns: Sequence[str], keys: Sequence[tuple[str, str]]
) -> pa.Table:
    return data.to_table(columns=list(dict.fromkeys(columns)), filter=rule).sort_by(list(keys))


def count_samples(run: RunFolder, query: SampleQuery) -> int:
    """Number of samples that the query selects, without its limit. Raises as `select_samples`."""
    try:
        return open_samples(run).count_rows(filter=_filter(run, query))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{run.path}: the samples cannot be read: {error}") from error


def open_samples(run: RunFolder) -> ds.Dataset:
    """All samples of a run as a dataset with the columns of SAMPLES; what a file lacks is null.

    A file's name says its step, so that files of other steps are not opened. Raises UsageError if there is no sample.
    """
    files = run.sample_files()
    if not files:
        raise UsageError(f"{run.path} has no samples: the run has none yet, or output.trajectories is false")
    parquet, local = ds.ParquetFileFormat(), LocalFileSystem()
    step = SAMPLES.field("step").type
    # Nulls are possible in files of earlier versions, whatever the schema of today says.
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


def _filter(run: RunFolder, query: SampleQuery) -> pc.Expression | None:
    parts: list[pc.Expression] = []
    if query.step is not None:
        if query.step not in (files := run.sample_files()):
            numbers = list(files)
            known = f": there are those of {numbers[0]} to {numbers[-1]}" if numbers else ""
            raise UsageError(f"--step: there are no samples of step {query.step}{known}")
        parts.append(pc.field("step") == pa.scalar(query.step, pa.int32()))
    if query.group is not None:
        parts.append(pc.field("prompt_uid") == _group_uid(run, query.step, query.group))
    if query.where is not None:
        parts.append(parse_filter(query.where, SAMPLES))
    result = parts[0] if parts else None
    for part in parts[1:]:
        result = part if result is None else result & part
    return result


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


def _sort_keys(text: str | None) -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for part in (text or "").split(","):
        name = part.strip().removeprefix("-").strip()
        if name:
            _require_column(name, "--sort")
            if pa.types.is_nested(SAMPLES.field(name).type):
                raise UsageError(f"--sort: {name} is a list for each sample, which has no order")
            keys.append((name, "descending" if part.strip().startswith("-") else "ascending"))
    return keys


def _require_column(name: str, option: str) -> None:
    if name not in SAMPLES.names:
        hint = nearest(name, SAMPLES.names)
        raise UsageError(f"{option}: there is no column {name!r}{hint and f': {hint}'}")
