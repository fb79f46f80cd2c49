"""What ends a turn of the assistant: one answer for the engine, conversations, offline training and exports."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.data.plain_text import CONFIGS, MARK, configured_ends, special_tokens
from troupe.workers.data.tokenizer import PLAIN_TEMPLATE, load_tokenizer, render_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_ASKED = {"role": "user", "content": "x"}


@dataclass(frozen=True)
class TurnEnds:
    """The tokens that end a turn."""

    ids: frozenset[int]
    """Sampling stops at each of them."""
    texts: tuple[str, ...]
    """Their texts."""
    own: int | None
    """The end of a written (not sampled) turn."""
    closing: tuple[int, ...]
    """What the chat template writes behind the last turn of a conversation, up to the end; empty if that has no special
    token."""
    written: tuple[str, ...]
    """The texts of what it writes behind a turn, the last one or one before others, up to the end."""
    unnamed: str
    """The end that the chat template writes and that the model's folder does not name; empty if it names it."""
    spelled: str
    """Text that the chat template writes behind a turn if it writes no token; sampling does not stop there."""


_known: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, TurnEnds]] = WeakKeyDictionary()


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    """What ends a turn of the assistant: the ends that the model's folder names (the tokenizer's end-of-sequence
    token, `eos_token_id` of its generation configuration or else its configuration), and the template's token
    behind a turn."""
    state = (tokenizer.chat_template, tokenizer.eos_token_id, len(tokenizer))
    known = _known.get(tokenizer)
    if known is None or known[0] != state:
        known = _known[tokenizer] = (state, _find(tokenizer))
    return known[1]


def padding_besides(ends: Collection[int], text_config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """A padding token that ends no turn, the configuration's own if possible: a classifier of transformers reads its
    score at the last token that is not padding."""
    configured = text_config.eos_token_id
    ends = {*ends, *(configured if isinstance(configured, list) else [configured])}
    choices: tuple[Any, ...] = (
        text_config.pad_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        tokenizer.bos_token_id,
    )
    free = [choice for choice in choices if choice is not None and choice not in ends]
    return free[0] if free else (0 if 0 not in ends else text_config.vocab_size - 1)


def without_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The tokens of a turn without its end, if that was sampled."""
    ends = turn_ends(tokenizer)
    if not ids or ids[-1] not in ends.ids:
        return list(ids)
    closed = ends.closing and tuple(ids[-len(ends.closing) :]) == ends.closing
    return list(ids[: -len(ends.closing)] if closed else ids[:-1])


def name_end(model: ModelConfig, folder: Path) -> None:
    """Name the template's end of a turn in an exported model, if its folder does not: other tools would never stop."""
    try:
        ends = turn_ends(load_tokenizer(model))
    except ValueError:  # a critic's model may have no tokenizer
        return
    if not ends.unnamed:
        return
    generation = folder / CONFIGS[0]
    if generation.is_file():
        _change(generation, {"eos_token_id": sorted(ends.ids)})
    for name in _TOKENIZER_SETTINGS:
        if (folder / name).is_file():
            _change(folder / name, {"eos_token": ends.unnamed})


def _change(file: Path, fields: dict[str, Any]) -> None:
    """Set fields of the JSON object in a file. A file without one, which no tool can use, is replaced."""
    try:
        found: Any = json.loads(file.read_bytes())
    except ValueError:
        found = None
    content = {**(found if isinstance(found, dict) else {}), **fields}
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _find(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    eos: Any = tokenizer.eos_token_id
    named = {*configured_ends(Path(tokenizer.name_or_path)), *([] if eos is None else [int(eos)])}
    behind = _behind_a_turn(tokenizer, [])
    last = _closing(tokenizer, behind, named)
    closing: Any = tokenizer.convert_tokens_to_ids(last)
    ids = frozenset({*named, *closing[-1:]})
    before_others = _closing(tokenizer, _behind_a_turn(tokenizer, [_ASKED]), named)
    written = {"".join(run) for run in (last, before_others) if run and last}
    return TurnEnds(
        ids=ids,
        texts=tuple(text for text in map(tokenizer.convert_ids_to_tokens, ids) if isinstance(text, str)),
        own=closing[-1] if closing else eos,
        closing=tuple(closing),
        written=tuple(sorted(written, key=len, reverse=True)),
        unnamed="".join(last[-1:]) if named.isdisjoint(closing) else "",
        spelled="" if last else special_tokens(tokenizer).split(behind, 1)[0].strip(),
    )


def _behind_a_turn(tokenizer: PreTrainedTokenizerBase, following: list[dict[str, Any]]) -> str:
    """What the template writes behind a turn of the assistant; empty if it writes nothing, or fails."""
    if tokenizer.chat_template in (None, PLAIN_TEMPLATE):
        return ""
    try:
        text = render_as_text(tokenizer, [_ASKED, {"role": "assistant", "content": MARK}, *following], open_turn=False)
    except Exception:  # a chat template can raise anything, and then it does not tell
        return ""
    return text.partition(MARK)[2].lstrip()


def _closing(tokenizer: PreTrainedTokenizerBase, behind: str, named: Collection[int]) -> list[str]:
    """The special tokens with which the text behind a turn begins, up to the first end; empty without one."""
    special, run = special_tokens(tokenizer), list[str]()
    while found := special.match(behind):
        run.append(found[0])
        if tokenizer.convert_tokens_to_ids(found[0]) in named:
            return run
        behind = behind[found.end() :]
    return run[:1]
