"""Tokens for speakers and ends of turns that the tokenizer does not mark as special.

DeepSeek's `<｜User｜>` is such a token: the chat template writes it around turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd1"
"""Stands for a text, or behind one, to see what a template writes behind it; templates do not trim it."""
CONFIGS = ("generation_config.json", "config.json")
"""Files of a model's folder that may name tokens at which sampling stops; the first one that exists, as in vLLM."""
_MOST = 1 << 31
"""Ids of tokens are below. Some configurations have -1 for no token."""
_CONVERSATIONS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
)
"""Roles of conversations that are rendered; a template refuses unknown ones."""
_OF_A_THOUGHT = re.compile(r"think|thought|reason", re.IGNORECASE)
_OF_A_TURN = re.compile(rf"{_OF_A_THOUGHT.pattern}|tool|call|func|arg", re.IGNORECASE)
"""Tags inside a turn, which data and environments write as well: they stay tokens, unless nothing else opens one."""
_MARKUP = re.compile(r"\S*[^\w\s]\S*")
"""Line breaks, spaces and plain words may be added tokens, too; a template has them for other reasons."""


def unmarked_control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Added tokens that the template writes around turns or that end a sequence, and that are not marked as special."""
    decoder = tokenizer.added_tokens_decoder
    unmarked = {token.content for token in decoder.values() if not token.special} - {""}
    ends = {decoder[one].content for one in configured_ends(Path(tokenizer.name_or_path)) if one in decoder}
    if not unmarked:
        return set()
    found = _finds(unmarked)
    marked = _finds({token.content for token in decoder.values() if token.special} | ends)
    around, opening = set[str](), set[str]()
    for rendering, last in _renderings(tokenizer):
        around |= {text for text in found.findall(rendering) if _MARKUP.fullmatch(text) and not _OF_A_TURN.search(text)}
        behind = rendering.rpartition(MARK)[2]
        inner = set(filter(_MARKUP.fullmatch, found.findall(behind)))
        if last == "tool" and not marked.search(behind) and all(map(_OF_A_TURN.search, inner)):
            # Only a tag of the tool's result marks that the assistant speaks from here (DeepSeek).
            opening |= {text for text in inner if not _OF_A_THOUGHT.search(text)}
    return around | opening | (ends & unmarked)


def _finds(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds each of the texts, the longest first; without any, nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def configured_ends(folder: Path) -> list[int]:
    """The ids that a model's folder names as ends of a sequence."""
    for name in CONFIGS:
        if (folder / name).is_file():
            try:
                found: Any = json.loads((folder / name).read_bytes())
            except ValueError:
                return []  # an export replaces such a file, and names the template's end in it
            return _ids(found) if isinstance(found, Mapping) else []
    return []


def _ids(config: Mapping[str, Any]) -> list[int]:
    text = config.get("text_config")
    found = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
    return [one for one in (found if isinstance(found, list) else [found]) if type(one) is int and 0 <= one < _MOST]


def _renderings(tokenizer: PreTrainedTokenizerBase) -> Iterable[tuple[str, str]]:
    """(what the template writes around texts, role of the last message), of all conversations that it accepts."""
    for roles in _CONVERSATIONS:
        messages = [{"role": role, "content": MARK} for role in roles]
        try:
            opened = roles[-1] != "assistant"
            yield str(tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)), roles[-1]
        except Exception:  # a chat template can raise anything
            continue
