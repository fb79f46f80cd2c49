"""How tables are pickled: what comes out is what went in, large ones are not copied, parts leave the rest behind."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from benchmarks.data_plane import buffers, rollouts_table, train_table
from workers import tables
from workers.messages import REWARDS, ROLLOUTS

SMALL, LARGE = rollouts_table(4, 50, 1), train_table(512, 1024, 1)


def moved(table: pa.Table, protocol: int = 5) -> tuple[pa.Table, list[pickle.PickleBuffer]]:
    """The table after a journey, and the buffers that were handed over beside the pickle."""
    apart: list[pickle.PickleBuffer] = []
    callback = apart.append if protocol == 5 else None
    data = pickle.dumps(table, protocol=protocol, buffer_callback=callback)
    return pickle.loads(data, buffers=apart if protocol == 5 else None), apart


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    "table",
    [
        *(SMALL, LARGE, SMALL.slice(1, 2), LARGE.slice(3, 500), LARGE.slice(7, 5), ROLLOUTS.empty_table()),
        pa.concat_tables([SMALL, SMALL.slice(2)]),
        REWARDS.empty_table(),
    ],
)
def test_what_comes_out_is_what_went_in(table: pa.Table, protocol: int) -> None:
    got, _ = moved(table, protocol)
    assert got.equals(table) and got.schema.equals(table.schema, check_metadata=True)
    got.validate(full=True)


def test_large_tables_hand_over_their_buffers_where_they_lie() -> None:
    assert LARGE.nbytes > tables._SMALL_BYTES
    got, apart = moved(LARGE)
    own = {buffer.address for buffer in buffers(LARGE)}
    assert {pa.py_buffer(one).address for one in apart} == own == {buffer.address for buffer in buffers(got)}


def test_small_tables_are_one_buffer_that_is_read_where_it_lies() -> None:
    got, apart = moved(SMALL)
    stream = pa.py_buffer(apart[0])
    assert len(apart) == 1
    assert all(0 <= buffer.address - stream.address < stream.size for buffer in buffers(got) if buffer.size)


@pytest.mark.parametrize("rows", [3, 300])
def test_a_part_of_a_table_leaves_the_rest_behind(rows: int) -> None:
    """Of a large one, small or large itself."""
    part = LARGE.slice(100, rows)
    _, apart = moved(part)
    assert sum(one.raw().nbytes for one in apart) < 1.05 * part.nbytes + 4096
