"""How Arrow tables are pickled, and so how they enter Ray's object store.

Ray's own serializer inspects every column in Python and rewrites its offsets: some milliseconds per table, however
small. Here a small table becomes one Arrow stream; the extra copy costs less than handling its buffers one by one. A
large table hands over its buffers in place. In both cases a reader reads the data in place in the object store.
"""

from __future__ import annotations

import copyreg
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import pyarrow as pa

_SMALL_BYTES = 2**22
"""Up to this size, copying a table takes less time than handing over its buffers one by one."""
_SLICE_RATIO = 1.1
"""A table whose buffers exceed its own size by this factor is a slice of a larger one: only the slice is sent."""


def pickle_tables() -> None:
    """Pickle tables this way in the current process; idempotent.

    Every process that sends tables calls it once: the driver when it connects to Ray, a worker in its constructor. A
    process that only reads tables needs nothing but this module.
    """
    copyreg.pickle(pa.Table, _reduce)


class _NoPandas(MetaPathFinder):
    """Finds no pandas, as if it were not installed."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ImportError("not needed")


def spare_pandas() -> None:
    """Keep Arrow from importing pandas to see whether the first list that becomes a column is a Series. `to_pandas`
    imports it nevertheless."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([None])
    finally:
        sys.meta_path.remove(finder)


def _reduce(table: pa.Table) -> str | tuple[Any, ...]:
    if table.nbytes > _SMALL_BYTES and table.get_total_buffer_size() <= _SLICE_RATIO * table.nbytes:
        return table.__reduce__()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _restore, (sink.getvalue(),)


def _restore(stream: pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()
