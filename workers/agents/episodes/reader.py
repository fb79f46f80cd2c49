"""Between tokens and messages: what an episode needs of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from troupe.workers.agents.episodes.conversation import Conversation
from troupe.workers.contract.environments import CALL_MARKERS, Message, Row
from troupe.workers.contract.text import valid_json, valid_text
from troupe.workers.data.plain_text import as_text, sampled_text
from troupe.workers.data.response_text import response_text
from troupe.workers.data.turn_ends import without_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def read_row(prompt: Mapping[str, Any], seed: int) -> Row:
    """A row of the PROMPTS pool, as an environment sees it."""
    messages = tuple(json.loads(prompt["messages"]))
    return Row(messages, prompt["answer"], json.loads(prompt["metadata"]), seed)


@dataclass(frozen=True)
class TurnReader:
    """Starts conversations and reads turns, on the thread that owns the tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    parse: ParseCalls | None = None
    """Parser of tool calls, or None if turns are plain text."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        """The conversation with its first prompt. Raises ConversationError."""
        return Conversation(self.tokenizer, messages, tools)

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
