"""The protocol of Anthropic's Messages: system texts, blocks, events by block, and token counts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.agents.environments.gateway.protocol import (
    ACCOUNTS,
    SAMPLING,
    Body,
    Event,
    Fields,
    Protocol,
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

_BILLING = "x-anthropic-billing-header:"
"""Begins a system text that differs between requests of Claude Code and is no part of the prompt."""
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class Messages(Protocol):
    """POST /v1/messages."""

    path = "/v1/messages"
    fields = Fields(
        done=frozenset(
            {"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "thinking"}
            | {"output_config"}
        ),
        refused={
            "container": "there are no containers: tools run in the agent",
            "mcp_servers": "the agent calls its servers itself",
        },
        ignored=SAMPLING
        | ACCOUNTS
        | {"inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id", "betas"},
        hints=frozenset({"context_management"}),
    )

    def request(self, body: Body, noted: list[str]) -> Body:
        messages: list[Message] = []
        if system := _system(body.get("system")):
            messages.append({"role": "system", "content": system})
        loaded = set[str]()
        given = body.get("messages")
        for number, message in enumerate(given if isinstance(given, list) else ()):
            messages += _messages(message, f"messages.{number}", loaded)
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("messages: the last one is the assistant's: a turn that is begun is not continued")
        tools = []
        for number, tool in enumerate(objects(body, "tools")):
            kind = tool.get("type") or "custom"
            if kind != "custom":
                noted.append(f"tools.{number} ({kind:.40})")
            elif not tool.get("defer_loading") or tool.get("name") in loaded:
                tools.append(function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")))
        choice, config = section(body, "tool_choice"), section(body, "output_config")
        noted += ["output_config.effort"] * ("effort" in config)
        form = config.get("format")
        return {
            "messages": messages,
            "tools": tools,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": {"type": form.get("type"), "json_schema": form} if isinstance(form, Mapping) else form,
            "max_tokens": body.get("max_tokens"),
            "stop": body.get("stop_sequences"),
            "stream": body.get("stream"),
            "thoughts_aside": _thinks(body),
        }

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        (turn,) = turns
        text, content = turn["content"], list[Body]()
        if _thinks(body) and (thought := read_thought(text)).before:
            omitted = section(body, "thinking").get("display") == "omitted"
            shown = "" if omitted else thought.shown
            content.append({"type": "thinking", "thinking": shown, "signature": seal(thought.before)})
            text = thought.answer
        calls = turn.get("tool_calls") or ()
        if text or not (calls or content):
            content.append({"type": "text", "text": text, "citations": None})
        content += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": _arguments(call["function"]["arguments"]),
                "caller": {"type": "direct"},
            }
            for call in calls
        ]
        ended = "max_tokens" if turn.get("finish_reason") == "length" else "end_turn"
        ended = "stop_sequence" if turn.get("stop_sequence") else ended
        prompt, sampled = usage_of(turns)
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or MODEL_NAME,
            "content": content,
            "stop_reason": "tool_use" if calls else ended,
            "stop_sequence": turn.get("stop_sequence"),
            "usage": {"input_tokens": prompt, "output_tokens": sampled, **cached},
        }

    def events(self, body: Body, response: Body) -> Iterator[Event]:
        """The message without its content, each block in one piece, and how it ended."""
        begun = {**response, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=begun | {"usage": {**response["usage"], "output_tokens": 0}})
        for index, block in enumerate(response["content"]):
            start, deltas = _pieces(block)
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {name: response[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage=response["usage"])
        yield _event("message_stop")

    def error(self, status: int, message: str, code: str | None = None) -> Body:
        """The form of Anthropic's errors; clients know a prompt that is too long by its text."""
        told = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": told}, "request_id": None}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: no turn is sampled."""

    path = "/v1/messages/count_tokens"

    def request(self, body: Body, noted: list[str]) -> Body:
        """The request whose prompt is counted."""
        return super().request(body, noted) | {"counted": True, "stream": None}

    def response(self, body: Body, turns: Sequence[Message]) -> Body:
        return {"input_tokens": usage_of(turns)[0]}


def _system(system: Any) -> str:
    if isinstance(system, list):
        system = [block for block in system if not _is_bill(block)]
    return text_of(system, "system")


def _is_bill(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def _messages(message: Any, place: str, loaded: set[str]) -> Iterator[Message]:
    """A message of blocks as messages: results of calls are separate ones. Adds the tools that they load."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise ValueError(f"{place}.role: expected user, assistant or system")
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text, calls, told = "", list[Body](), 0
    for number, block in enumerate(blocks):
        at = f"{place}.content.{number}"
        match block:
            case {"type": "tool_use", "id": call_id, "name": name} if role == "assistant":
                calls.append(function_call(call_id, name, json.dumps(block.get("input") or {})))
            case {"type": "thinking", "thinking": str(shown)} if role == "assistant":
                text += unseal(block.get("signature"), shown)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass
            case {"type": "tool_result", "tool_use_id": call_id} if role == "user":
                if text:
                    yield {"role": role, "content": text}
                text, told = "", told + 1
                result = _result(block.get("content"), f"{at}.content", loaded)
                yield {"role": "tool", "tool_call_id": call_id, "content": result}
            case _:
                text += text_of([block], at)
    if text or not told:
        yield {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}


def _result(content: Any, place: str, loaded: set[str]) -> str:
    """The text of a result; a reference to a tool offers it from here on."""
    if not isinstance(content, list):
        return text_of(content, place)
    texts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == "tool_reference":
            loaded.add(str(block.get("tool_name")))
            texts.append({"type": "text", "text": f"tool: {block.get('tool_name')}\n"})
        else:
            texts.append(block)
    return text_of(texts, place)


def _choice(choice: Mapping[str, Any]) -> Any:
    match choice.get("type"):
        case None | "auto" | "none":
            return choice.get("type")
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            raise ValueError(f"tool_choice.type: expected auto, any, tool or none, got {kind!r:.40}")


def _thinks(body: Mapping[str, Any]) -> bool:
    """Whether thoughts are separate blocks."""
    return section(body, "thinking").get("type") not in (None, "disabled")


def _pieces(block: Body) -> tuple[Body, list[Body]]:
    """A block as it begins, and the pieces that complete it."""
    match block["type"]:
        case "thinking":
            sealed = {"type": "signature_delta", "signature": block["signature"]}
            thought = [{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []
            return {**block, "thinking": "", "signature": ""}, [*thought, sealed]
        case "tool_use":
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        case _:
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _arguments(text: str) -> Body:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}
