"""The paths that a spec names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.spec_chain import STAGE

_PATH_FIELDS = frozenset({"path", "folder"})
"""Names of the spec's fields that hold a path."""


def absolute_paths(document: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A dumped spec whose paths no longer depend on the current directory: relative ones start at `root` (default: the
    current directory)."""
    start = Path.cwd() if root is None else root

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            # What stands under `args` is the user's own and never a path of ours.
            return {k: v if k == "args" else walk(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [walk(v, key) for v in value]
        if key not in _PATH_FIELDS or not isinstance(value, str) or value.startswith(STAGE):
            return value
        return str(start / value)

    return walk(document, "")


def path_fields(node: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path that a dumped spec names."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key != "args":
                yield from path_fields(value, f"{field}.{key}" if field else key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from path_fields(value, f"{field}.{index}")
    elif isinstance(node, str) and field.rpartition(".")[2] in _PATH_FIELDS and not node.startswith(STAGE):
        yield field, node
