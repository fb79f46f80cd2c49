"""The text of a response, as reward functions and environments read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from troupe.workers.contract.text import is_thought_tag

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _SpecialIds:
    size: int
    """Size of the tokenizer, which tokens can be added to."""
    tags: frozenset[int]
    others: frozenset[int]


_known: WeakKeyDictionary[PreTrainedTokenizerBase, _SpecialIds] = WeakKeyDictionary()


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of sampled tokens without special tokens, but with the tags of thoughts.

    Some models have special tokens for these tags. Without them the numbers of a thought would be the answer's, and a
    thought that was cut would be an answer.
    """
    special = _special_ids(tokenizer)
    if special.tags.isdisjoint(ids):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return str(tokenizer.decode([token for token in ids if token not in special.others], skip_special_tokens=False))


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> _SpecialIds:
    known = _known.get(tokenizer)
    if known is None or known.size != len(tokenizer):
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        texts = added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        tags = frozenset(number for number, text in texts.items() if is_thought_tag(str(text)))
        known = _known[tokenizer] = _SpecialIds(len(tokenizer), tags, frozenset(texts) - tags)
    return known
