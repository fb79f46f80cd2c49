"""Renders prompts with a model's chat template, without the model: what no prompt survives is found before a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from workers.data.chat import PromptRefused, encode_prompt


def measure(request: Mapping[str, Any]) -> Iterator[int | str]:
    """Length of each prompt in tokens, or why it has none.

    Args:
        request: `path` and `trust_remote_code` of the model, `messages` of every prompt (JSON) and `longest`, which no
            prompt's length reaches.

    Raises:
        ValueError: the tokenizer cannot be loaded or has no chat template.
    """
    if not request["trust_remote_code"]:
        # transformers then works without torch, whose import takes two thirds of the time. Run this in its own process.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]: this is how an import is blocked
    from transformers import AutoTokenizer

    path = request["path"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=request["trust_remote_code"])
    except Exception as error:  # transformers raises many types
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {type(error).__name__}: {reason}") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {path} has no chat template")
    for messages in request["messages"]:
        try:
            yield len(encode_prompt(tokenizer, messages, request["longest"]))
        except PromptRefused as error:
            yield str(error)
