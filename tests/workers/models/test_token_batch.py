"""Arrow to torch and back: the vectorised code against plain Python lists."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.workers.contract.messages import TRAIN, token_scores
from troupe.workers.models.ragged import list_column, ragged, ragged_view
from troupe.workers.models.token_batch import TokenTable, filler_batch, score_table

lists = st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=1, max_size=8)


def train_table(samples: list[tuple[list[int], list[int]]], **columns: list[list[float]]) -> pa.Table:
    """A TRAIN table with the given (prompt_ids, response_ids); floats default to 0."""
    lengths = [len(response) for _, response in samples]
    zeros = [[0.0] * length for length in lengths]
    data = {
        "prompt_uid": [f"p{row}" for row in range(len(samples))],
        "sample_index": [row % 2 for row in range(len(samples))],
        "attempt": [0] * len(samples),
        "segment": [0] * len(samples),
        "prompt_ids": [prompt for prompt, _ in samples],
        "response_ids": [response for _, response in samples],
        "loss_mask": [[True] * length for length in lengths],
        "rollout_logprobs": zeros,
        "advantages": zeros,
        "reward": [0.0] * len(samples),
    } | columns
    return pa.Table.from_pydict({name: data.get(name, [None] * len(samples)) for name in TRAIN.names}, schema=TRAIN)


@settings(deadline=None)
@given(lists, st.data())
def test_ragged_round_trip_and_take(rows: list[list[int]], data: st.DataObject) -> None:
    column = pa.chunked_array([pa.array(rows, pa.list_(pa.int32()))])
    flat = ragged(column)
    assert flat.values.tolist() == [value for row in rows for value in row]
    assert flat.lengths.tolist() == [len(row) for row in rows]
    assert list_column(flat.values, flat.lengths, pa.int32()).to_pylist() == rows
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    taken = flat.take(torch.tensor(chosen, dtype=torch.int64))
    assert list_column(taken.values, taken.lengths, pa.int32()).to_pylist() == [rows[row] for row in chosen]
    assert flat.sequence().tolist() == [number for number, row in enumerate(rows) for _ in row]
    assert flat.within().tolist() == [position for row in rows for position in range(len(row))]


def test_ragged_of_a_slice_and_of_several_chunks() -> None:
    array = pa.array([[1], [2, 3], [], [4, 5, 6]], pa.list_(pa.int32()))
    assert ragged(array.slice(1, 2)).values.tolist() == [2, 3]
    chunked = pa.chunked_array([array.slice(3, 1), array.slice(0, 2)])
    assert ragged(chunked).values.tolist() == [4, 5, 6, 1, 2, 3] and ragged(chunked).lengths.tolist() == [3, 1, 2]


def test_ragged_types() -> None:
    assert ragged(pa.array([[1.5]], pa.list_(pa.float32()))).values.dtype == torch.float32
    assert ragged(pa.array([[True, False]])).values.tolist() == [True, False]
    for bad in (pa.array([[1], None]), pa.array([[1, None]]), pa.array([1, 2])):
        with pytest.raises(ValueError, match="list"):
            ragged(bad)


@pytest.mark.parametrize("dtype", [pa.int32(), pa.float32()])
def test_a_view_is_where_its_column_is_and_gives_rows_as_a_copy_does(dtype: pa.DataType) -> None:
    array = pa.array([[1], [2, 3], [], [4, 5, 6]], pa.list_(dtype))
    for column in (array, pa.chunked_array([array]), array.slice(1, 3)):
        view, copy = ragged_view(column), ragged(column)
        own = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        assert view.values.data_ptr() == own.flatten().buffers()[1].address + 4 * own.flatten().offset
        assert torch.equal(view.values, copy.values.to(view.values.dtype)) and torch.equal(view.lengths, copy.lengths)
        rows = torch.tensor([2, 0, 2])
        taken, expected = view.take(rows), copy.take(rows)
        assert taken.values.dtype == view.values.dtype and taken.values.tolist() == expected.values.tolist()
        assert torch.equal(view.take_ids(rows).values, expected.values.long())
        taken.values.zero_()  # rows are copies
        assert torch.equal(ragged(column).values, copy.values)


def test_a_view_of_other_values_is_a_copy() -> None:
    assert ragged_view(pa.array([[True, False]])).values.tolist() == [True, False]
    assert ragged_view(pa.array([[1.5]], pa.list_(pa.float64()))).values.dtype == torch.float32
    assert ragged_view(pa.array([[]], pa.list_(pa.int32()))).values.dtype == torch.int64
    with pytest.raises(ValueError, match="nulls"):
        ragged_view(pa.array([[1, None]], pa.list_(pa.int32())))


def test_list_column_refuses_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        list_column(torch.zeros(3), torch.tensor([1, 1]), pa.float32())


samples = st.lists(
    st.tuples(
        st.lists(st.integers(0, 99), min_size=1, max_size=5),
        st.lists(st.integers(0, 99), max_size=5),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(samples, st.data())
def test_batch_against_lists(rows: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    advantages = [[float(row * 10 + t) for t in range(len(response))] for row, (_, response) in enumerate(rows)]
    table = TokenTable(train_table(rows, advantages=advantages))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    batch = table.batch(chosen)
    width = max(len(rows[row][0]) + len(rows[row][1]) for row in chosen)
    assert batch.input_ids.shape == (len(chosen), width)
    tokens = [rows[row][0] + rows[row][1] for row in chosen]
    assert batch.input_ids.tolist() == [sequence + [0] * (width - len(sequence)) for sequence in tokens]
    assert batch.attention_mask.tolist() == [[1] * len(s) + [0] * (width - len(s)) for s in tokens]
    assert batch.targets.tolist() == [token for row in chosen for token in rows[row][1]]
    # The token after each predicting position is the target.
    following = [batch.input_ids.flatten()[position + 1].item() for position in batch.positions.tolist()]
    assert following == batch.targets.tolist()
    assert batch.sequence.tolist() == [number for number, row in enumerate(chosen) for _ in rows[row][1]]
    assert batch.lengths.tolist() == [len(rows[row][1]) for row in chosen]
    floats = table.floats("advantages", batch)
    assert floats is not None and floats.tolist() == [value for row in chosen for value in advantages[row]]
    assert table.floats("values", batch) is None


def test_filler_batch_touches_nothing() -> None:
    table = TokenTable(train_table([([1], [2, 3])]))
    batch = table.batch(())
    assert batch.input_ids.shape == filler_batch().input_ids.shape == (1, 1)
    assert len(batch.rows) == len(batch.targets) == len(batch.positions) == 0
    floats = table.floats("advantages", batch)
    assert floats is not None and floats.shape == (0,)


def test_rows_count_through_tables() -> None:
    first, second = train_table([([1], [2]), ([3], [])]), train_table([([4, 5], [6, 7])])
    table = TokenTable.concat([first, second])
    assert table.batch([2, 0]).targets.tolist() == [6, 7, 2]
    assert TokenTable.concat([]).batch([]).targets.shape == (0,)


def test_bad_tables_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"p1\[1\] has an empty prompt"):
        TokenTable(train_table([([1], [2]), ([], [3])]))
    with pytest.raises(ValueError, match=r"p0\[0\]: advantages has 1 entries for 2 response tokens"):
        TokenTable(train_table([([1], [2, 3])], advantages=[[0.0]]))


def test_score_table() -> None:
    table = train_table([([1], [2, 3]), ([4], []), ([5], [6])])
    scored = score_table("values", table, torch.tensor([0.5, 1.5, 2.5]), torch.tensor([2, 0, 1]))
    assert scored.schema.equals(token_scores("values"), check_metadata=True)
    assert scored.column("values").to_pylist() == [[0.5, 1.5], [], [2.5]]
    assert scored.column("prompt_uid").to_pylist() == ["p0", "p1", "p2"]
