"""The request that every protocol of the gateway is translated to: what a response may be asked for, and its choices.

A request can force the form of a response: calls of tools, or JSON. A form is a JSON schema: vLLM's structured outputs
permit only its tokens. Calls that a request forces are plain JSON, as in vLLM's own server, whatever form the chat
template has for calls.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from troupe.workers.contract.config_base import first_problem
from troupe.workers.contract.environments import Message, Observation, message_text, read_stop, read_tools

MODEL_NAME = "policy"
MAX_CHOICES = 16
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_TEXT_ALONE = {"role", "content"}
"""Fields of nearly all messages of a long history, which every request has."""


class StreamOptions(BaseModel):
    """What a stream has besides the response."""

    model_config = ConfigDict(strict=True, frozen=True)
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """What a response depends on, by the names of chat completions."""

    model_config = ConfigDict(strict=True, frozen=True)
    messages: list[Any] = Field(min_length=1)
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    raw: bool = False
    """Whether the messages are the text of the prompt, or its token ids, without the chat template."""
    counted: bool = False
    """Whether only the number of tokens of the prompt is wanted."""
    thoughts_aside: bool = False
    """Whether a history may lack the thoughts of earlier turns, which the protocol has beside their texts."""


def read_options(body: Mapping[str, Any]) -> ChatRequest:
    """The typed options of a request. Raises ValueError for one of another form."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error


def forced_tool(tools: Sequence[Mapping[str, Any]], choice: Any) -> bool | str:
    """Whether `tool_choice` forces a call, or the name of the tool that it forces. Raises ValueError."""
    names = [tool["function"]["name"] for tool in tools]
    match choice:
        case "auto" | "none":
            return False
        case "required" if names:
            return True
        case {"type": "function", "function": {"name": str() as name}} if name in names:
            return name
        case "required" | {"type": "function"}:
            raise ValueError(f"tool_choice: the request has no such tool; it has: {', '.join(names) or 'none'}")
        case _:
            raise ValueError(f"tool_choice: expected auto, none, required or a function, got {choice!r:.60}")


def forced_schema(tools: Sequence[Mapping[str, Any]], forced: bool | str, one_call: bool = False) -> dict[str, Any]:
    """JSON schema of a response that calls the tool `forced`, as its arguments, or any tools (True), as a list of
    calls."""
    functions = [tool["function"] for tool in tools]
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or _NO_ARGUMENTS)
        if function["name"] == forced:
            return parameters
        definitions |= parameters.pop("$defs", {})  # references begin at the top of a schema
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema |= {"maxItems": 1} if one_call else {}
    return schema | ({"$defs": definitions} if definitions else {})


def forced_calls(text: str, forced: bool | str, prefix: str) -> list[dict[str, Any]]:
    """The calls in a response of that form; none if it has another."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = [{"name": forced, "parameters": value}] if isinstance(forced, str) else value
    calls = []
    for number, call in enumerate(found if isinstance(found, list) else ()):
        match call:
            case {"name": str() as name, "parameters": dict() as arguments}:
                function = {"name": name, "arguments": json.dumps(arguments)}
                calls.append({"id": f"{prefix}_{number}", "type": "function", "function": function})
            case _:
                return []
    return calls


def response_schema(response_format: Any) -> dict[str, Any] | None:
    """JSON schema of `response_format`, or None for any text. Raises ValueError."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
        case _:
            shown = f"got {response_format!r:.60}"
            raise ValueError(f"response_format: expected text, json_object or json_schema with a schema, {shown}")


@dataclass
class Choice:
    """One response that a request waits for."""

    options: ChatRequest
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    stop: tuple[str, ...]
    schema: dict[str, Any] | None
    """JSON schema of the response."""
    forced: bool | str
    """Whether the response must be calls of tools, or the name of the tool that it must call."""
    one_call: bool
    """Whether the agent takes at most one call of a tool from the response."""
    answer: asyncio.Future[Message] = field(repr=False)
    conversation: str = ""
    """Name of its conversation."""
    added: list[Message] = field(default_factory=list)
    """Messages behind what that conversation has."""
    known: bool = False
    """Whether the conversation has turns, so that it does not begin here."""

    @property
    def observation(self) -> Observation:
        """The request as a turn of its conversation."""
        return Observation(
            self.added,
            tools=self.tools,
            restart=not self.known,
            conversation=self.conversation,
            stop=self.stop,
            max_tokens=self.options.max_completion_tokens or self.options.max_tokens,
            structured=None if self.schema is None else {"json_schema": self.schema},
            refusable=True,
            logprobs=self.options.logprobs is True,
            raw=self.options.raw,
            counted=self.options.counted,
        )

    def read(self, message: Message, prefix: str) -> Message:
        """The response with the calls that the request forced, whose ids begin with a prefix, or with its first. A text
        that ended the turn because the request named it is its `stop_sequence`, and is left out of the content."""
        calls = message.get("tool_calls") or ()
        found = [(place, text) for text in self.stop if (place := message["content"].find(text)) >= 0]
        if found and not calls and message.get("finish_reason") == "stop":
            place, text = min(found)
            behind = {"stop_sequence": text, "behind_stop": message["content"][place:]}
            message = message | behind | {"content": message["content"][:place]}
        if self.one_call and len(calls) > 1:
            return message | {"tool_calls": calls[:1]}
        if not self.forced or calls or message.get("finish_reason") == "length":
            return message
        calls = forced_calls(message["content"], self.forced, prefix)
        return message | {"content": "", "tool_calls": calls} if calls else message


def read_request(options: ChatRequest) -> list[Choice]:
    """The responses that a request asks for. Raises ValueError, TypeError or KeyError for what is not supported."""
    messages = list(options.messages) if options.raw else [plain(message) for message in options.messages]
    stop = options.stop or ()
    stops = read_stop([stop] if isinstance(stop, str) else stop)
    tools, tool_choice = options.tools or [], options.tool_choice or "auto"
    read_tools(tools)
    forced = forced_tool(tools, tool_choice)
    one_call = options.parallel_tool_calls is False
    schema = forced_schema(tools, forced, one_call) if forced else response_schema(options.response_format)
    offered = tools if tools and tool_choice != "none" else None
    loop = asyncio.get_running_loop()
    return [
        Choice(
            options=options,
            messages=messages,
            tools=offered,
            stop=stops,
            schema=schema,
            forced=forced,
            one_call=one_call,
            answer=loop.create_future(),
        )
        for _ in range(options.n or 1)
    ]


def plain(message: Any) -> Message:
    """A message with the fields that a chat template reads."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise TypeError("messages: expected objects with a role")
    content = message_text(message.get("content"), "messages: content")
    if message.keys() == _TEXT_ALONE:
        return {"role": message["role"], "content": content}
    if message.get("function_call"):
        raise ValueError("messages: function_call is not supported, only tool_calls, which have replaced it")
    result: Message = {"role": message["role"], "content": content}
    calls = message.get("tool_calls")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise TypeError("messages: tool_calls: expected a list of objects")
    for name in ("tool_call_id", "name"):
        if not isinstance(message.get(name), str | None):
            raise TypeError(f"messages: {name}: expected text")
    return result | {name: message[name] for name in ("tool_calls", "tool_call_id", "name") if message.get(name)}
