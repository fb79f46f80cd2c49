"""The tokens of a conversation, turn by turn: what was sampled stays as it was sampled, and is never tokenized again.

After every turn the chat template renders the whole conversation. The text behind the policy's turn, up to the opening
of its next one, is cut off, tokenized and appended. If the template has changed anything before that boundary (it
strips `<think>` from earlier turns, or puts a system message late), the conversation forks: its next prompt is the
template's own rendering, and begins a new row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from troupe.workers.contract.environments import CALL_MARKERS, CALLS, RESULTS, TOOLS, Message, Row, dropped_note
from troupe.workers.contract.text import valid_json, valid_text
from troupe.workers.data.plain_text import as_text, response_text, restored, sampled_text, text_ids
from troupe.workers.data.template_forms import template_forms, with_arguments
from troupe.workers.data.tokenizer import outside_embedding, render_as_text, token_ids
from troupe.workers.data.turn_ends import turn_ends, without_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ParseCalls = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[dict[str, Any]]]]
"""Splits the text of a turn, for the tools offered, into the text without calls and the calls. Raises MalformedCall."""
UnreadCall = Literal["cut", "malformed"]
"""Why no call of a turn is run: the turn was cut at its token limit, or the parser cannot read the call."""
_CONTINUATIONS = (
    *("x", "1", '"zz": 1}', ', "zz": 1}', '": 1}', ": 1}", "zz:1}", ",zz:1}", "<escape>", "zz:<escape>1<escape>"),
    *("<parameter=zz>1</parameter>", '<parameter name="zz">1</parameter>', '<param name="zz">1</param>'),
    *(f'<{tag}parameter name="zz" string="false">1</{tag}parameter>' for tag in ("｜DSML｜", "steptml:")),
    "<arg_key>zz</arg_key><arg_value>1</arg_value>",
)
"""Texts, one of which changes an unfinished call in the form of any parser that reads such a call."""


class MalformedCall(ValueError):
    """A parser cannot read the calls of a turn."""


class ConversationError(ValueError):
    """The chat template cannot render the conversation; the message is its reason."""


@dataclass(frozen=True)
class Added:
    """What `Conversation.add_messages` did."""

    ids: list[int]
    """Tokens that were appended to the prompt."""
    forked: bool = False
    """Whether the template rewrote the history: then the prompt is a new one, and `ids` is empty."""


class Conversation:
    """One conversation, and the prompt of its next turn."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> None:
        """Render the messages before the first turn, with `tools` as JSON schemas of functions. Raises
        ConversationError if the template raised, or wrote a token that the model has no embedding for."""
        self._tokenizer = tokenizer
        self._tools: list[Any] | None = as_text(tokenizer, list(tools)) if tools else None
        self._shown: list[Message] = as_text(tokenizer, list(messages))
        """The whole conversation; only sampled tokens are special tokens in it."""
        self._begun = list(self._shown)
        """The messages before the first turn."""
        self._text = self._render(self._shown)
        """The template's rendering of the latest prompt."""
        self._response: list[int] = []
        self.prompt_ids: list[int] = self._known(token_ids(tokenizer, self._text))
        """The next prompt. Within a row, it only grows."""

    @property
    def messages(self) -> list[Message]:
        return restored(self._shown)

    @property
    def turns(self) -> int:
        """Turns of the policy behind the messages that the conversation began with."""
        return sum(message["role"] == "assistant" for message in self._shown[len(self._begun) :])

    def compacted(self, keep: int, note: str, new: Sequence[Message]) -> Conversation:
        """A new conversation: the messages before the first turn with a note below them, the last turns, and `new`.
        `keep` turns stay with the messages behind them: at least one, and fewer than there are. Raises as
        `add_messages`."""
        short, _ = self.asked(new)  # its last turn has the form that the template reads
        places = [place for place, message in enumerate(self._shown) if message["role"] == "assistant"]
        *before, last = self._begun
        (noted,) = as_text(self._tokenizer, [{**last, "content": f"\n\n{note}"}])
        below = {**last, "content": last["content"] + noted["content"]}
        short._shown = [*before, below, *short._shown[places[-keep] :]]
        short._text, short._response = short._render(short._shown), []
        short.prompt_ids = short._known(token_ids(self._tokenizer, short._text))
        return short

    def asked(self, messages: Sequence[Message]) -> tuple[Conversation, Added]:
        """A copy with further messages, as `add_messages`; this conversation stays as it is."""
        other = copy(self)
        return other, other.add_messages(messages)

    def move_to(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another instance of the same tokenizer from now on: one is not for several threads."""
        self._tokenizer = tokenizer

    def add_response(self, ids: Sequence[int], message: Message) -> None:
        """Append a turn of the policy. The content of the message is the text of the tokens without the one that ends
        the turn (`without_end`, `sampled_text`)."""
        self._response = list(ids)
        self.prompt_ids = [*self.prompt_ids, *ids]
        self._shown.append(message)

    def add_messages(self, messages: Sequence[Message]) -> Added:
        """Append what follows a turn of the policy, up to the opening of its next turn. Raises ConversationError if the
        template raised, or wrote a token that the model has no embedding for."""
        *before, turn = self._shown
        new = as_text(self._tokenizer, list(messages))
        # What was sampled is the text of the turn. Templates that need the structure of its calls get that instead. The
        # turn stays in that form: in both, its calls would be there twice.
        shown = {name: value for name, value in turn.items() if name != "tool_calls"}
        try:
            text = self._render([*before, shown, *new])
            behind = self._behind(text, [*before, shown])
        except ConversationError:
            if "tool_calls" not in turn:
                raise
            shown = {**turn, "content": ""}
            text = self._render([*before, shown, *new])
            behind = self._behind_calls(text, [*before, shown])
        self._shown = [*before, shown, *new]
        self._text = text
        if behind is None:
            self.prompt_ids = self._known(token_ids(self._tokenizer, text))
            return Added([], forked=True)
        added = self._known(self._tokenize_behind(behind))
        self.prompt_ids = [*self.prompt_ids, *added]
        return Added(added)

    def _render(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        shown = list(messages)
        if any("tool_calls" in message for message in shown) and template_forms(self._tokenizer).object_arguments:
            shown = [with_arguments(message) for message in shown]
        try:
            return render_as_text(self._tokenizer, shown, open_turn=open_turn, tools=self._tools)
        except Exception as error:  # a chat template can raise anything
            raise ConversationError(f"{type(error).__name__}: {error}") from error

    def _known(self, ids: list[int]) -> list[int]:
        """The tokens. Raises ConversationError if the model lacks an embedding of one."""
        if why := outside_embedding(self._tokenizer, ids):
            raise ConversationError(why)
        return ids

    def _behind(self, text: str, until_turn: Sequence[Message]) -> str | None:
        """The part of a rendering behind the policy's turn, and behind its end if that was sampled. None if the
        template has changed the text before it, or does not write the end of the turn there (it merges messages of one
        role, or writes something instead of an empty turn)."""
        content = until_turn[-1]["content"]
        if not text.startswith(self._text):
            return None
        place = end_of(content, text, len(self._text))
        if place is None:
            return None
        behind, sampled, ends = text[place:], self._sampled_end(), turn_ends(self._tokenizer)
        if not sampled:
            return behind
        stripped = behind.lstrip()
        end = next((end for end in (sampled, *ends.written) if stripped.startswith(end)), None)
        if end is None:
            other = bool(ends.written) or stripped.startswith(ends.texts)
            return None if other or not (content.strip() or self._leaves_empty(until_turn)) else behind
        # Nothing tells white space before the end of an empty turn from the turn's own.
        closed = bool(content.strip()) or behind.startswith(end)
        return stripped[len(end) :] if closed else None

    def _leaves_empty(self, until_turn: Sequence[Message]) -> bool:
        """Whether the template writes nothing but the policy's own white space for an empty turn."""
        closed = self._render(until_turn, open_turn=False)
        return closed in (self._text, self._text + until_turn[-1]["content"])

    def _behind_calls(self, text: str, until_turn: Sequence[Message]) -> str | None:
        """The same if the template writes the calls of the turn in its own form."""
        closed = self._render(until_turn, open_turn=False)
        if not (closed.startswith(self._text) and text.startswith(closed)):
            return None
        sampled = self._sampled_end()
        written = turn_ends(self._tokenizer).written or (str(self._tokenizer.eos_token or sampled),)
        places = [(place, end) for end in written if end and (place := closed.rfind(end, len(self._text))) >= 0]
        if not places:
            return None
        place, end = max(places)
        return text[place + len(end) if sampled else place :]

    def _sampled_end(self) -> str:
        """Text of the tokens that end the turn; empty if none were sampled."""
        own = without_end(self._tokenizer, self._response)
        return str(self._tokenizer.decode(self._response[len(own) :], skip_special_tokens=False))

    def _tokenize_behind(self, text: str) -> list[int]:
        """Tokens of the text behind a turn. If the turn's end was sampled, the text is tokenized together with it,
        because some tokenizers put a space before a text that follows nothing."""
        last = self._response[-1:]
        if not self._sampled_end():
            return text_ids(self._tokenizer, text)
        ids = text_ids(self._tokenizer, str(self._tokenizer.decode(last, skip_special_tokens=False)) + text)
        return ids[1:] if ids[:1] == last else text_ids(self._tokenizer, text)


class RawConversation(Conversation):
    """A conversation whose prompts are texts or token ids as they are, without the chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
        self._tokenizer, self._shown, self._response = tokenizer, list(messages), list[int]()
        self.prompt_ids = self._known(self._ids(messages, lambda text: token_ids(tokenizer, text)))

    def add_messages(self, messages: Sequence[Message]) -> Added:
        """Append texts or token ids. The text of a turn lacks its end, so that a text behind it repeats that. If it
        does not, the policy's end is not in the prompt: the conversation forks. Raises ConversationError if a token has
        no embedding."""
        end, new = self._sampled_end(), list(messages)
        repeats = bool(new) and new[0]["content"].startswith(end)
        forked = bool(new and end) and "token_ids" not in new[0] and not repeats
        if repeats:
            new[0] = new[0] | {"content": new[0]["content"].removeprefix(end)}
        self._shown += messages
        added = self._known(self._ids(new, self._tokenize_behind))
        if not forked:
            self.prompt_ids = [*self.prompt_ids, *added]
            return Added(added)
        before, own = self.prompt_ids[: -len(self._response)], without_end(self._tokenizer, self._response)
        self.prompt_ids = [*before, *own, *self._ids(new, lambda text: text_ids(self._tokenizer, text))]
        return Added([], forked=True)

    @staticmethod
    def _ids(messages: Sequence[Message], encode: Callable[[str], list[int]]) -> list[int]:
        ids = [message["token_ids"] if "token_ids" in message else encode(message["content"]) for message in messages]
        return [int(token) for part in ids for token in part]


def end_of(content: str, text: str, start: int) -> int | None:
    """Position in `text` behind `content`, which begins at `start`; None if something else does.

    Templates trim contents, so white space may differ. If it does, the position is behind the last character of the
    content that is none.
    """
    if text.startswith(content, start):
        return start + len(content)
    place = start
    for character in content:
        if character.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text) or text[place] != character:
            return None
        place += 1
    return place


@dataclass(frozen=True)
class TurnReader:
    """Starts conversations and reads turns, on the thread that owns the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    parse: ParseCalls | None = None
    """Parser of tool calls, or None if turns are plain text."""
    dropped: dict[str, None] = field(default_factory=dict)
    """What the chat template left out of conversations that had it (`troupe.workers.data.template_forms`)."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        """The conversation with its first prompt. Raises ConversationError."""
        conversation = Conversation(self.tokenizer, messages, tools)
        used = {TOOLS, RESULTS} if tools else set[str]()
        used |= {CALLS for message in messages if message.get("tool_calls")}
        new = [name for name in template_forms(self.tokenizer).dropped if name in used and name not in self.dropped]
        if new:
            self.dropped.update(dict.fromkeys(new))
            logger.warning("%s", dropped_note(new))
        return conversation

    def start_raw(self, messages: Sequence[Message]) -> Conversation:
        """The conversation of a prompt without the chat template. Raises ConversationError."""
        return RawConversation(self.tokenizer, messages)

    def adopt(self, conversation: Conversation) -> None:
        """Continue a conversation that another reader began."""
        conversation.move_to(self.tokenizer)

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of every token; a part of a character is U+FFFD."""
        return [str(self.tokenizer.decode([token], skip_special_tokens=False)) for token in ids]

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None, *, cut: bool) -> tuple[Message, Message]:
        """From the tokens of a turn to the message for the environment and the one for the history.

        The environment gets the text without special tokens other than the tags of thoughts. The history shows what
        was sampled, special tokens included, up to the token that ends the turn. The calls of a turn that was cut are
        not read: some parsers complete the arguments of a call that does not end, and others see no call in it. A turn
        that ends without such a token ended at a stop string, which may stand inside a call: that is malformed.
        """
        own = without_end(self.tokenizer, ids)
        text = response_text(self.tokenizer, own)
        raw = str(self.tokenizer.decode(own, skip_special_tokens=False))
        message: Message = {"role": "assistant", "content": text}
        history: Message = {"role": "assistant", "content": sampled_text(self.tokenizer, own)}
        if self.parse is not None and tools:
            rest, calls = ("", []) if cut else self._calls(self.parse, raw, tools)
            if calls and len(own) == len(ids) and not self._is_whole(self.parse, raw, tools, calls):
                calls = None
            if calls:
                calls = valid_json(calls)  # the arguments of a call are JSON, which can hold half a character
                message |= {"content": valid_text(rest), "tool_calls": calls}
                history["tool_calls"] = as_text(self.tokenizer, calls)
            elif cut or calls is None or any(marker in raw for marker in CALL_MARKERS):
                unread: UnreadCall = "cut" if cut else "malformed"
                message["unread_call"] = unread
        return message, history

    @staticmethod
    def _calls(parse: ParseCalls, raw: str, tools: Sequence[Any]) -> tuple[str, list[dict[str, Any]] | None]:
        """The text without calls and the calls of a turn, or None if the parser cannot read them."""
        try:
            return parse(raw, tools)
        except MalformedCall:
            return "", None

    def _is_whole(self, parse: ParseCalls, raw: str, tools: Sequence[Any], calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the calls have ended: no text behind them changes what they are called with."""
        functions = [call["function"] for call in calls]
        longer = (self._calls(parse, raw + more, tools)[1] for more in _CONTINUATIONS)
        return all([call["function"] for call in found[: len(calls)]] == functions for found in longer if found)


def read_row(prompt: Mapping[str, Any], seed: int) -> Row:
    """A row of the PROMPTS pool, as an environment sees it."""
    messages = tuple(json.loads(prompt["messages"]))
    return Row(messages, prompt["answer"], json.loads(prompt["metadata"]), seed)
