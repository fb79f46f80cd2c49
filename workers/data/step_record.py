"""The tables of a step, written so that its updates can be repeated (`troupe replay`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from troupe.workers.contract.messages import KeptFile


def write_tables(folder: str | Path, tables: Mapping[str, pa.Table]) -> dict[str, KeptFile]:
    """Write each table to `folder`/NAME as an Arrow stream; returns size and digest of the files by name.

    Raises:
        OSError: a file cannot be written.
    """
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
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.state.update(view)
        self.size += view.nbytes
        return view.nbytes
