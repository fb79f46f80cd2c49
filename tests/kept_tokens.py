"""The words of sets of tokens, written one row at a time: what `write_kept` must return."""

from __future__ import annotations

import numpy as np

from troupe.workers.contract.kept_tokens import BITMAP, Bits, Kept, Words, bitmap_words


def words_of(kept: Kept) -> list[Words]:
    """The words of each row of `kept` [rows, vocabulary]: True on the tokens that were left."""
    return [_words(row) for row in kept]


def _words(kept: Kept) -> Words:
    ids, most = np.flatnonzero(kept).astype(np.int32), bitmap_words(len(kept))
    if len(ids) == len(kept):
        return ids[:0]
    return ids if len(ids) < most else np.concatenate([[BITMAP], packed(kept[None])[0].view(np.int32)], dtype=np.int32)


def packed(kept: Kept) -> Bits:
    """[rows, ceil(vocabulary / 32)]: a bit for each token."""
    bits = np.packbits(np.pad(kept, ((0, 0), (0, -kept.shape[1] % 32))), axis=1, bitorder="little")
    return bits.view(np.uint32)
