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


def test_the_first_batch_has_the_tokens_of_the_first_rows() -> None:
    table = data_plane.train_table(8, 37, 1)
    rows = table.slice(0, data_plane.FIRST_ROWS).to_pylist()
    expected = sum(sum(row["prompt_ids"]) + sum(row["response_ids"]) for row in rows)
    assert data_plane.first_batch(table) == expected == data_plane.first_rows(data_plane.tensors_of(table))


def test_a_table_of_gigabytes_is_skipped_where_memory_is_short() -> None:
    assert data_plane.memory_problem(1024, 4096, 0) == ""
    assert data_plane.memory_problem(62_000, 4096, 20 * 10**9) == ""
    problem = data_plane.memory_problem(62_000, 4096, 10**9)
    assert "4.1 GB needs 11.4 GB" in problem and "1.0 are available" in problem
