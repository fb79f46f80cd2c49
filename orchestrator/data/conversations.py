"""Conversations in the forms that data have them: texts, lists of messages, and whole conversations with answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from troupe.orchestrator.data.bad_rows import BadRow
from troupe.orchestrator.data.calls import tool_calls
from troupe.orchestrator.spec.sources import PromptText

Message = dict[str, Any]
"""`role` and `content`, and the fields of `_FURTHER` that it has."""

_SPEAKERS = ("system", "user", "assistant", "tool")
_SPEAKER_NAMES = {"human": "user", "gpt": "assistant", "observation": "tool", "developer": "system"}
_SPEAKER_NAMES |= {"function": "tool", "function_call": "assistant"}
"""Names that ShareGPT, its relatives and OpenAI have for speakers, besides the usual ones."""
_FURTHER = {
    "assistant": frozenset({"tool_calls", "function_call", "reasoning_content", "weight"}),
    "tool": frozenset({"tool_call_id", "name"}),
}
"""Fields that are read of a speaker's message, besides its role and content."""


_SPOKEN = (re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):"), re.compile(r"(?:\A\s*|\n?)### (Human|Assistant):"))
"""What begins a turn in a text with a whole conversation: in HH-RLHF, and in sets from OpenAssistant."""


STEP_END = "ки"
"""Ends each step in a text of Math-Shepherd."""


def require_whole(text: str, name: str) -> None:
    """Raise BadRow for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{name} has half a surrogate pair, which no tokenizer takes") from None


def spoken_turns(value: Any) -> Any:
    """The messages of a text that has all turns of a conversation, or the value if it is no such text. `\\n\\nHuman:
    2+2?\\n\\nAssistant: 4` has two. An empty turn at the end, which a response fills, is no message."""
    if not isinstance(value, str):
        return value
    for marker in _SPOKEN:
        before, *parts = marker.split(value)
        speakers, contents = parts[::2], [text.strip() for text in parts[1::2]]
        if before or speakers[:1] != ["Human"] or "Assistant" not in speakers:
            continue
        if not contents[-1]:
            del speakers[-1], contents[-1]
        roles = ("user" if speaker == "Human" else "assistant" for speaker in speakers)
        return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    return value


def chat_messages(prompt: Any, source: PromptText, system: Any = None, *, plain: bool = False) -> list[Message]:
    """The chat messages of a prompt, text or list (`plain`: text alone). Raises BadRow."""
    prompt = prompt if plain else spoken_turns(prompt)
    if system is not None and not isinstance(system, str):
        raise BadRow("the system message is not text")
    if isinstance(prompt, str):
        said = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        require_template(plain)
        said = read_messages(prompt)
    else:
        raise BadRow("the prompt is empty" if prompt in (None, []) else "the prompt is neither text nor messages")
    last = said[-1]
    if last["role"] not in ("user", "tool"):
        raise BadRow(f"the last message is the {last['role']}'s, so there is nothing to respond to")
    if not last["content"].strip():
        raise BadRow("the prompt is empty")
    length = characters(said)
    if length > source.max_chars:
        raise BadRow(f"the prompt has {length} characters, more than max_chars {source.max_chars}")
    # str.replace, not str.format: the row's text and the template may contain braces
    said[-1] = last | {"content": source.template.replace("{prompt}", last["content"])}
    system = source.system if system is None or not system.strip() else system
    if system and said[0]["role"] != "system":
        require_template(plain)
        said.insert(0, {"role": "system", "content": system})
    return [{name: value for name, value in message.items() if name != "weight"} for message in said]


def response_turns(value: Any, what: str, *, plain: bool = False) -> list[Message]:
    """The turns of a response given as text or as a list of messages; `what` names it. Raises BadRow."""
    if isinstance(value, list):
        require_template(plain)
        turns = read_messages(value)
    elif isinstance(value, str):
        turns: list[Message] = [{"role": "assistant", "content": value}]
    else:
        raise BadRow(f"the {what} is neither text nor messages")
    return require_response(turns, what)


def require_response(turns: list[Message], what: str) -> list[Message]:
    """The turns, which must begin and end with the assistant's and not be empty. Raises BadRow."""
    if not turns:
        raise BadRow(f"the {what} is empty")
    for place, turn in (("first", turns[0]), ("last", turns[-1])):
        if turn["role"] != "assistant":
            raise BadRow(f"the {place} message of the {what} is the {turn['role']}'s, not the assistant's")
        if "weight" in turn:
            raise BadRow(f"the {place} message of the {what} has weight 0, and nothing else is trained with it")
    if any(turn["role"] == "assistant" and not (turn["content"].strip() or "tool_calls" in turn) for turn in turns):
        raise BadRow(f"the {what} is empty")
    return turns


def split_conversation(value: Any, *, last: bool) -> tuple[list[Message], list[Message]]:
    """Prompt and response of a conversation: its `last` message, or all from the assistant's first. Raises BadRow."""
    value = spoken_turns(value)
    if not isinstance(value, list) or not value:
        raise BadRow("the conversation is not a list of messages")
    said = read_messages(value)
    own = [place for place, message in enumerate(said) if message["role"] == "assistant"]
    if not own:
        raise BadRow("the conversation has no message of the assistant")
    trained = [place for place in own if "weight" not in said[place]]
    if not trained:
        raise BadRow("all messages of the assistant have weight 0")
    if trained[-1] < own[-1]:
        del said[trained[-1] + 1 :]  # nothing behind it is trained
    place = len(said) - 1 if last else trained[0]
    return said[:place], require_response(said[place:], "conversation")


