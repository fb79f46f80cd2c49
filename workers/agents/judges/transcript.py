"""What was said in a prompt and in an episode, as a judge reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from troupe.workers.contract.environments import Message


def said(messages: str) -> str:
    """The prompt as text; a single message stands alone."""
    turns = json.loads(messages)
    if len(turns) == 1:
        return str(turns[0]["content"])
    return "\n\n".join(map(_turn, turns))


def played(messages: str, conversation: str) -> str:
    """All that was said in an episode, without the messages of the prompt at its beginning.

    An environment can show the prompt, a part of it, other messages before it, or something else.
    """
    prompt, turns = json.loads(messages), json.loads(conversation)
    words, read = list[str](), 0
    for place, turn in enumerate(turns):
        found = next((at for at in range(read, len(prompt)) if _behind(turn, prompt[at]) is not None), None)
        if turn["role"] == "assistant" and (found is None or not _is_example(prompt, found, turns, place)):
            words += map(_turn, turns[place:])  # from the first turn of the policy
            break
        if found is None:
            words.append(_turn(turn))
            continue
        rest = _behind(turn, prompt[found])
        words += [_turn(turn | {"content": rest})] if rest else []
        read = found + 1
    return "\n\n".join(words)


def _behind(turn: Message, asked: Message) -> str | None:
    """The text of a message behind one of the prompt, in separate paragraphs, or None if it does not begin with it."""
    content, known = str(turn["content"]).strip(), str(asked["content"]).strip()
    if turn["role"] != asked["role"] or not content.startswith(known):
        return None
    rest = content[len(known) :]
    return rest.strip() if not rest or rest.startswith("\n\n") else None


def _is_example(prompt: Sequence[Message], at: int, turns: Sequence[Message], place: int) -> bool:
    """Whether the turn at `place` is the prompt's answer `at`, not the same answer of the policy.

    Then it is between the messages that the prompt has it between.
    """
    for step in (-1, 1):
        if not 0 <= at + step < len(prompt):
            continue
        beside, asked = turns[place + step : place + step + 1] if place + step >= 0 else [], prompt[at + step]
        if not any(turn["role"] == asked["role"] and asked["content"].strip() in turn["content"] for turn in beside):
            return False
    return True


def _turn(turn: Message) -> str:
    """A message as text, with its calls of tools."""
    calls = [call.get("function") or {} for call in turn.get("tool_calls") or ()]
    called = [f"[calls {call.get('name')} with {call.get('arguments')}]" for call in calls]
    content = str(turn["content"])
    return f"{turn['role']}: " + "\n".join([content, *called] if content else called)
