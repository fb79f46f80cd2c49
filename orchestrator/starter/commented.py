"""Writes a spec as YAML with a comment for each field: the first sentence of the field's own description."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from troupe.orchestrator.spec.errors import models_in

_WIDTH = 110
_SENTENCE_END = re.compile(r"(?<=[.])\s+(?=[A-Z`0-9])")


def commented(document: Mapping[str, Any], root: type[BaseModel], heading: list[str]) -> str:
    """The document as YAML.

    Args:
        document: A spec as plain data.
        root: The model whose fields describe it.
        heading: Lines of the comment at the top.
    """
    lines = [f"# {line}".rstrip() for line in heading]
    for key, value in document.items():
        lines += ["", *_field(key, value, root, "")]
    return "\n".join(lines) + "\n"


def _field(key: str, value: Any, model: type[BaseModel] | None, indent: str) -> Iterator[str]:
    info = model.model_fields.get(key) if model is not None else None
    meaning = _first_sentence(info.description or "") if info is not None else ""
    inner = _section_model(info.annotation, value) if info is not None else None
    if isinstance(value, dict) and inner is not None:
        yield from _with_comment(f"{indent}{key}:", meaning, indent)
        for name, item in value.items():
            yield from _field(name, item, inner, indent + "  ")
    else:
        text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("...\n")
        yield from _with_comment(f"{indent}{key}: {text.strip()}", meaning, indent)


def _with_comment(text: str, meaning: str, indent: str) -> Iterator[str]:
    """The line with its comment behind it, or above it if the two are too long."""
    if not meaning:
        yield text
    elif len(line := f"{text}  # {meaning}") <= _WIDTH:
        yield line
    else:
        yield f"{indent}# {meaning}"
        yield text


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(" ".join(text.split()))[0]


def _section_model(annotation: Any, value: Any) -> type[BaseModel] | None:
    """The model of a section; of several kinds, the value's `kind`, or else the first one."""
    found = list(models_in(annotation))
    if len(found) < 2 or not isinstance(value, dict) or "kind" not in value:
        return found[0] if found and isinstance(value, dict) else None
    kind = value.get("kind")
    return next((model for model in found if kind in get_args(model.model_fields["kind"].annotation)), None)
