"""The tokenizer of a model with the chat template that the spec chooses, and rendered text as tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.plain_text import ALLOW_SPECIAL, as_text, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files with a tokenizer's chat template."""
_UNCOPIED = {"config.json", "generation_config.json", "adapter_config.json"}
"""Files that a model writes with its weights."""
_PIECES = 1024
"""Pieces of a vocabulary in one text."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template of tokenizers that have none: the texts unchanged."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer with `model.chat_template`; it may have no template. Raises ValueError if the tokenizer or
    the template cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers raises many types
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the tokenizer in {model.path} cannot be loaded: {type(error).__name__}: {reason}") from error
    tokenizer.init_kwargs[ALLOW_SPECIAL] = model.allow_special
    if model.chat_template is not None:
        tokenizer.chat_template = PLAIN_TEMPLATE if model.plain else read_template(model.chat_template)
    return tokenizer


def load_chat_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`. Also raises ValueError for a tokenizer without a chat template."""
    tokenizer = load_tokenizer(model)
    if tokenizer.chat_template is None:
        remedy = "set model.chat_template to a Jinja file, or to none for prompts that are plain text"
        raise ValueError(f"the tokenizer in {model.path} has no chat template: {remedy}")
    return tokenizer


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copies a model's files besides weights and configuration, with `model.chat_template`, as an export has them;
    one without a template was trained without: other tools do not render conversations for it."""
    for file in Path(model.path).iterdir():
        side_file = file.suffix in {".json", ".jinja", ".txt", ".model", ".py"}
        if side_file and file.name not in _UNCOPIED and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    if model.chat_template is None:
        return
    for name in _TEMPLATES:
        (folder / name).unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in (content := json.loads(settings.read_bytes())):
        del content["chat_template"]
        settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not model.plain:
        shutil.copyfile(model.chat_template, folder / _TEMPLATES[0])


def read_template(path: str) -> str:
    """The chat template in a file. Raises ValueError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {path} cannot be read: {error}") from error


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    open_turn: bool,
    tools: list[Any] | None = None,
) -> str:
    """Text of a conversation with the `tools` that it offers, for `token_ids` and comparisons: special tokens in
    messages are cut (`troupe.workers.data.plain_text`). A chat template can raise anything."""
    offered = as_text(tokenizer, tools)
    return render_as_text(tokenizer, as_text(tokenizer, messages), open_turn=open_turn, tools=offered)


def render_as_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    open_turn: bool,
    tools: list[Any] | None = None,
) -> str:
    """As `render`, of messages and tools in which text is text (`as_text`)."""
    offered: dict[str, Any] = {} if tools is None else {"tools": tools}
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn, tokenize=False, **offered))


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text, with the special tokens before a text if there is no template."""
    ids = text_ids(tokenizer, text)
    return ids if tokenizer.chat_template != PLAIN_TEMPLATE else [*before_a_text(tokenizer), *ids]


def vocabulary_texts(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, list[int]]]:
    """Texts that together have every piece of a tokenizer's vocabulary in a separate line, each with its tokens."""
    pieces: list[str] = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    texts = ["\n".join(pieces[start : start + _PIECES]) for start in range(0, len(pieces), _PIECES)]
    encoded: Any = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return list(zip(texts, encoded, strict=True))


def outside_embedding(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The first token that the model of the tokenizer's folder has no embedding for, as text; empty without one."""
    rows = _embedding_rows(str(tokenizer.name_or_path))
    found = next((token for token in ids if rows is not None and token >= rows), None)
    if found is None:
        return ""
    text = str(tokenizer.decode([found]))
    return f"the token {found} ({text!r}) is outside the model's embedding, which has {rows} rows"


def within_embedding(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> list[int]:
    """Those tokens that the model of the tokenizer's folder can sample, in order of their ids."""
    rows = _embedding_rows(str(tokenizer.name_or_path))
    return sorted(token for token in ids if rows is None or token < rows)


@cache
def _embedding_rows(folder: str) -> int | None:
    """Rows of the embedding, by the configuration of a model, or None if it has no such field."""
    try:
        config: Any = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = [part.get("vocab_size") for part in parts if isinstance(part, dict)]
    return next((size for size in sizes if type(size) is int), None)


def before_a_text(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text, such as a BOS token."""
    word: Any = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids: Any = tokenizer("a")["input_ids"]
    return ids[: next(start for start in range(len(ids)) if ids[start : start + len(word)] == word)]
