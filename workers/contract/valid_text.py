"""Text that UTF-8 can hold. JSON can also hold half a surrogate pair, which tokenizers and Arrow refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def valid_text(text: str) -> str:
    """The text with every lone surrogate as its escape, such as the six characters `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def valid_json(value: Any) -> Any:
    """A JSON value whose texts, names of fields included, are valid; sequences become lists."""
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping):
        return {valid_text(str(name)): valid_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    return value
