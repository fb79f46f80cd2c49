"""Tables in files: the groups that a checkpoint keeps, and what the updates of a step need (`troupe replay`).

Kept groups are not sampled again by a resumed run. A part has one Parquet file for each kind of table (rollouts,
rewards, token scores), with a row group for each group. The tables go from the object store to the files here: the
controller sees neither.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from troupe.workers.contract.messages import (
    REWARDS,
    ROLLOUTS,
    SEGMENT,
    SQUARE_SUMS,
    TEACHER_TOKENS,
    KeepRequest,
    KeptFile,
    KeptTable,
    identities,
    kind_of,
    token_scores,
)

Kept = dict[str, KeptTable]
"""Where the tables of one group are, by kind."""


@dataclass
class _OpenFile:
    """A Parquet file that is being written."""

    name: str
    writer: pq.ParquetWriter
    groups: int = field(default=0)


def keep_groups(folder: str | Path, request: KeepRequest, tables: Sequence[pa.Table]) -> tuple[Kept, ...]:
    """Write the groups' rows of ROLLOUTS, REWARDS and token-score tables; returns where the tables of each group
    are. Groups beyond `max_bytes` in memory are missing at the end. Raises ValueError for another kind of table;
    OSError."""
    rows = _rows_by_group(request, tables)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    files: dict[str, _OpenFile] = {}
    kept: list[Kept] = []
    left = request.max_bytes
    with ExitStack() as open_files:
        for key in request.groups:
            own = rows[key]
            left -= sum(table.nbytes for table in own.values())
            if left < 0:
                break
            found: Kept = {}
            for kind, table in own.items():
                if kind not in files:
                    name = f"{kind}-{request.part:03d}.parquet"
                    writer = pq.ParquetWriter(place / name, table.schema, compression="zstd")
                    files[kind] = _OpenFile(name, open_files.enter_context(writer))
                file = files[kind]
                file.writer.write_table(table, row_group_size=max(1, table.num_rows))
                found[kind] = KeptTable(kind, file.name, file.groups)
                file.groups += 1
            kept.append(found)
    return tuple(kept)


def read_group(folder: str | Path, kept: KeptTable) -> pa.Table:
    """The rows of one group from one file. Raises OSError or pa.ArrowInvalid if the file cannot be read, and ValueError
    if the table has other columns than tables of its kind have in this version."""
    schemas = {"rollouts": ROLLOUTS, "rewards": REWARDS}
    with pq.ParquetFile(Path(folder) / kept.file) as file:
        table = file.read_row_group(kept.row_group)
        added = [field for field in (*TEACHER_TOKENS, SQUARE_SUMS) if field.name in table.column_names]
        # Without the numbers of the fields, which Parquet adds to the schema.
        return table.cast(schemas.get(kept.kind) or token_scores(kept.kind, *added))


def _rows_by_group(request: KeepRequest, tables: Sequence[pa.Table]) -> Mapping[tuple[str, int], dict[str, pa.Table]]:
    """The rows of each group by kind; a kind without rows of the group is missing."""
    kinds: dict[str, list[pa.Table]] = {}
    for table in tables:
        kinds.setdefault(kind_of(table), []).append(table)
    found: dict[tuple[str, int], dict[str, pa.Table]] = {key: {} for key in request.groups}
    for kind, parts in kinds.items():
        table = pa.concat_tables(parts)
        segments = table.column(SEGMENT.name).to_pylist() if SEGMENT.name in table.column_names else [0] * len(table)
        numbers: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
        for row, ((uid, sample, attempt), segment) in enumerate(zip(identities(table), segments, strict=True)):
            # Two tables may have the same rows: a group's, and the one of all groups of its engine.
            numbers.setdefault((uid, attempt), {}).setdefault((sample, segment), row)
        for key in request.groups:
            if key in numbers:
                found[key][kind] = table.take(pa.array(numbers[key].values(), pa.int64()))
    return found


def write_tables(folder: str | Path, tables: Mapping[str, pa.Table]) -> dict[str, KeptFile]:
    """Write each table to `folder`/NAME as an Arrow stream; returns the files' size and digest. Raises OSError."""
    return {name: _write(Path(folder) / name, table) for name, table in tables.items()}


def picked(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """These rows of a table, in this order."""
    return table.take(pa.array(rows, pa.int64()))


def _write(path: Path, table: pa.Table) -> KeptFile:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with path.open("wb") as file, _Hashing(file) as sink:
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return KeptFile(sink.size, sink.state.hexdigest())


class _Hashing(io.RawIOBase):
    """Passes bytes on to a file and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.state = xxhash.xxh3_128()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.state.update(view)
        self.size += view.nbytes
        return view.nbytes
