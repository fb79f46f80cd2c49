"""How the tokens that top-p, top-k, min-p or a form left to a sampled token are written: int32 words.

No words: every token was left. The words of a few tokens are their ids, ascending. Those of many are `BITMAP` and then
a bit for each token of the vocabulary, the first in the lowest bit. A token therefore takes 4 bytes for each token that
was left, and at most `4 * bitmap_words(vocabulary)`: an eighth of a byte for each token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BITMAP = -1
"""First word of a bitmap; no token has this id."""
_WORD_BITS = 32

Words = npt.NDArray[np.int32]
Kept = npt.NDArray[np.bool_]


def bitmap_words(vocabulary: int) -> int:
    """Words of a bitmap, with its first."""
    return 1 + -(-vocabulary // _WORD_BITS)


def write_kept(kept: Kept) -> list[Words]:
    """The words of each row of `kept` [rows, vocabulary]: True on the tokens that were left."""
    rows, vocabulary = kept.shape
    counts = np.count_nonzero(kept, axis=1)
    words: list[Words] = [np.empty(0, np.int32)] * rows
    for row in np.flatnonzero(counts < vocabulary):
        own = kept[row]
        words[row] = np.flatnonzero(own).astype(np.int32) if counts[row] < bitmap_words(vocabulary) else _bitmap(own)
    return words


def _bitmap(kept: Kept) -> Words:
    words = np.zeros(bitmap_words(len(kept)), "<i4")
    words[0] = BITMAP
    bits = np.packbits(kept, bitorder="little")
    words[1:].view(np.uint8)[: len(bits)] = bits
    return words.astype(np.int32, copy=False)


def kept_of(words: Words, vocabulary: int) -> Kept:
    """bool [vocabulary]: True on the tokens that were left.

    Raises:
        ValueError: the words are of another vocabulary.
    """
    if not len(words):
        return np.ones(vocabulary, np.bool_)
    if words[0] != BITMAP:
        kept = np.zeros(vocabulary, np.bool_)
        if words.max() >= vocabulary:
            raise ValueError(f"token {words.max()} was left, of a vocabulary of {vocabulary}")
        kept[words] = True
        return kept
    if len(words) != bitmap_words(vocabulary):
        raise ValueError(f"the tokens that were left are of another vocabulary than one of {vocabulary}")
    bits = np.unpackbits(words[1:].astype("<i4").view(np.uint8), bitorder="little", count=vocabulary)
    return bits.astype(np.bool_)


def keeps(words: Words | Sequence[int], token: int) -> bool:
    """Whether the sampler left this token."""
    if not len(words):
        return True
    if words[0] == BITMAP:
        number, bit = divmod(token, _WORD_BITS)
        return number + 1 < len(words) and bool(int(words[number + 1]) >> bit & 1)
    return token in words
