"""Groups that a checkpoint keeps, so that a resumed run does not sample them again.

A part has one Parquet file for each kind of table (rollouts, rewards, token scores), with a row group for each group.
The tables go from the object store to the files here: the controller sees neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from troupe.workers.contract.messages import (
    REWARDS,
    ROLLOUTS,
    SEGMENT,
    KeepRequest,
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
    """Write the groups' rows of all tables.

    Args:
        folder: Folder of the kept groups; created if it does not exist.
        request: The groups.
        tables: ROLLOUTS, REWARDS and token-score tables in any order and number; rows of other groups are ignored.

    Returns:
        For each group in order where its tables are. Groups beyond `max_bytes` (of the tables in memory, which the
        compressed files do not exceed) are missing at the end.

    Raises:
        ValueError: A table is of no known kind.
        OSError: A file cannot be written.
    """
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
    """The rows of one group from one file.

    Raises:
        OSError, pa.ArrowInvalid: The file cannot be read.
        ValueError: The table has other columns than tables of its kind have in this version.
    """
    schemas = {"rollouts": ROLLOUTS, "rewards": REWARDS}
    with pq.ParquetFile(Path(folder) / kept.file) as file:
        # Without the numbers of the fields, which Parquet adds to the schema.
        return file.read_row_group(kept.row_group).cast(schemas.get(kept.kind) or token_scores(kept.kind))


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
