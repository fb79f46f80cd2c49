"""Texts of single tokens, for reports: answered in a separate process, which imports the tokenizer's library."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from troupe.workers.contract.config import ModelConfig
from troupe.workers.data.tokenizer import load_tokenizer

_SPACE = "\u2581"
"""What SentencePiece writes for a space before a word."""


def decode(request: Mapping[str, Any]) -> Iterator[list[str]]:
    """The text of every token, as one list. A token that is part of a character gives U+FFFD.

    Args:
        request: `model`, a ModelConfig as a dictionary, and `ids`.

    Raises:
        ValueError: the tokenizer cannot be loaded.
    """
    os.environ["HF_HUB_OFFLINE"] = (
        "1"  # a report makes no network requests; read when the tokenizer's library is imported
    )
    model = ModelConfig.model_validate(request["model"])
    if not model.trust_remote_code:
        # transformers then works without torch, whose import takes two thirds of the time. Run this in its own process.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]: this is how an import is blocked
    tokenizer: Any = load_tokenizer(model)
    yield [_text(tokenizer, token) for token in request["ids"]]


def _text(tokenizer: Any, token: int) -> str:
    try:
        text = str(tokenizer.decode([token]))
        piece = tokenizer.convert_ids_to_tokens(token)
    except (IndexError, KeyError, OverflowError):
        return f"<{token}>"  # a row of the embedding that the tokenizer does not know
    if isinstance(piece, str) and piece.startswith(_SPACE) and not text.startswith(" "):
        return f" {text}"
    return text or f"<{token}>"
