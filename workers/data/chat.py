"""Encoding of prompts, and the seed of each sample. Pure functions."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from troupe.workers.data.template_forms import as_read
from troupe.workers.data.tokenizer import outside_embedding, render, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptRefused(ValueError):
    """This prompt cannot be used; other prompts are not affected."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: str, longest: int, tools: str | None = None
) -> list[int]:
    """Token ids of a chat (`messages`, `tools`: JSON lists) up to and including the opening of the response. Raises
    PromptRefused if it is invalid, has not 1 to `longest` tokens, or one without an embedding."""
    try:
        turns = json.loads(messages)
    except ValueError as error:
        raise PromptRefused(f"messages are not JSON: {error}") from error
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        raise PromptRefused("messages are not a list of {role, content} with text")
    if not any(turn["content"].strip() for turn in turns if turn["role"] != "system"):
        raise PromptRefused("the prompt is empty")
    try:
        json.dumps(turns, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise PromptRefused("the prompt has a lone surrogate, which is not valid text") from error
    try:
        offered = json.loads(tools) if tools else None
        turns = as_read(tokenizer, turns, offered)
    except ValueError as error:
        raise PromptRefused(str(error)) from error
    try:
        ids = token_ids(tokenizer, render(tokenizer, turns, open_turn=True, tools=offered))
    except Exception as error:  # a chat template can raise anything
        raise PromptRefused(f"{type(error).__name__}: {error}") from error
    if why := outside_embedding(tokenizer, ids):
        raise PromptRefused(why)
    if not 1 <= len(ids) <= longest:
        raise PromptRefused(f"the prompt has {len(ids)} tokens; 1 to {longest} fit besides the longest response")
    return ids


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a group, 63 bits. Hashed, because vLLM's seed + index overlaps between groups."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_seed(seed: int, index: int, turn: int) -> int:
    """Seed of one turn of sample `index` of a group; the first turn's is the sample's."""
    own = sample_seed(seed, index)
    return own if turn == 0 else sample_seed(own, turn)
