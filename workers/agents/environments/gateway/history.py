"""All conversations of a sample, and which of them a request continues: compared by what was said, not by its form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.workers.agents.environments.gateway.request import Choice, plain
from troupe.workers.agents.environments.gateway.thoughts import read_thought
from troupe.workers.contract.environments import Message


@dataclass(frozen=True)
class _KeptConversation:
    """A conversation whose last turn is answered."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    raw: bool

    @property
    def size(self) -> tuple[int, int]:
        """Orders conversations by how much of a history they are: messages, and texts if each is one prompt."""
        longest = self.messages if self.raw else ()
        return len(self.messages), sum(len(one["content"]) + len(one.get("token_ids", ())) for one in longest)


class Conversations:
    """The conversations of a sample that requests can continue, by their names."""

    def __init__(self) -> None:
        self._kept: dict[str, _KeptConversation] = {}

    def answered(self, choice: Choice, response: Message) -> None:
        """Keep a conversation with its new turn."""
        turn = plain(response)
        if choice.options.raw:  # a prompt that continues the turn has what ended it
            whole = turn["content"] + response.get("behind_stop", "")
            turn |= {"content": whole, "token_ids": response.get("token_ids", [])}
        self._kept[choice.conversation] = _KeptConversation([*choice.messages, turn], choice.tools, choice.options.raw)

    def forget(self, name: str) -> None:
        """Drop a conversation that cannot be continued."""
        self._kept.pop(name, None)

    def place(self, choice: Choice, new: str, taken: set[str]) -> str:
        """Give a request the longest conversation that it continues and that is not `taken` already, or a new one.
        Returns how it repeats a conversation with a difference; empty if it does not."""
        repeated, beside = "", False
        choice.conversation, choice.added = new, choice.messages
        for name, kept in sorted(self._kept.items(), key=lambda item: item[1].size, reverse=True):
            if choice.options.counted or kept.raw != choice.options.raw:
                continue
            found, added = _raw_difference(kept, choice) if kept.raw else _difference(kept, choice)
            if not found and name not in taken:
                taken.add(name)
                choice.conversation, choice.added, choice.known = name, added, True
                return ""
            beside = beside or not found
            if not kept.raw and _repeats(kept.messages, choice.messages):
                repeated = repeated or found
        begins = "a request repeats its conversation, but begins a new row of the sample with the whole prompt"
        return f"{begins}: {repeated}" if repeated and not beside else ""


def _difference(kept: _KeptConversation, choice: Choice) -> tuple[str, list[Message]]:
    """(how the request differs from a conversation, or empty; what it adds to it)."""
    found = first_difference(kept.messages, choice.messages, thoughts_aside=choice.options.thoughts_aside)
    if not found and kept.tools != choice.tools:
        found = "the tools are others"
    return found, choice.messages[len(kept.messages) :]


def _raw_difference(kept: _KeptConversation, choice: Choice) -> tuple[str, list[Message]]:
    """The same for prompts without the chat template: their token ids, or their texts, continue each other."""
    (before, turn), (prompt,) = kept.messages, choice.messages
    name = "token_ids" if "token_ids" in prompt else "content"
    if ("token_ids" in before) != (name == "token_ids"):
        return "the prompt is another", []
    known, given = before[name] + turn[name], prompt[name]
    return ("", [prompt | {name: given[len(known) :]}]) if given[: len(known)] == known else ("another prompt", [])


def _repeats(known: Sequence[Message], given: Sequence[Message]) -> bool:
    """Whether a request is as long as a conversation, and begins with the same messages up to its first turn."""
    asked = next((place for place, message in enumerate(known) if message["role"] == "assistant"), 1)
    return len(given) >= len(known) and not first_difference(known[:asked], given[:asked])


def first_difference(known: Sequence[Message], given: Sequence[Message], *, thoughts_aside: bool = False) -> str:
    """How a history differs in meaning from the conversation that it should continue; empty if it continues it.

    Clients write an equal turn in many forms: arguments dumped again, own ids, an `index` from the stream, a `name`,
    stripped text. None of these changes what was said. With `thoughts_aside` neither do the thoughts of turns.
    """
    for number, (one, other) in enumerate(zip(known, given, strict=False)):
        if one == other:  # as most are, so that a long history costs little
            continue
        for field_name, (said, now) in _meanings(one, other, thoughts_aside):
            if said != now:
                return f"messages.{number} ({one['role']}): {field_name} {said!r:.100} became {now!r:.100}"
    return "" if len(given) >= len(known) else f"it has {len(given)} of {len(known)} messages"


def _meanings(one: Message, other: Message, thoughts_aside: bool) -> Iterator[tuple[str, tuple[Any, Any]]]:
    yield "role", (one["role"], other["role"])
    said, now = one["content"], other["content"]
    if one["role"] == "assistant":
        said, now = ((read_thought(text).answer if thoughts_aside else text).strip() for text in (said, now))
    yield "content", (said, now)
    yield "tool_calls", (_called(one), _called(other))


def _called(message: Message) -> list[tuple[str, str]]:
    """Name and arguments of each call, arguments in one form."""
    functions = [call.get("function") for call in message.get("tool_calls") or ()]
    return [
        (str(function.get("name")), _one_form(function.get("arguments"))) if isinstance(function, dict) else ("", "")
        for function in functions
    ]


def _one_form(arguments: Any) -> str:
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments).strip()
