"""What a path in a spec may be: a file, a pattern of files, a name on the Hugging Face hub, or the URL of a store."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from troupe.workers.contract.text import has_credentials

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}")
_NO_OWNERS = frozenset({"models", "datasets", "spaces", "api"})
"""First parts of the hub's own addresses, which no user or organization can have as a name: `models/x` is a folder."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_STORES = ("s3", "gs", "abfs", "file")
"""Kinds of object stores that Arrow reads and writes, by the scheme of the URL."""
_NO_CREDENTIALS = "a spec holds no credentials; give them to the nodes' environment"
_AZURE = ("abfss", "az", "azure", "wasb", "wasbs")
"""Other names for Azure's stores: one of them is enough."""


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, and is not the name of a file that has them in it."""
    return glob.has_magic(path) and not Path(path).exists()


def matching_files(path: str) -> list[Path]:
    """The files of a pattern (`data/train-*.parquet`), by name, or the path itself if it is none or nothing matches."""
    found = sorted(glob.glob(path, recursive=True)) if is_pattern(path) else []
    return [Path(name) for name in found] or [Path(path)]


def is_name(text: str) -> bool:
    """Whether a text has the form of a repository's name, `org/name`."""
    return bool(_NAME.fullmatch(text)) and text.partition("/")[0] not in _NO_OWNERS


def is_hub_name(path: str, root: Path | None = None) -> bool:
    """Whether a path is a name on the hub, `org/name`, and no folder below the current one or `root`."""
    return is_name(path) and not any((start / path).is_dir() for start in (Path(), root or Path()))


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a full commit hash, which never moves."""
    return revision is not None and bool(_COMMIT.fullmatch(revision))


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL. As a path it would be in a folder called `s3:`, also after `Path` took a slash."""
    return _URL.match(str(path)) is not None


def is_arrow_store(url: str) -> bool:
    """Whether Arrow opens the store of a URL; fsspec opens the others, for reading."""
    return url.partition(":")[0] in _STORES


def source_problem(url: str) -> str | None:
    """Why the URL of a data file cannot be used."""
    scheme = url.partition(":")[0]
    if scheme in (*_STORES, *_AZURE):
        return url_problem(url)
    from fsspec.registry import known_implementations

    if scheme not in known_implementations:
        return f"expected a URL of {', '.join(_STORES)}, https or another protocol of fsspec, got {url!r}"
    return _NO_CREDENTIALS if has_credentials(url) else None


def url_problem(url: str) -> str | None:
    """Why the URL of an object store cannot be used."""
    scheme = url.partition(":")[0]
    if scheme in _AZURE:
        return "write abfs://container@account.dfs.core.windows.net/folder"
    if not is_arrow_store(url):
        kinds = f"{', '.join(_STORES[:-1])} or {_STORES[-1]}"
        return f"expected a URL of {kinds}, such as s3://bucket/folder, got {url!r}"
    return _NO_CREDENTIALS if has_credentials(url) else None


def checkpoint_problems(url: str | None) -> Iterator[tuple[str, str]]:
    """(field, problem) of `checkpoint.path`."""
    if url is not None and (problem := url_problem(url)) is not None:
        yield "checkpoint.path", problem
