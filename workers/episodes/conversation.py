"""The tokens of a conversation, turn by turn: what was sampled stays as it was sampled, and is never tokenized again.

After every turn the chat template renders the whole conversation. The text behind the policy's turn, up to the opening
of its next one, is cut off, tokenized and appended. Where the template has changed anything before that boundary (it
strips `<think>` from earlier turns, or puts a system message late), the conversation forks: its next prompt is the
template's own rendering, and begins a new row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.environments import Message
from troupe.workers.data.tokenizer import render, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> None:
        """Render the beginning.

        Args:
            tokenizer: Tokenizer with a chat template.
            messages: The messages before the first turn.
            tools: Tools that the template offers, as JSON schemas of functions.

        Raises:
            ConversationError: the template raised.
        """
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self.messages: list[Message] = list(messages)
        """The whole conversation."""
        self._text = self._render(self.messages)
        """The template's rendering of the latest prompt."""
        self._response: list[int] = []
        self.prompt_ids: list[int] = token_ids(tokenizer, self._text)
        """The next prompt. Within a row, it only grows."""

    def move_to(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use another instance of the same tokenizer from now on: one is not for several threads."""
        self._tokenizer = tokenizer

    def add_response(self, ids: Sequence[int], message: Message) -> None:
        """Append a turn of the policy.

        Args:
            ids: The sampled tokens.
            message: The turn as the history shows it: `content` is the text of the tokens without the one that ends the
                turn (`without_end`); `tool_calls` may be there as well.
        """
        self._response = list(ids)
        self.prompt_ids = [*self.prompt_ids, *ids]
        self.messages.append(message)

    def add_messages(self, messages: Sequence[Message]) -> Added:
        """Append what follows a turn of the policy, up to the opening of its next turn.

        Raises:
            ConversationError: the template raised.
        """
        *before, turn = self.messages
        # What was sampled is the text of the turn. Templates that need the structure of its calls get that instead. The
        # turn stays in that form: in both, its calls would be there twice.
        shown = {name: value for name, value in turn.items() if name != "tool_calls"}
        try:
            text = self._render([*before, shown, *messages])
            behind = self._behind(text, shown["content"])
        except ConversationError:
            if "tool_calls" not in turn:
                raise
            shown = {**turn, "content": ""}
            text = self._render([*before, shown, *messages])
            behind = self._behind_calls(text, [*before, shown])
        self.messages = [*before, shown, *messages]
        self._text = text
        if behind is None:
            self.prompt_ids = token_ids(self._tokenizer, text)
            return Added([], forked=True)
        added = self._tokenize_behind(behind)
        self.prompt_ids = [*self.prompt_ids, *added]
        return Added(added)

    def _render(self, messages: Sequence[Message], *, open_turn: bool = True) -> str:
        try:
            return render(self._tokenizer, list(messages), open_turn=open_turn, tools=self._tools)
        except Exception as error:  # a chat template can raise anything
            raise ConversationError(f"{type(error).__name__}: {error}") from error

    def _behind(self, text: str, content: str) -> str | None:
        """The part of a rendering behind the policy's turn; None if the template has changed what is before it."""
        if not text.startswith(self._text):
            return None
        place = end_of(content, text, len(self._text))
        return None if place is None else text[place:]

    def _behind_calls(self, text: str, until_turn: Sequence[Message]) -> str | None:
        """The same where the template writes the calls of the turn in its own form."""
        closed = self._render(until_turn, open_turn=False)
        end = self._end_text()
        if not (closed.startswith(self._text) and text.startswith(closed) and end in closed[len(self._text) :]):
            return None
        return text[closed.rindex(end) :]

    def _end_text(self) -> str:
        """Text of the token that ends a turn: the one sampled, or the tokenizer's."""
        own = without_end(self._tokenizer, self._response)
        if len(own) < len(self._response):
            return str(self._tokenizer.decode(self._response[-1:], skip_special_tokens=False))
        return str(self._tokenizer.eos_token or "")

    def _tokenize_behind(self, text: str) -> list[int]:
        """Tokens of the text behind a turn; where the turn's end was sampled, without it.

        The text is tokenized together with the end of the turn, because some tokenizers put a space before a text that
        follows nothing.
        """
        own = without_end(self._tokenizer, self._response)
        if len(own) == len(self._response):
            return self._ids(text)
        end = self._end_text()
        stripped = text.lstrip()
        rest = stripped[len(end) :] if stripped.startswith(end) else text
        ids = self._ids(end + rest)
        return ids[1:] if ids[:1] == self._response[-1:] else self._ids(rest)

    def _ids(self, text: str) -> list[int]:
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return list(ids)


def without_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The tokens of a turn without the special token that ends it, if one was sampled."""
    return list(ids[:-1]) if ids and ids[-1] in tokenizer.all_special_ids else list(ids)


def end_of(content: str, text: str, start: int) -> int | None:
    """Position in `text` behind `content`, which begins at `start`; None if something else does.

    Templates trim contents, so white space may differ. Where it does, the position is behind the last character of the
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
