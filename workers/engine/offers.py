"""What the installed vLLM offers: options of its engines and parsers of tool calls. Runs in a separate process."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

_SIMPLE = {int: "int", float: "float", bool: "bool", str: "str", NoneType: "None"}


def offers(_request: None) -> Iterator[dict[str, Any]]:
    """Yield `options` with their types (none if one is not simple), and `parsers` with whether they read text."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    yield {
        "options": {field.name: _simple_types(field.type) for field in dataclasses.fields(AsyncEngineArgs)},
        "parsers": {name: _reads_text(ToolParserManager.get_tool_parser(name)) for name in names},
    }


def _simple_types(annotation: Any) -> list[str]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [_SIMPLE[part] for part in parts] if set(parts) <= _SIMPLE.keys() else []


def _reads_text(parser: type[Any]) -> bool:
    """Whether a parser has the method, not only its abstract form: some read the engine's tokens."""
    method = inspect.unwrap(parser.extract_tool_calls)
    return NotImplementedError.__name__ not in method.__code__.co_names
