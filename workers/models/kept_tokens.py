"""The tokens that the sampler left to each sampled token, as the trainer's mask."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute
import torch

from troupe.workers.contract.kept_tokens import BITMAP, bitmap_words
from troupe.workers.models.ragged import Ragged


def read_kept(column: pa.ChunkedArray, lengths: torch.Tensor) -> Ragged | None:
    """The words of every response token of a column `kept_tokens`, or None if it has none.

    Args:
        column: Lists of binaries: one for each response token, or null if a row was sampled from all tokens.
        lengths: int64: response tokens of each row.

    Raises:
        ValueError: a row's number of entries is not its number of response tokens, or an entry is no sequence of words.
    """
    if column.null_count == len(column):
        return None
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    entries = torch.tensor(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    restricted = torch.tensor(array.is_valid().to_numpy(zero_copy_only=False))
    if wrong := ((entries != lengths) & restricted).nonzero().flatten().tolist():
        row = wrong[0]
        raise ValueError(f"row {row}: kept_tokens has {int(entries[row])} entries for {int(lengths[row])} tokens")
    flat = array.flatten()
    sizes = compute.call_function("binary_length", [flat]).to_numpy(zero_copy_only=False)
    if (sizes % 4).any():
        raise ValueError("kept_tokens has an entry that is no sequence of 32-bit words")
    words = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    words[torch.repeat_interleave(restricted, lengths)] = torch.from_numpy(sizes // 4)
    return Ragged(torch.from_numpy(_bytes(flat).view(np.int32)), words)


def _bytes(array: pa.Array) -> np.ndarray:
    """uint8: the bytes of all entries of an array of large binaries."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return np.empty(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].copy()


def left_out(kept: Ragged, vocabulary: int, device: torch.device) -> torch.Tensor:
    """bool [T, vocabulary] on `device`: True on the tokens that were not left to the T sampled tokens.

    Raises:
        ValueError: a bitmap is of another vocabulary, or an id is beyond it.
    """
    recorded = kept.lengths > 0
    maps = torch.zeros_like(recorded)
    maps[recorded] = kept.values[kept.starts[recorded]] == BITMAP
    listed = (recorded & ~maps).nonzero().flatten()
    mapped = maps.nonzero().flatten()
    result = torch.zeros(len(kept.lengths), vocabulary, dtype=torch.bool, device=device)
    if len(listed):
        ids = kept.take(listed)
        if int(ids.values.max()) >= vocabulary:
            raise ValueError(f"the sampler kept token {int(ids.values.max())} of a vocabulary of {vocabulary}")
        result[listed.to(device)] = True
        result[listed[ids.sequence()].to(device), ids.values.long().to(device)] = False
    if len(mapped):
        words_of = kept.lengths[mapped]
        if (words_of != words_of[0]).any() or int(words_of[0]) > bitmap_words(vocabulary):
            raise ValueError(f"the sampler's sets of tokens are of another vocabulary than the model's, {vocabulary}")
        words = kept.take(mapped).values.view(len(mapped), -1)[:, 1:].contiguous()
        packed = words.view(torch.uint8).to(device)
        bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
        absent = bits.flatten(1)[:, :vocabulary] == 0
        rows = mapped.to(device)
        result[rows] = True  # also ids beyond a bitmap: some models have more logits than the one that sampled
        result[rows, : absent.shape[1]] = absent
    return result
