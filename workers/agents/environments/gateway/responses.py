"""The protocol of OpenAI's Responses: items in and out, responses that continue earlier ones, events by item."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from troupe.workers.agents.environments.gateway.chat import logprobs_of
from troupe.workers.agents.environments.gateway.protocol import (
    ACCOUNTS,
    SAMPLING,
    Body,
    Event,
    Fields,
    Protocol,
    Refused,
    function_call,
    function_tool,
    objects,
    section,
    text_of,
    usage_of,
)
from troupe.workers.agents.environments.gateway.request import MODEL_NAME
from troupe.workers.agents.environments.gateway.thoughts import read_thought, seal, unseal
from troupe.workers.contract.environments import Message

_TEXTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool, whose input is a text, in the form of a function's."""
_JOIN = "__"
"""Between the names of a namespace and of a tool in it."""
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "metadata": {},
    "max_output_tokens": None,
    "max_tool_calls": None,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, and their defaults."""


class Responses(Protocol):
    """POST /v1/responses."""

    path = "/v1/responses"
    fields: ClassVar[Fields] = Fields(
        done=frozenset(
            {"input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text"}
            | {"previous_response_id", "include", "store", "stream"}
        ),
        refused={
            "background": "a response is sampled while its request waits",
            "conversation": "send the items, or previous_response_id",
            "prompt": "there are no stored prompts: send the items",
            "top_logprobs": f"only the log-prob of the sampled token is known: include {_LOGPROBS}",
        },
        ignored=SAMPLING
        | ACCOUNTS
        | {"stream_options", "client_metadata", "access_programs", "image", "max_tool_calls"},
        hints=frozenset({"reasoning", "context_management", "truncation"}),
        neutral={"truncation": "disabled"},
    )

    def __init__(self) -> None:
        self._stored: dict[str, list[Message]] = {}
        """Messages up to each response that a request can continue, without instructions."""

    def request(self, body: Body, noted: list[str]) -> Body:
        """The request with items as messages."""
        instructions, include = body.get("instructions"), body.get("include") or ()
        first = [{"role": "system", "content": text_of(instructions, "instructions", _TEXTS)}] if instructions else []
        form = section(section(body, "text"), "format")
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            choice = {"type": "function", "function": {"name": _joined(choice)}}
        return {
            "messages": [*first, *self._history(body)],
            "tools": list(_tools(body, noted)),
            "tool_choice": choice,
            "parallel_tool_calls": body.get("parallel_tool_calls"),
            "response_format": form or None,
            "max_tokens": body.get("max_output_tokens"),
            "logprobs": _LOGPROBS in include,
            "stream": body.get("stream"),
            "thoughts_aside": True,
        }

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        """A response of items, which later requests can continue."""
        (turn,) = turns
        name, cut = f"resp_{secrets.token_hex(12)}", turn.get("finish_reason") == "length"
        calls = turn.get("tool_calls") or []
        if body.get("store") is not False:
            said = {"role": "assistant", "content": turn["content"], **({"tool_calls": calls} if calls else {})}
            self._stored[name] = [*self._history(body), said]
        status = "incomplete" if cut else "completed"
        prompt, sampled = usage_of(turns)
        return {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": body.get("model") or MODEL_NAME,
            **{field: default if body.get(field) is None else body[field] for field, default in _ECHOED.items()},
            "output": list(_items(body, turn, calls, status)),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """The response without its output, each item in one piece, and the whole response."""
        begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        parts = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        for index, item in enumerate(response["output"]):
            parts += _pieces(item, {"output_index": index, "item_id": item["id"]})
        parts.append((f"response.{response['status']}", {"response": response}))
        for number, (name, data) in enumerate(parts):
            yield name, {"type": name, "sequence_number": number, **data}

    def _history(self, body: Body) -> list[Message]:
        """The messages of a request, behind the messages of the response that it continues."""
        earlier, previous = list[Message](), body.get("previous_response_id")
        if previous:
            if previous not in self._stored:
                why = f"Previous response with id {str(previous)[:60]!r} not found."
                raise Refused(why, "previous_response_not_found")
            earlier = self._stored[previous]
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise ValueError(f"input: expected text or a list of items, got {type(given).__name__}")
        return [*earlier, *_messages(items)]


def _messages(items: Sequence[Any]) -> Iterator[Message]:
    """The messages of items: what the assistant says, thinks and calls between others is one message."""
    turn: Message | None = None
    for number, item in enumerate(items):
        place = f"input.{number}"
        if not isinstance(item, dict):
            raise ValueError(f"{place}: expected an item, got {type(item).__name__}")
        kind = item.get("type", "message")
        if kind in ("reasoning", "function_call", "custom_tool_call") or item.get("role") == "assistant":
            turn = turn or {"role": "assistant", "content": ""}
            _add(turn, item, kind, place)
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "message" and item.get("role") in ("user", "system", "developer"):
            yield {"role": item["role"], "content": text_of(item.get("content"), f"{place}.content", _TEXTS)}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = text_of(item.get("output"), f"{place}.output", _TEXTS)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        else:
            raise ValueError(f"{place}: items of type {kind!r:.40} are not supported")
    if turn is not None:
        yield turn


def _add(turn: Message, item: Body, kind: str, place: str) -> None:
    if kind == "reasoning":
        shown = text_of(item.get("content") or item.get("summary"), place, ("reasoning_text", "summary_text"))
        turn["content"] += unseal(item.get("encrypted_content"), shown)
    elif kind == "message":
        turn["content"] += text_of(item.get("content"), f"{place}.content", _TEXTS)
    else:
        arguments = item.get("arguments") if kind == "function_call" else json.dumps({"input": item.get("input")})
        call = function_call(item.get("call_id"), _joined(item), arguments or "")
        turn.setdefault("tool_calls", []).append(call)


def _tools(body: Body, noted: list[str]) -> Iterator[Body]:
    """The tools as functions, without tools that only the service itself runs."""
    for number, tool in _members(body):
        match tool.get("type"):
            case "function":
                yield function_tool(_joined(tool), tool.get("description"), tool.get("parameters"))
            case "custom":
                yield function_tool(_joined(tool), tool.get("description"), _INPUT)
            case kind:
                noted.append(f"tools.{number} ({kind!s:.40})")


def _members(body: Body) -> Iterator[tuple[int, Body]]:
    """Each tool with the number of its entry; a tool of a namespace has its name as `namespace`."""
    for number, tool in enumerate(objects(body, "tools")):
        if tool.get("type") == "namespace":
            yield from ((number, {**member, "namespace": tool.get("name")}) for member in objects(tool, "tools"))
        else:
            yield number, tool


def _joined(named: Mapping[str, Any]) -> str:
    """The name of a tool as a function's."""
    space = named.get("namespace")
    return f"{space}{_JOIN}{named.get('name')}" if space else str(named.get("name") or "")


