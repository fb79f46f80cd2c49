"""Answers to a prompt from other sources, as tokens that compete with the policy's samples (RAFT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from troupe.workers.data.chat import PromptRefused
from troupe.workers.data.examples import ExampleRefused, encode_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_candidates(
    tokenizer: PreTrainedTokenizerBase, messages: str, prompt_ids: Sequence[int], texts: Sequence[str], longest: int
) -> list[list[int]]:
    """Token ids of every text as a response to `messages`, with the token that ends its turn.

    Args:
        tokenizer: Tokenizer with a chat template.
        messages: JSON list of {"role", "content"}.
        prompt_ids: Token ids of the prompt.
        texts: The answers.
        longest: Maximum number of tokens of a response.

    Raises:
        PromptRefused: an answer has more tokens, or cannot be encoded.
    """
    encoded = []
    for number, text in enumerate(texts):
        try:
            ids = encode_response(tokenizer, messages, prompt_ids, text)
        except ExampleRefused as error:
            raise PromptRefused(f"candidate {number}: {error}") from error
        if len(ids) > longest:
            raise PromptRefused(f"candidate {number} has {len(ids)} tokens, more than sampling.max_tokens, {longest}")
        encoded.append(ids)
    return encoded
