"""Typed Python functions as tools: their JSON schema from signature and docstring, and calls of them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call

from troupe.workers.agents.sandbox.run import SandboxError, check_sandbox
from troupe.workers.contract.config import first_problem
from troupe.workers.contract.imports import import_attribute, locate

SHIPPED = {
    "calculator": "troupe.workers.agents.environments.calculator:calculator",
    "python": "troupe.workers.agents.environments.python_tool:python",
}
RUN_MODEL_CODE = ("python",)
"""Built-in tools that run code that a model wrote, in a sandbox."""
_ARGUMENT = re.compile(r"^ {4,8}(\w+)(?: \([^)]*\))?: (.*)$")


class ToolCallError(Exception):
    """A call that failed; the policy receives the message."""


@dataclass(frozen=True)
class Tool:
    """One tool."""

    name: str
    schema: Mapping[str, Any]
    """JSON schema of the function, in the form of OpenAI's `tools`."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Calls it with its arguments; raises ToolCallError."""


def load_tools(names: Sequence[str]) -> list[Tool]:
    """The tools of these names.

    Raises:
        ValueError: a name is neither built in nor `package.module:function`, or not a function with typed arguments,
            two tools have the same name, or this machine permits no sandbox and a tool needs one.
    """
    tools = [function_tool(_load(name)) for name in names]
    if twice := sorted({t.name for t in tools if sum(other.name == t.name for other in tools) > 1}):
        raise ValueError(f"two tools have the name {twice[0]}")
    return tools


def _load(name: str) -> Callable[..., Any]:
    if name in RUN_MODEL_CODE:
        try:
            check_sandbox()
        except SandboxError as error:
            raise ValueError(f"{name}: {error}") from error
    function = import_attribute(name, *locate(name, SHIPPED, "tool", "package.module:function"))
    if not callable(function):
        raise ValueError(f"{name}: not a function, got {type(function).__name__}")
    return function


def function_tool(function: Callable[..., Any]) -> Tool:
    """A function as a tool. Raises ValueError for arguments without types."""
    checked = validate_call(function)

    async def call(arguments: dict[str, Any]) -> str:
        try:
            result = checked(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except ValidationError as error:
            raise ToolCallError(first_problem(error)) from error
        except Exception as error:
            raise ToolCallError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, default=str)

    return Tool(function.__name__, function_schema(function), call)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function: types from its signature, descriptions from its Google docstring.

    Raises:
        ValueError: an argument has no type, or one that JSON does not have.
    """
    name = function.__name__
    untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
    if untyped:
        raise ValueError(f"the tool {name} needs a type for its argument {untyped[0]}")
    try:
        target: Any = function
        parameters = TypeAdapter(target).json_schema()
    except (PydanticUserError, TypeError) as error:
        raise ValueError(f"the tool {name} has arguments that JSON does not have: {error}") from error
    description, arguments = _docstring(function)
    for argument, text in arguments.items():
        if argument in parameters.get("properties", {}):
            parameters["properties"][argument]["description"] = text
    for schema in parameters.get("properties", {}).values():
        schema.pop("title", None)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description before the section `Args`, and the descriptions of the arguments in it."""
    text = inspect.getdoc(function) or ""
    head, _, tail = text.partition("\nArgs:\n")
    arguments: dict[str, str] = {}
    current = ""
    for line in tail.splitlines():
        if line and not line.startswith(" "):
            break
        if found := _ARGUMENT.match(line):
            current = found[1]
            arguments[current] = found[2].strip()
        elif current and line.strip():
            arguments[current] += " " + line.strip()
    return " ".join(head.split()), arguments
