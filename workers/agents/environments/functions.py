"""Typed Python functions as tools: their JSON schema from signature and docstring, and the built-in ones."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError, validate_call

from troupe.workers.agents.sandbox.run import SandboxError, SandboxLimits, SandboxResult, check_sandbox, run_python
from troupe.workers.contract.config_base import first_problem
from troupe.workers.contract.expressions import BINARY, evaluate
from troupe.workers.contract.imports import import_attribute, locate

SHIPPED = {
    "calculator": "troupe.workers.agents.environments.functions:calculator",
    "python": "troupe.workers.agents.environments.functions:python",
}
RUN_MODEL_CODE = ("python",)
"""Built-in tools that run code that a model wrote, in a sandbox."""
LIMITS = SandboxLimits(timeout_s=10.0, output_kib=64)
"""What the code of one call may use."""
LONGEST_ANSWER = 4000
"""Characters of an answer: it becomes a part of the conversation."""
_TRACEBACK_LINES = 8
_LONGEST_EXPRESSION = 200
_LARGEST, _LARGEST_EXPONENT = 10**50, 100
"""Bounds of the calculator."""
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


def load_tools(names: Sequence[str], in_threads: Container[str] = ()) -> list[Tool]:
    """The tools of these names; each call of a function in `in_threads` runs in a separate thread. Raises ValueError if
    a name is neither built in nor `package.module:function`, or not a function with typed arguments, two tools have the
    same name, or this machine permits no sandbox and a tool needs one."""
    functions = [(_load(name), name in RUN_MODEL_CODE) for name in names]
    tools = [function_tool(one, in_thread=waits or one.__name__ in in_threads) for one, waits in functions]
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


def function_tool(function: Callable[..., Any], *, in_thread: bool = False) -> Tool:
    """A function as a tool. Raises ValueError for arguments without types. With `in_thread` each call runs in a
    separate thread; otherwise calls of a function that is no coroutine run one after another."""
    checked = validate_call(function)

    async def call(arguments: dict[str, Any]) -> str:
        try:
            result = await asyncio.to_thread(checked, **arguments) if in_thread else checked(**arguments)
            if inspect.isawaitable(result):
                result = await result
        except ValidationError as error:
            raise ToolCallError(first_problem(error)) from error
        except Exception as error:
            raise ToolCallError(f"{type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else json.dumps(result, default=str)

    return Tool(function.__name__, function_schema(function), call)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function: types from its signature, descriptions from its Google docstring. Raises ValueError if
    an argument has no type, or one that JSON does not have."""
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


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"longer than {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    for node in ast.walk(tree.body):
        match node:
            case ast.Constant(int() | float() as number) if not isinstance(number, bool):
                _bounded(number)
            case _ if not isinstance(node, (ast.BinOp, ast.UnaryOp, ast.UAdd, ast.USub, *BINARY)):
                raise ValueError("not an arithmetic expression")
    value = evaluate(tree.body, compute=_calculate)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _calculate(op: ast.operator, left: float, right: float) -> float:
    if isinstance(op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
        raise ValueError("the exponent is too large")
    return _bounded(BINARY[type(op)](left, right))


def _bounded(value: float) -> float:
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > _LARGEST:
        raise ValueError("the result is too large, or no real number")
    return value


def python(code: str) -> str:
    """Run a Python program and return what it prints. Nothing is kept from one call to the next.

    Args:
        code: The program. It has the standard library, no network and no files, and must print its results.

    Returns:
        What the program printed; if it failed, also the end of its error message.
    """
    return describe_result(run_python(code, limits=LIMITS))


def describe_result(result: SandboxResult, longest: int = LONGEST_ANSWER) -> str:
    """A result as a tool answers it, in at most `longest` characters: the start of the output and the whole error."""
    error = _describe_error(result, longest // 2)
    output = result.stdout.rstrip()
    room = longest - len(error) - 1
    if result.stdout_discarded or len(output) > room:
        note = f"\n[output cut: {len(result.stdout) + result.stdout_discarded} characters]"
        output = output[: max(0, room - len(note))] + note
    return "\n".join(part for part in (output, error) if part) or "[no output: print the result]"


def _describe_error(result: SandboxResult, longest: int) -> str:
    """Why a program failed, in at most `longest` characters; empty if it did not fail."""
    if result.ok:
        return ""
    lines = result.stderr.strip().splitlines()[-_TRACEBACK_LINES:]
    if result.timed_out:
        lines = [f"[stopped after {LIMITS.timeout_s:g} seconds]"]
    elif result.out_of_memory:
        lines.append(f"[out of memory: the limit is {LIMITS.memory_mib} MiB]")
    elif result.signal is not None:
        lines.append(f"[ended by signal {result.signal}]")
    elif not lines:
        lines = [f"[exit code {result.exit_code}]"]
    return "\n".join(lines)[-longest:]
