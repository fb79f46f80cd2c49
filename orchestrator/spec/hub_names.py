"""Names of repositories on the Hugging Face hub, and commit hashes."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_NO_OWNERS = frozenset({"models", "datasets", "spaces", "api"})
"""First parts of the hub's own addresses, which no user or organization can have as a name: `models/x` is a folder."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name, `org/name`."""
    return bool(_NAME.fullmatch(text)) and text.partition("/")[0] not in _NO_OWNERS


def is_hub_name(path: str, root: Path | None = None) -> bool:
    """Whether a model's path is a name on the hub, `org/name`: a folder of that name comes first.

    Args:
        path: The path.
        root: Folder that relative paths also start at, besides the current directory.
    """
    return is_name(path) and not any((start / path).is_dir() for start in (Path(), root or Path()))


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which never moves."""
    return revision is not None and bool(_COMMIT.fullmatch(revision))
