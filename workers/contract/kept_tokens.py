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
Offsets = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint32]
Kept = npt.NDArray[np.bool_]


def bitmap_words(vocabulary: int) -> int:
    """Words of a bitmap, with its first."""
    return 1 + -(-vocabulary // _WORD_BITS)


def write_kept(bits: Bits, vocabulary: int) -> tuple[Words, Offsets]:
    """The words of some tokens, one after the other, and [tokens + 1] where those of each begin and the last end.
    `bits`: [tokens, ceil(vocabulary / 32)], 1 on the tokens that were left, the first in the lowest bit; 0 behind the
    vocabulary."""
    counts = np.bitwise_count(bits).sum(axis=1, dtype=np.int64)
    listed = counts < min(bitmap_words(vocabulary), vocabulary)
    mapped = ~listed & (counts < vocabulary)
    sizes = np.where(listed, counts, np.where(mapped, bitmap_words(vocabulary), 0))
    words = np.empty(sizes.sum(), np.int32)
    words[np.repeat(listed, sizes)] = _ids(bits[listed])
    maps = np.pad(bits[mapped].view(np.int32), ((0, 0), (1, 0)), constant_values=BITMAP)
    words[np.repeat(mapped, sizes)] = maps.ravel()
    return words, np.concatenate([[0], np.cumsum(sizes)])


def _ids(bits: Bits) -> npt.NDArray[np.int64]:
    """The numbers of the bits that are 1, row by row. Most bytes are 0: they are skipped two at a time."""
    pairs = bits.view(np.uint16)
    places = np.flatnonzero(pairs != 0)
    found = np.flatnonzero(np.unpackbits(pairs.ravel()[places].view(np.uint8), bitorder="little").view(np.bool_))
    return places[found >> 4] % pairs.shape[1] * 16 + (found & 15)


def kept_of(words: Words, vocabulary: int) -> Kept:
    """bool [vocabulary]: the tokens that were left. Raises ValueError if the words are of another vocabulary."""
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
