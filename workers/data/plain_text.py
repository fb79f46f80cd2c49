"""Texts of prompts, environments and tools stay text: what reads like a special token in them does not become one.

A chat template writes special tokens as text, and the rendering is tokenized as a whole. A `CUT` inside every special
token that stands in a message keeps it apart from the template's: the rendering is tokenized in pieces, which
end there. Jinja, the tokenizer and the comparisons of renderings see the same text otherwise.

A tokenizer may also make a special token of a text that does not have it: normalization turns `＜|end|＞` into
`<|end|>`, or a piece of the vocabulary is one. So the special tokens of a piece are compared with the ones that stand
in it. If they differ, the texts between them are tokenized apart, in parts that have none.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from troupe.workers.contract.text import is_thought_tag

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerBase

ALLOW_SPECIAL = "allow_special"
"""The setting of a tokenizer (`init_kwargs`) with which special tokens in texts become their ids."""
CUT = "\ufdd0"
"""Stands inside the text of a special token that is none: a noncharacter of Unicode, which no text has."""
_ANCHORS = ("\n", "x", "0")
"""Texts before which a text is tokenized that follows another: some tokenizers put a space before a first text."""
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


@dataclass(frozen=True)
class _Special:
    """The special tokens of a tokenizer."""

    state: Any
    """What they were found for."""
    pattern: re.Pattern[str]
    """Finds them in a text."""
    beginnings: frozenset[str]
    """What could become one together with the text behind it."""
    longest: int
    tokens: Mapping[str, AddedToken]
    """By their text, tokens that have an id and are more than the tokenizer's mark of unknown text."""
    ids: Mapping[int, str]
    """Their texts by their ids."""
    tags: frozenset[int]
    """Ids of the tokens marked as special that begin or end a thought."""
    hidden: frozenset[int]
    """Ids of the other tokens that are marked as special."""


_known: WeakKeyDictionary[PreTrainedTokenizerBase, _Special] = WeakKeyDictionary()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Finds the texts of special tokens, the longest first: marked ones, and others that the chat template writes
    around turns or that the model's folder names as ends (`unmarked_control_tokens`)."""
    return _special(tokenizer).pattern


def _special(tokenizer: PreTrainedTokenizerBase) -> _Special:
    state = (tokenizer.chat_template, tokenizer.name_or_path, len(tokenizer))
    known = _known.get(tokenizer)
    if known is None or known.state != state:
        added = {one: token.content for one, token in tokenizer.added_tokens_decoder.items() if token.special}
        marked = added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        tags = frozenset(one for one, content in marked.items() if is_thought_tag(str(content)))
        texts = {*added.values(), *marked.values(), *unmarked_control_tokens(tokenizer)} - {""}
        beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        tokens = {
            token.content: token
            for one, token in tokenizer.added_tokens_decoder.items()
            if token.content in texts and (one != tokenizer.unk_token_id or one == tokenizer.eos_token_id)
        }
        ids = {one: token.content for one, token in tokenizer.added_tokens_decoder.items() if token.content in tokens}
        known = _known[tokenizer] = _Special(
            state=state,
            pattern=_finds(texts),
            beginnings=beginnings,
            longest=max(map(len, texts), default=0),
            tokens=tokens,
            ids=ids,
            tags=tags,
            hidden=frozenset(marked) - tags,
        )
    return known


