"""What a chat template makes of tools: which of them it renders, and the form in which it reads the arguments of calls.

Templates ignore what they do not know without an error. Each is tried once, on a short conversation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from troupe.workers.contract.environments import CALLS, RESULTS, TOOLS
from troupe.workers.data.tokenizer import render_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME, _ID, _ARGUMENTS, _RESULT = "zzname", "zzcall000", {"zzkey": "zzvalue"}, "zzresult"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": _NAME,
        "parameters": {"type": "object", "properties": {"zzkey": {"type": "string", "description": "zzkey"}}},
    },
}
_USER = {"role": "user", "content": "zz"}
_ANSWER = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": _RESULT}


@dataclass(frozen=True)
class TemplateForms:
    """What one template makes of tools."""

    object_arguments: bool
    """Whether it reads the arguments of a call as an object; otherwise as JSON text."""
    text_arguments: bool
    """Whether it renders arguments that are JSON text as it renders the object."""
    dropped: tuple[str, ...]
    """What it does not render: of `TOOLS`, `CALLS` and `RESULTS`."""


def template_forms(tokenizer: PreTrainedTokenizerBase) -> TemplateForms:
    """What the tokenizer's chat template makes of tools."""
    return _tried(tokenizer, str(tokenizer.chat_template))


def as_read(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None
) -> list[dict[str, Any]]:
    """The messages of a row, with calls' arguments in their own form if the template reads it. Raises ValueError if
    it leaves out tools, calls or results that the row has."""
    calling = any("tool_calls" in message for message in messages)
    used = {TOOLS: bool(tools), CALLS: calling, RESULTS: any(message["role"] == "tool" for message in messages)}
    if not any(used.values()):
        return messages
    forms = template_forms(tokenizer)
    if dropped := [name for name in forms.dropped if used[name]]:
        remedy = "set model.chat_template to a template that does"
        raise ValueError(f"the chat template does not render {', '.join(dropped)}, which the row has: {remedy}")
    if not forms.object_arguments:
        return [_with_calls(message, _with_text) for message in messages]
    return messages if forms.text_arguments else list(map(with_arguments, messages))


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": text}}


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as objects; what is no JSON object stays as it is."""
    return _with_calls(message, _with_object)


def _with_calls(message: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return message if not calls else message | {"tool_calls": list(map(change, calls))}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


@lru_cache(maxsize=16)
def _tried(tokenizer: PreTrainedTokenizerBase, template: str) -> TemplateForms:
    """`template` is part of the key: a tokenizer can be given another one."""

    def attempt(*messages: dict[str, Any], tools: list[Any] | None = None) -> str | None:
        try:
            return render_as_text(tokenizer, list(messages), open_turn=True, tools=tools)
        except Exception:  # a chat template can raise anything
            return None

    objects, texts = _turn(_ARGUMENTS), _turn(json.dumps(_ARGUMENTS))
    as_object = attempt(_USER, objects, _ANSWER) or attempt(_USER, objects)
    # A template that writes the arguments as they are would write an object as Python does.
    object_arguments = as_object is not None and str(_ARGUMENTS) not in as_object
    as_text = attempt(_USER, texts, _ANSWER) or attempt(_USER, texts)
    calls = objects if object_arguments else texts
    spoken = {"role": "assistant", "content": _NAME}
    shown = {
        TOOLS: attempt(_USER, tools=[_TOOL]) != attempt(_USER),
        CALLS: "zzvalue" in (attempt(_USER, calls) or attempt(_USER, calls, _ANSWER) or ""),
        RESULTS: any(_RESULT in (attempt(_USER, turn, _ANSWER) or "") for turn in (spoken, calls)),
    }
    dropped = tuple(name for name, is_shown in shown.items() if not is_shown)
    return TemplateForms(object_arguments, as_text == as_object, dropped)


def _turn(arguments: Any) -> dict[str, Any]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
