"""Questions about a tokenizer, answered in a separate process: the lengths of prompts, and the texts of tokens."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.environments import TOOLS
from troupe.workers.contract.imports import without_collections
from troupe.workers.data.chat import PromptRefused, encode_prompt
from troupe.workers.data.plain_text import as_text, special_tokens
from troupe.workers.data.template_forms import template_forms
from troupe.workers.data.tokenizer import load_chat_tokenizer, load_tokenizer, token_ids
from troupe.workers.data.turn_ends import turn_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u2581"
"""What SentencePiece writes for a space before a word."""
_Pieces = Callable[[int], object]
"""The piece of the vocabulary with an id."""


def measure(request: Mapping[str, Any]) -> Iterator[int | str]:
    """Facts about tokenizer and prompts: the end of a turn that the folder does not name (or ""), the text that
    ends a turn if no token does (or ""), what the template leaves out of tools (";" between), the numbers of
    prompts and answers with special tokens as text, then each prompt's length in tokens, or why it has none. The
    request has `model` (a ModelConfig), `messages`, `tools` (or null) and `responses` (or null, else counted with
    their end) of every prompt, `answers`, `longest`, and `seconds`, after which prompts are left out. Raises
    ValueError."""
    model = model_without_torch(request)
    with without_collections(), _without_packages():
        tokenizer = load_chat_tokenizer(model)
    yield turn_ends(tokenizer).unnamed
    yield turn_ends(tokenizer).spelled
    dropped = template_forms(tokenizer).dropped
    yield ";".join(dropped)
    for texts in (request["messages"], request["answers"]):
        yield 0 if model.allow_special else sum(map(_has_special, repeat(tokenizer), texts))
    end = time.monotonic() + request["seconds"]
    for messages, tools, response in zip(request["messages"], request["tools"], request["responses"], strict=True):
        if time.monotonic() > end:
            return
        offered = None if TOOLS in dropped else tools
        try:
            prompt = len(encode_prompt(tokenizer, messages, request["longest"], offered))
            yield prompt + (0 if response is None else len(token_ids(tokenizer, response)) + 1)
        except PromptRefused as error:
            yield str(error)


@contextmanager
def _without_packages() -> Iterator[None]:
    """Lets transformers, if it is imported in the block, not look up the package of each module, which takes a
    fifth of its time: it asks for packages by the names of their modules."""
    search, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, dict
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = search


def _has_special(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    found = special_tokens(tokenizer).search(text)
    return found is not None and as_text(tokenizer, value := json.loads(text)) != value


def decode(request: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the text of every token in `ids`, as one list. A token that is part of a character gives U+FFFD. Raises
    ValueError if the tokenizer cannot be loaded."""
    # A report makes no network requests. The variable is read when the tokenizer's library is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    model, ids = model_without_torch(request), request["ids"]
    tokenizer, piece_of = _in_file(model, ids) or _in_transformers(model)
    yield [_text(tokenizer, piece_of, token) for token in ids]


def _in_file(model: ModelConfig, ids: Sequence[int]) -> tuple[Any, _Pieces] | None:
    """The tokenizer in the folder's file, which imports fast, and its pieces, or None if it lacks one of the ids."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(Path(model.path) / "tokenizer.json"))
    except Exception:  # no file, or a damaged one: transformers says what is wrong
        return None
    whole = not model.trust_remote_code and all(tokenizer.id_to_token(token) is not None for token in ids)
    return (tokenizer, tokenizer.id_to_token) if whole else None


def _in_transformers(model: ModelConfig) -> tuple[Any, _Pieces]:
    tokenizer: Any = load_tokenizer(model)
    return tokenizer, tokenizer.convert_ids_to_tokens


def _text(tokenizer: Any, piece_of: _Pieces, token: int) -> str:
    try:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        piece = piece_of(token)
    except (IndexError, KeyError, OverflowError):
        return f"<{token}>"  # a row of the embedding that the tokenizer does not know
    if isinstance(piece, str) and piece.startswith(_SPACE) and not text.startswith(" "):
        return f" {text}"
    return text or f"<{token}>"


def model_without_torch(request: Mapping[str, Any]) -> ModelConfig:
    """The model of a request. Blocks the import of torch in this process, which takes two thirds of the time."""
    model = ModelConfig.model_validate(request["model"])
    if not model.trust_remote_code:
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]: this is how an import is blocked
    return model