def is_whole(value: Any) -> bool:
    """Whether an answer is a whole conversation: messages that begin with someone else's than the assistant's."""
    return isinstance(value, list) and bool(value) and read_messages(value[:1])[0]["role"] != "assistant"


def split_answers(values: Sequence[Any], names: Sequence[str]) -> tuple[list[Message], list[list[Message]]]:
    """Prompt (the common beginning) and responses of whole conversations, as `extract_prompt` of TRL, except that
    each response keeps at least one message and begins with the assistant's. Raises BadRow."""
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, list) or not value:
            raise BadRow(f"the {name} is not a conversation, and there is no prompt")
    said = [read_messages(value) for value in values]
    shortest = min(map(len, said)) - 1
    columns = zip(*(messages[:shortest] for messages in said), strict=True)
    shared = len(list(takewhile(lambda column: all(message == column[0] for message in column), columns)))
    for messages, name in zip(said, names, strict=True):
        if messages[shared]["role"] != "assistant":
            raise BadRow(f"the {name} does not begin with the prompt of the other: message {shared} differs")
        require_response(messages[shared:], name)
    return said[0][:shared], [messages[shared:] for messages in said]


def marked_steps(text: str, labels: str) -> tuple[str, list[str], list[str]]:
    """Prompt, steps and labels of a text in which `ки` ends each step, and of the same text with + or - there
    instead; the first step begins with `Step 1:` (Math-Shepherd). Raises BadRow."""
    *steps, rest = text.split(STEP_END)
    found = re.fullmatch(r"([+-])".join(map(re.escape, [*steps, rest])), labels, re.DOTALL)
    if not steps or rest.strip() or found is None:
        raise BadRow(f"the labels are not the text of the steps with + or - in the places of {STEP_END}")
    begins, first, own = steps[0].partition("Step 1:")
    prompt, steps[0] = (begins, first + own) if first else ("", begins)
    return prompt.strip(), steps, ["1" if mark == "+" else "0" for mark in found.groups()]


def characters(messages: Sequence[Message]) -> int:
    """Length of all messages, with their calls."""
    return sum(len(message["content"]) + len(str(message.get("tool_calls", ""))) for message in messages)


def require_template(plain: bool) -> None:
    """Raise BadRow for messages without a chat template."""
    if plain:
        raise BadRow("a list of messages needs a chat template, and model.chat_template is none")


def read_messages(items: list[Any]) -> list[Message]:
    """Messages with `role` and `content`, `from` and `value` (ShareGPT), or pairs of `input` and `output`. Raises
    BadRow for others, or a field that decides what is trained and is not read."""
    if items and all(isinstance(item, dict) and set(item) == {"input", "output"} for item in items):
        turns = [(role, item[name]) for item in items for role, name in (("user", "input"), ("assistant", "output"))]
        items = [{"role": role, "content": text} for role, text in turns]
    return [_message(item, index) for index, item in enumerate(items)]


def _message(item: Any, index: int) -> Message:
    if not isinstance(item, dict):
        raise BadRow(f"message {index} is not an object with role and content")
    filled = {key: value for key, value in item.items() if value not in (None, [])}
    if {"from", "value"} <= set(filled):
        filled["role"], filled["content"] = filled.pop("from"), filled.pop("value")
    role, content = filled.get("role"), _text(filled.get("content"))
    if role == "function_call":  # LLaMA-Factory, APIGen-MT: the text is the call
        filled, content = filled | {"function_call": content}, ""
    role = _SPEAKER_NAMES.get(role, role) if isinstance(role, str) else role
    read = _FURTHER.get(role, frozenset()) if isinstance(role, str) else frozenset[str]()
    ignored = {"name"} | ({"weight"} if role != "assistant" else set[str]())
    if further := sorted(set(filled) - {"role", "content"} - read - ignored):
        raise BadRow(
            f"message {index} has {', '.join(map(str, further))}, which is not read: it must have role and content"
        )
    calls = [call for name in ("tool_calls", "function_call") if name in filled for call in tool_calls(filled[name])]
    content = "" if calls and content is None else content
    if not isinstance(content, str):
        raise BadRow(f"message {index} must have role and content, both text")
    if role not in _SPEAKERS:
        raise BadRow(f"message {index} has role {role!r:.60}; known: {', '.join(_SPEAKERS)}")
    if filled.get("weight", 1) not in (0, 1) and role == "assistant":
        raise BadRow(f"message {index} has weight {filled['weight']!r:.60}; a weight is 0 or 1")
    texts = {
        name: filled[name] for name in ("reasoning_content", "tool_call_id", "name") if name in filled and name in read
    }
    if wrong := next((name for name, value in texts.items() if not isinstance(value, str)), None):
        raise BadRow(f"message {index} has a {wrong} that is not text")
    message = {"role": role, "content": content, **texts}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"weight": 0} if role == "assistant" and filled.get("weight", 1) == 0 else {})


def _text(content: Any) -> Any:
    """The text of content in parts, if all of them are text; other content as it is."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    is_text = parts and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if is_text else content
