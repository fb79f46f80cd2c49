"""Copies and digests of data_plane."""

from __future__ import annotations

import pyarrow as pa

from benchmarks import data_plane
from troupe.workers.contract.arrow import pickle_tables


def test_pickled_bytes_are_copied_twice() -> None:
    pickle_tables()  # as every process of a run does
    small, large = data_plane.rollouts_table(8, 2000, 1), data_plane.train_table(64, 5000, 1)
    assert 2.0 <= data_plane.Copies.of(small, small).put < 2.1  # into one stream, and its pickle counts
    assert 1.0 <= data_plane.Copies.of(large, large).put < 1.01
    assert data_plane.bytes_in_place(large) == 0 and data_plane.Copies.of(large, large).get > 1.0


def test_reading_sees_every_byte() -> None:
    table = data_plane.train_table(8, 37, 1)
    assert data_plane.read(table) == data_plane.read(data_plane.train_table(8, 37, 1))
    column = table.schema.get_field_index("reward")
    last = [*table["reward"].to_pylist()[:-1], 7.0]
    changed = table.set_column(column, table.schema.field(column), pa.array(last))
    assert data_plane.read(changed) != data_plane.read(table)
    tensors = data_plane.tensors_of(table)
    assert set(tensors) == {
        "prompt_ids",
        "response_ids",
        "loss_mask",
        "rollout_logprobs",
        "old_logprobs",
        "advantages",
    }
    assert data_plane.tensor_bytes(tensors) == 8 * (6 * 8 + data_plane.PROMPT_TOKENS * 8 + 37 * (8 + 1 + 3 * 4))
