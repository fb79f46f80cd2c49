"""Requests of the chat-completions protocol that force the form of a response: calls of tools, and JSON.

A form is a JSON schema: vLLM's structured outputs permit only its tokens. Calls that a request forces are plain JSON,
as in vLLM's own server, whatever form the chat template has for calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NO_ARGUMENTS = {"type": "object", "properties": {}}


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