def as_text(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """A message, or a part, in which no text is a special token; noncharacters that this module uses become U+FFFD."""
    if isinstance(value, str):
        text = _clean(value)
        return text if tokenizer.init_kwargs.get(ALLOW_SPECIAL) is True else _cut(_special(tokenizer), text)
    if isinstance(value, dict):
        return {as_text(tokenizer, name): as_text(tokenizer, part) for name, part in value.items()}
    return [as_text(tokenizer, part) for part in value] if isinstance(value, list | tuple) else value


def restored(value: Any) -> Any:
    """The message as it was."""
    if isinstance(value, dict):
        return {restored(name): restored(part) for name, part in value.items()}
    if isinstance(value, list):
        return [restored(part) for part in value]
    return value.replace(CUT, "") if isinstance(value, str) else value


def sampled_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of sampled tokens, as a message: special tokens that were sampled are some, and text is text."""
    special = _special(tokenizer)
    whole = _decoded(tokenizer, ids)
    if tokenizer.init_kwargs.get(ALLOW_SPECIAL) is True:
        return whole
    if not special.pattern.search(whole):
        return _cut(special, whole)
    parts, text = list[str](), list[int]()
    for token in ids:
        if special.pattern.fullmatch(own := _decoded(tokenizer, [token])):
            parts += [_cut(special, _decoded(tokenizer, text)), own]
            text = []
        else:
            text.append(token)
    parts.append(_cut(special, _decoded(tokenizer, text)))
    found = "".join(parts)
    return found if restored(found) == whole else _cut(special, whole)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of rendered text, without what a tokenizer puts around a text."""
    first, *others = text.split(CUT)
    ids = _piece(tokenizer, _alone, first)
    return [*ids, *(token for part in others for token in _piece(tokenizer, _following, part))]


_Encode = Callable[["PreTrainedTokenizerBase", str], list[int]]


def _piece(tokenizer: PreTrainedTokenizerBase, encode: _Encode, text: str) -> list[int]:
    """Token ids of a text with the special tokens that stand in it, and no others."""
    special, ids = _special(tokenizer), encode(tokenizer, text)
    if tokenizer.init_kwargs.get(ALLOW_SPECIAL) is True:
        return ids
    found = [match for match in special.pattern.finditer(text) if match.group() in special.tokens]
    if [special.ids[token] for token in ids if token in special.ids] == [match.group() for match in found]:
        return ids
    known, ids, place = {content: one for one, content in special.ids.items()}, list[int](), 0
    for match in found:
        token, between = special.tokens[match.group()], text[place : match.start()]
        ids += _plain(tokenizer, encode if place == 0 else _following, between.rstrip() if token.lstrip else between)
        ids.append(known[match.group()])
        place = _spaces_end(text, match.end()) if token.rstrip else match.end()
    return [*ids, *_plain(tokenizer, encode if place == 0 else _following, text[place:])]


def _spaces_end(text: str, start: int) -> int:
    """Where the spaces from there on end."""
    return next((place for place in range(start, len(text)) if not text[place].isspace()), len(text))


def _plain(tokenizer: PreTrainedTokenizerBase, encode: _Encode, text: str) -> list[int]:
    """Token ids of a text without special tokens: in halves if it becomes one, or none of a single character."""
    known, ids = _special(tokenizer).ids, encode(tokenizer, text)
    if len(text) < 2 or known.keys().isdisjoint(ids):
        return [token for token in ids if token not in known]
    middle = len(text) // 2
    return [*_plain(tokenizer, encode, text[:middle]), *_plain(tokenizer, _following, text[middle:])]


def _cut(special: _Special, text: str) -> str:
    """The text with a cut behind the first character of every special token, also of one that may begin at its end."""
    place = 0
    while found := special.pattern.search(text, place):
        place = found.start() + 2
        text = f"{text[: place - 1]}{CUT}{text[place - 1 :]}"
    last = (text[-length:] for length in range(1, min(special.longest, len(text)) + 1))
    return f"{text}{CUT}" if any(end in special.beginnings for end in last) else text


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return _clean(str(tokenizer.decode(list(ids), skip_special_tokens=False)))


def _clean(text: str) -> str:
    return text.replace(CUT, "\ufffd").replace(MARK, "\ufffd")


def _alone(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text before which nothing stands."""
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _following(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that follows another text."""
    for anchor in _ANCHORS:
        before, ids = _alone(tokenizer, anchor), _alone(tokenizer, anchor + text)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return _alone(tokenizer, text)


def response_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of sampled tokens without special ones, but with the tags of thoughts, special in some models: without
    them a thought's numbers would be the answer's, and a cut thought an answer."""
    special = _special(tokenizer)
    if special.tags.isdisjoint(ids):
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return str(tokenizer.decode([token for token in ids if token not in special.hidden], skip_special_tokens=False))


def token_counts(ends: Sequence[int], text: str, ids: list[int], decode: Callable[[list[int]], str]) -> list[int]:
    """Number of tokens up to each of the increasing character positions `ends`; the text's end counts all, as some
    print nothing. Raises ValueError if the tokens do not decode to the text."""
    if decode(ids) != text:
        raise ValueError("the response's tokens do not decode to its text")

    @functools.cache
    def shown(count: int) -> int:
        """Characters of the text that its first `count` tokens decode to, without a character that is cut in its bytes:
        the decoder's replacement for it differs from the text."""
        part = decode(ids[:count])
        if text.startswith(part):
            return len(part)
        pairs = enumerate(zip(part, text, strict=False))
        return next((place for place, (one, other) in pairs if one != other), len(text))

    # Decoding a prefix of the tokens is correct for every tokenizer, and the search needs few per step.
    counts: list[int] = []
    count = 0
    for end in ends:
        count = len(ids) if end == len(text) else bisect_left(range(len(ids)), end, lo=count, key=shown)
        counts.append(count)
    return counts


def unmarked_control_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Unmarked tokens that the template writes around turns or that end a sequence, as DeepSeek's `<｜User｜>`."""
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
