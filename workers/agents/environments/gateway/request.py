"""The chat-completions protocol: what a request of an agent may ask for, and the body of a response.

An option that would change a response is honoured or refused, not ignored: an agent would be trained on responses that
it did not ask for. The exceptions are options that clients always send: the temperature and its kin, which the spec
decides, and hints such as `reasoning_effort`, which a run logs once.

A request can force the form of a response: calls of tools, or JSON. A form is a JSON schema: vLLM's structured outputs
permit only its tokens. Calls that a request forces are plain JSON, as in vLLM's own server, whatever form the chat
template has for calls.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from troupe.workers.contract.config import first_problem
from troupe.workers.contract.environments import Message, Observation, message_text, read_stop, read_tools

MODEL_NAME = "policy"
MAX_CHOICES = 16
_NOT_TOLD = ("finish_reason", "usage", "unread_call", "logprobs")
"""Fields of a turn that do not belong to the message of a response."""
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
    *("temperature", "top_p", "top_k", "min_p", "seed"),
}
"""Options that a response does not depend on, and options of the distribution, which the spec sets (`sampling`)."""
_HINTS = ("reasoning_effort", "reasoning", "verbosity")
"""Options that ask for a manner, and that some agents always send: the policy does not learn of them."""
_DISTRIBUTION = "it would change the distribution that is trained"
_FORM = "use response_format, or sampling.structured in the spec"
_FUNCTIONS = "use tools and tool_choice, which have replaced it"
_REFUSED = {
    "top_logprobs": "only the log-prob of the sampled token is known: use logprobs",
    "min_tokens": _DISTRIBUTION,
    "return_token_ids": "the tokens are recorded in the run's trajectories",
    "logit_bias": _DISTRIBUTION,
    "presence_penalty": _DISTRIBUTION,
    "frequency_penalty": _DISTRIBUTION,
    "repetition_penalty": _DISTRIBUTION,
    "best_of": "every sampled response is trained: use n, and choose in the agent",
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "guided_json": _FORM,
    "guided_regex": _FORM,
    "guided_choice": _FORM,
    "guided_grammar": _FORM,
    "structured_outputs": _FORM,
    "chat_template": "the template is the spec's: model.chat_template",
}
_NEUTRAL = {"best_of": 1, "repetition_penalty": 1, "function_call": "none", "modalities": ["text"]}
"""Values that ask for nothing, besides empty ones."""


class StreamOptions(BaseModel):
    """What a stream has besides the response."""

    model_config = ConfigDict(strict=True, frozen=True)
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The options on which a response depends; whatever else the body has is in `model_extra`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")
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


def read_options(body: Any) -> ChatRequest:
    """The typed options of a request. Raises ValueError for one that the endpoint does not honour."""
    try:
        options = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    for name, value in (options.model_extra or {}).items():
        if name not in _WITHOUT_EFFECT and name not in _HINTS and value and value != _NEUTRAL.get(name):
            raise ValueError(f"{name:.60}: {_REFUSED.get(name, 'the endpoint has no such option')}; leave it out")
    return options


def hints(options: ChatRequest) -> list[str]:
    """Names of the options of a request that are ignored though they could change a response."""
    return [name for name in _HINTS if (options.model_extra or {}).get(name)]


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
    """JSON schema of a response that calls one named tool, as its arguments, or any tools, as a list of calls.

    Args:
        tools: Tools of the request.
        forced: Name of the tool; True: any tools.
        one_call: The list has one call.
    """
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

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    stop: tuple[str, ...]
    max_tokens: int | None
    schema: dict[str, Any] | None
    """JSON schema of the response."""
    logprobs: bool
    """Whether the response has the log-probs of its tokens."""
    forced: bool | str
    """Whether the response must be calls of tools, or the name of the tool that it must call."""
    one_call: bool
    """Whether the agent takes at most one call of a tool from the response."""
    answer: asyncio.Future[Message] = field(repr=False)
    conversation: str = ""
    """Name of its conversation."""
    known: int = 0
    """Messages of that conversation before this turn, or 0 if it begins here."""

    @property
    def observation(self) -> Observation:
        """The request as a turn of its conversation."""
        return Observation(
            self.messages[self.known :],
            tools=self.tools,
            restart=not self.known,
            conversation=self.conversation,
            stop=self.stop,
            max_tokens=self.max_tokens,
            structured=None if self.schema is None else {"json_schema": self.schema},
            refusable=True,
            logprobs=self.logprobs,
        )

    def read(self, message: Message, prefix: str) -> Message:
        """The response with the calls that the request forced, whose names begin with a prefix, or with its first."""
        calls = message.get("tool_calls") or ()
        if self.one_call and len(calls) > 1:
            return message | {"tool_calls": calls[:1]}
        if not self.forced or calls or message.get("finish_reason") == "length":
            return message
        calls = forced_calls(message["content"], self.forced, prefix)
        return message | {"content": "", "tool_calls": calls} if calls else message


def read_request(options: ChatRequest) -> list[Choice]:
    """The responses that a request asks for. Raises ValueError, TypeError or KeyError for what is not supported."""
    messages = [plain(message) for message in options.messages]
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
            messages=messages,
            tools=offered,
            stop=stops,
            max_tokens=options.max_completion_tokens or options.max_tokens,
            schema=schema,
            logprobs=options.logprobs is True,
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


def first_difference(known: Sequence[Message], given: Sequence[Message]) -> str:
    """How a history differs in meaning from the conversation that it should continue; empty if it continues it.

    Clients write an equal turn in many forms: arguments dumped again, own ids, an `index` from the stream, a `name`,
    stripped text. None of these changes what was said.
    """
    for number, (one, other) in enumerate(zip(known, given, strict=False)):
        for field_name, (said, now) in _meanings(one, other):
            if said != now:
                return f"messages.{number} ({one['role']}): {field_name} {said!r:.100} became {now!r:.100}"
    return "" if len(given) >= len(known) else f"it has {len(given)} of {len(known)} messages"


def _meanings(one: Message, other: Message) -> Iterator[tuple[str, tuple[Any, Any]]]:
    yield "role", (one["role"], other["role"])
    sampled = one["role"] == "assistant"
    yield "content", tuple(message["content"].strip() if sampled else message["content"] for message in (one, other))
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


def completion(messages: Sequence[Message]) -> dict[str, Any]:
    """The body of a response."""
    choices = [
        {
            "index": number,
            "message": {**_told(message), "content": message["content"] or None},
            "finish_reason": "tool_calls" if message.get("tool_calls") else message.get("finish_reason", "stop"),
            "logprobs": _logprobs(message.get("logprobs")),
        }
        for number, message in enumerate(messages)
    ]
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": choices,
        "usage": _usage([message["usage"] for message in messages if "usage" in message]),
    }


def _told(message: Message) -> Message:
    """The fields of a turn that belong to the message."""
    return {name: value for name, value in message.items() if name not in _NOT_TOLD}


def _logprobs(tokens: Sequence[Sequence[Any]] | None) -> dict[str, Any] | None:
    """The log-probs of a choice, or None if not requested."""
    if tokens is None:
        return None
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, value in tokens
    ]
    return {"content": content, "refusal": None}


def _usage(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Tokens of a request: its prompt once, and all responses."""
    prompt = max((count["prompt_tokens"] for count in counts), default=0)
    completion = sum(count["completion_tokens"] for count in counts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
