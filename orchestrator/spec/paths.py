"""The paths that a spec names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from troupe.orchestrator.spec.locations import is_hub_name, is_url
from troupe.orchestrator.spec.stages import STAGE
from troupe.workers.contract.config import NO_TEMPLATE

_PATH_FIELDS = frozenset({"path", "folder", "chat_template", "adapter"})
"""Names of the spec's fields that hold a path."""
_STORE_FIELDS = frozenset({"checkpoint.path", "weight_sync.url"})
"""Fields that hold the URL of a store, which may be a folder on a disk (`file:///mnt/checkpoints`)."""
_ON_DISK = "file://"
_OTHERS = frozenset({"args", "json_schema", "node_labels"})
"""Sections whose keys belong to somebody else: a `path` in them is not a field of the spec."""
_MODEL = "model"
"""Key of every section whose `path` may also be a name on the hub."""


def absolute_paths(document: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A dumped spec with absolute paths; a model's name on the hub stays as it is.

    Args:
        document: The spec, dumped as plain data.
        root: Folder that relative paths start at; None: the current directory.
    """
    start = Path.cwd() if root is None else root

    def walk(value: Any, key: str, section: str) -> Any:
        if isinstance(value, dict):
            return {k: v if k in _OTHERS else walk(v, k, key) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key, section) for v in value]
        if key not in _PATH_FIELDS or not isinstance(value, str) or _is_word(key, value):
            return value
        on_hub = key == "path" and section == _MODEL and is_hub_name(value, start)
        return value if on_hub else str(start / value)

    return walk(document, "", "")


def path_fields(node: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path on a disk that a dumped spec names."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in _OTHERS:
                yield from path_fields(value, f"{field}.{key}" if field else key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from path_fields(value, f"{field}.{index}")
    elif isinstance(node, str) and ".".join(field.split(".")[-2:]) in _STORE_FIELDS:
        if node.startswith(_ON_DISK):
            yield field, unquote(node.removeprefix(_ON_DISK).partition("?")[0])
    elif isinstance(node, str) and (name := field.rpartition(".")[2]) in _PATH_FIELDS and not _is_word(name, node):
        on_hub = name == "path" and field.split(".")[-2:-1] == [_MODEL] and is_hub_name(node)
        if not on_hub:
            yield field, node


def _is_word(field: str, value: str) -> bool:
    """Whether the field holds a word that stands for something else than a path."""
    return value == NO_TEMPLATE if field == "chat_template" else value.startswith(STAGE) or is_url(value)
