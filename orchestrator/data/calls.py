"""Tools and the calls of tools in the forms that data have them: lists, objects or their JSON, with the name bare or
inside of `function`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from troupe.orchestrator.data.bad_rows import BadRow
from troupe.workers.contract.environments import read_tools

CALLED = '"tool_calls": ['
"""What the JSON of messages with calls has, and no text in it."""


def tool_schemas(value: Any) -> list[dict[str, Any]]:
    """The tools of a row as JSON schemas of functions; empty if there are none. A bare function is wrapped
    (APIGen-MT), and parameters that are properties alone (xLAM) become an object's. Raises BadRow."""
    parsed = _parsed(value)
    try:
        return [*(read_tools([_schema(tool) for tool in parsed] if isinstance(parsed, list) else parsed or None) or ())]
    except (TypeError, ValueError) as error:
        raise BadRow(str(error)) from None


def _schema(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function") or {name: value for name, value in tool.items() if name != "type"}
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if isinstance(parameters, Mapping) and not isinstance(parameters.get("type"), str | list):
        bare = "properties" not in parameters and all(isinstance(value, Mapping) for value in parameters.values())
        form = {"type": "object"} | ({"properties": {**parameters}} if bare else {**parameters})
        function = {**function, "parameters": form}
    return {"type": tool.get("type", "function") if "function" in tool else "function", "function": function}


def tool_calls(value: Any) -> list[dict[str, Any]]:
    """A turn's calls: one or a list, with `name` and `arguments`, or `function` around. Raises BadRow."""
    parsed = _parsed(value)
    return [_call(number, one) for number, one in enumerate(parsed if isinstance(parsed, list) else [parsed])]


def is_calls(value: Any) -> bool:
    """Whether a response is a list of calls instead of text or messages (xLAM)."""
    calls = _parsed(value)
    return isinstance(calls, list) and bool(calls) and all({"name", "arguments"} <= {*_object(one)} for one in calls)


def _object(value: Any) -> Mapping[str, Any]:
    """The value, or an empty object for something else."""
    return value if isinstance(value, Mapping) else {}


def _call(number: int, value: Any) -> dict[str, Any]:
    function = _object(_object(value).get("function", value))
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name or _object(value).get("type", "function") != "function":
        raise BadRow(f"call {number} is not one of a function with a name")
    if not isinstance(_parsed(arguments) if arguments else {}, Mapping):
        raise BadRow(f"the arguments of call {number} are neither an object nor the JSON of one: {arguments!r:.60}")
    id_ = _object(value).get("id")
    whole = {"type": "function", "function": {"name": name, "arguments": {} if arguments is None else arguments}}
    return whole if id_ is None else {"id": str(id_), **whole}


def _parsed(value: Any) -> Any:
    """The value of a text that is JSON; other values as they are."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
