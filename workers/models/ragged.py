"""Arrow list columns to torch and back, without a Python loop over tokens.

A ragged column is one flat tensor of values and one of lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch


@dataclass(frozen=True)
class Ragged:
    """Rows of different length, flattened. `values`: [sum(lengths)]; `lengths`: int64, one per row."""

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def starts(self) -> torch.Tensor:
        """Where each row starts in `values`."""
        return self.lengths.cumsum(0) - self.lengths

    def sequence(self) -> torch.Tensor:
        """The row number of every value."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def within(self) -> torch.Tensor:
        """The position of every value within its row."""
        return torch.arange(len(self.values)) - torch.repeat_interleave(self.starts, self.lengths)

    def split(self, parts: int) -> list[Ragged]:
        """The rows in this many parts, as `torch.tensor_split` divides a tensor of as many rows."""
        rows = torch.arange(len(self.lengths))
        return [self.take(part) for part in rows.tensor_split(parts)]

    def take(self, rows: torch.Tensor) -> Ragged:
        """A copy of the given rows (int64, may repeat), in order."""
        lengths = self.lengths[rows]
        offset = self.starts[rows] - (lengths.cumsum(0) - lengths)
        return Ragged(self.values[torch.arange(int(lengths.sum())) + torch.repeat_interleave(offset, lengths)], lengths)

    def take_ids(self, rows: torch.Tensor) -> Ragged:
        """As `take`, with token ids as int64, however wide they are here."""
        taken = self.take(rows)
        return Ragged(taken.values.long(), taken.lengths)


def ragged(column: pa.ChunkedArray | pa.Array) -> Ragged:
    """A list column as a `Ragged` of int64, float32 or bool. Raises ValueError for another column, or nulls."""
    flat, lengths = _flattened(column)
    values = flat.to_numpy(zero_copy_only=False)
    kind = {"i": np.int64, "f": np.float32, "b": np.bool_}[values.dtype.kind]
    return Ragged(torch.from_numpy(np.array(values, dtype=kind)), lengths)


def ragged_view(column: pa.ChunkedArray | pa.Array) -> Ragged:
    """As `ragged`, but int32 and float32 values stay in the object store, to be read only."""
    flat, lengths = _flattened(column)
    if len(flat) == 0 or not (pa.types.is_int32(flat.type) or pa.types.is_float32(flat.type)):
        return ragged(column)
    return Ragged(torch.from_dlpack(flat), lengths)


def _flattened(column: pa.ChunkedArray | pa.Array) -> tuple[pa.Array, torch.Tensor]:
    """The values of a list column, and int64 lengths. Raises ValueError: it is no list column or has nulls."""
    if isinstance(column, pa.ChunkedArray):  # `combine_chunks` copies even a single one
        array: pa.Array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    else:
        array = column
    if not isinstance(array, pa.ListArray):
        raise ValueError(f"expected a column of lists, got {array.type}")
    flat = array.flatten()
    if array.null_count or flat.null_count:
        raise ValueError("the list column has nulls; expected numbers")
    return flat, torch.from_numpy(np.diff(array.offsets.to_numpy()).astype(np.int64))


def list_column(values: torch.Tensor, lengths: torch.Tensor, dtype: pa.DataType) -> pa.Array:
    """A flat tensor and row lengths as an Arrow list column with values of `dtype`."""
    if int(lengths.sum()) != len(values):
        raise ValueError(f"{len(values)} values do not fill rows with {int(lengths.sum())} entries in total")
    offsets = pa.array(np.concatenate([[0], lengths.cpu().numpy().cumsum()]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(values.detach().cpu().numpy()).cast(dtype))
