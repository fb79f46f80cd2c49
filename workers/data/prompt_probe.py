"""Renders prompts with a model's chat template, without the model: what no prompt survives is found before a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from troupe.workers.contract.config import ModelConfig
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.data.turn_ends import turn_ends


def measure(request: Mapping[str, Any]) -> Iterator[int | str]:
    """The end of a turn that the model's folder does not name (empty: none), then the length of each prompt in tokens,
    or why it has none.

    Args:
        request: `model`, a ModelConfig as a dictionary, `messages` of every prompt (JSON), `longest`, which no
            prompt's length reaches, and `seconds`, after which the remaining prompts are left out.

    Raises:
        ValueError: the tokenizer cannot be loaded or has no chat template.
    """
    model = ModelConfig.model_validate(request["model"])
    if not model.trust_remote_code:
        # transformers then works without torch, whose import takes two thirds of the time. Run this in its own process.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]: this is how an import is blocked
    tokenizer = load_chat_tokenizer(model)
    yield turn_ends(tokenizer).unnamed
    end = time.monotonic() + request["seconds"]
    for messages in request["messages"]:
        if time.monotonic() > end:
            return
        try:
            yield len(encode_prompt(tokenizer, messages, request["longest"]))
        except PromptRefused as error:
            yield str(error)