def _items(body: Body, turn: Message, calls: Sequence[Body], status: str) -> Iterator[Body]:
    """A turn as items: its thought, its text and its calls."""
    thought = read_thought(turn["content"])
    text, named = turn["content"], {_joined(tool): tool for _, tool in _members(body)}
    if thought.before:
        text = thought.answer
        sealed = "reasoning.encrypted_content" in (body.get("include") or ())
        yield {
            "type": "reasoning",
            "id": _id("rs"),
            "summary": [],
            "content": [{"type": "reasoning_text", "text": thought.shown}],
            "encrypted_content": seal(thought.before) if sealed else None,
        }
    if text or not (calls or thought.before):
        logprobs = (logprobs_of(turn) or {}).get("content") or []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        yield {"type": "message", "id": _id("msg"), "status": status, "role": "assistant", "content": [part]}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        told = named.get(name, {"name": name, "type": "function"})
        own = {"name": told["name"], **({"namespace": told["namespace"]} if "namespace" in told else {})}
        item = {"call_id": call["id"], **own, "status": "completed"}
        if told.get("type") == "custom":
            yield {"type": "custom_tool_call", "id": _id("ctc"), **item, "input": _input(arguments)}
        else:
            yield {"type": "function_call", "id": _id("fc"), **item, "arguments": arguments}


def _input(arguments: str) -> str:
    """The text for a custom tool."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return str(value["input"]) if isinstance(value, dict) and "input" in value else arguments


def _pieces(item: Body, own: Body) -> Iterator[tuple[str, Body]]:
    """The events of an item."""
    kind, index = item["type"], {"output_index": own["output_index"]}
    opened = {**item, "status": "in_progress", **({"content": []} if "content" in item else {})}
    field, name = {
        "function_call": ("arguments", "response.function_call_arguments"),
        "custom_tool_call": ("input", "response.custom_tool_call_input"),
    }.get(kind, ("text", "response.output_text" if kind == "message" else "response.reasoning_text"))
    yield "response.output_item.added", {**index, "item": opened | ({} if field == "text" else {field: ""})}
    for number, part in enumerate(item.get("content") or ()):
        place = {**own, "content_index": number}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
        yield "response.content_part.added", {**place, "part": empty}
        yield f"{name}.delta", {**place, "delta": part["text"], **logprobs}
        yield f"{name}.done", {**place, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**place, "part": part}
    if field != "text":
        yield f"{name}.delta", {**own, "delta": item[field]}
        yield f"{name}.done", {**own, "name": item["name"], field: item[field]}
    yield "response.output_item.done", {**index, "item": item}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
