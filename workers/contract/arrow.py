"""How Arrow tables are pickled, and so how they enter Ray's object store.

Ray's own way looks at every column in Python and makes its offsets anew: some milliseconds a table, however small. Here
a small table is one Arrow stream, copied once more on its way, which costs less than the handling of its buffers; a
large one hands over its buffers where they lie. In both cases whoever reads it reads it where it lies in the store.
"""

from __future__ import annotations

import copyreg
from typing import Any

import pyarrow as pa

_SMALL_BYTES = 2**22
"""Up to here a copy takes less time than a table's buffers take one by one."""
_CUT = 1.1
"""A table whose buffers are so much larger than what it says is a part of another one: only the part moves."""


def _reduce(table: pa.Table) -> str | tuple[Any, ...]:
    if table.nbytes > _SMALL_BYTES and table.get_total_buffer_size() <= _CUT * table.nbytes:
        return table.__reduce__()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return _restore, (sink.getvalue(),)


def _restore(stream: pa.Buffer) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()


def pickle_tables() -> None:
    """Have tables pickled so in this process; whoever unpickles them needs no more than this module."""
    copyreg.pickle(pa.Table, _reduce)
