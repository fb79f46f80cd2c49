"""The paths that a spec names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from troupe.orchestrator.spec.chain import STAGE
from troupe.orchestrator.spec.field_tree import ITEM, FieldNode, field_tree
from troupe.orchestrator.spec.locations import is_hub_name, is_url
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import NO_TEMPLATE
from troupe.workers.contract.consequences import Consequences, PathKind

_ON_DISK = "file://"


def absolute_paths(document: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A dumped spec with absolute paths; a model's name on the hub stays as it is.

    Args:
        document: The spec or chain, dumped as plain data.
        root: Folder that relative paths start at, or None for the current directory.
    """
    start = Path.cwd() if root is None else root

    def absolute(value: Any, node: FieldNode) -> Any:
        if isinstance(value, dict):
            return {key: absolute(one, below) if (below := node.child(key, one)) else one for key, one in value.items()}
        if isinstance(value, list):
            return [absolute(one, node.children.get(ITEM, node)) for one in value]
        return str(start / value) if _is_path(value, node.consequences.path, start) else value

    return absolute(document, _fields())


def path_fields(document: Any) -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path on a disk that a dumped spec or chain names."""
    return _path_fields(document, _fields(), "")


def _path_fields(value: Any, node: FieldNode, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if below := node.child(str(key), one):
                yield from _path_fields(one, below, f"{field}.{key}" if field else str(key))
    elif node.consequences.path == "store" and isinstance(value, str) and value.startswith(_ON_DISK):
        yield field, unquote(value.removeprefix(_ON_DISK).partition("?")[0])
    elif _is_path(value, node.consequences.path, None):
        yield field, value


@cache
def _fields() -> FieldNode:
    """The fields of a spec of either kind, and of a chain."""
    root = field_tree(RolloutSpec, OfflineSpec)
    stages = FieldNode(Consequences(), children={ITEM: root})
    return replace(root, children=root.children | {"stages": stages})


def _is_path(value: Any, kind: PathKind | None, start: Path | None) -> bool:
    """Whether a field of this kind holds a path, and not a word that stands for something else."""
    if not isinstance(value, str) or kind in (None, "store"):
        return False
    if kind == "template":
        return value != NO_TEMPLATE
    return not (value.startswith(STAGE) or is_url(value) or (kind == "model" and is_hub_name(value, start)))
