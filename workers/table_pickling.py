"""How tables are pickled on their way into the object store (by Ray, which asks `copyreg`).

pyarrow pickles a table object by object. A group's table has some hundred of them and few bytes: a small table goes as
one Arrow stream, which is written ten times as fast and read in place. A large table goes as pyarrow does it, each
buffer straight from where it lies to shared memory: there a copy would cost more than the objects.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import pyarrow as pa

STREAM_BYTES = 4 * 2**20
"""Largest table that goes as a stream."""

_Reduced = tuple[Callable[..., pa.Table], tuple[Any, ...]]


def reduce_table(table: pa.Table) -> _Reduced:
    """What pickle needs to make the table anew."""
    if table.nbytes > STREAM_BYTES:
        return table.__reduce__()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return read_stream, (sink.getvalue(),)


def read_stream(stream: pa.Buffer) -> pa.Table:
    """The table of a stream; its columns lie in the stream's own memory."""
    return pa.ipc.open_stream(stream).read_all()


copyreg.pickle(pa.Table, reduce_table)
