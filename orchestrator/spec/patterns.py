"""Paths that may be patterns of several files."""

from __future__ import annotations

import glob
from pathlib import Path


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, and is not the name of a file that has them in it."""
    return glob.has_magic(path) and not Path(path).exists()


def matching_files(path: str) -> list[Path]:
    """The files of a path that may be a pattern (`data/train-*.parquet`), in order of their names.

    The path itself where it is no pattern, or nothing matches.
    """
    found = sorted(glob.glob(path, recursive=True)) if is_pattern(path) else []
    return [Path(name) for name in found] or [Path(path)]
