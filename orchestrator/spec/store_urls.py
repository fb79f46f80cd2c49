"""URLs of object stores in a spec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

_STORES = ("s3", "gs", "file")
"""Kinds of object stores, by the scheme of the URL."""
_NO_CREDENTIALS = "a spec holds no credentials; give them to the nodes' environment"
_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""
_AZURE = ("abfs", "abfss", "az")


def url_problem(url: str) -> str | None:
    """Why the URL of an object store cannot be used."""
    parts = urlsplit(url)
    if parts.scheme in _AZURE:
        return f"Azure is not supported, because nothing was tested with its protocol; use {_kinds()}"
    if parts.scheme not in _STORES:
        return f"expected a URL of {_kinds()}, such as s3://bucket/folder, got {url!r}"
    if "@" in parts.netloc:
        return _NO_CREDENTIALS
    if any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return _NO_CREDENTIALS
    return None


def _kinds() -> str:
    return f"{', '.join(_STORES[:-1])} or {_STORES[-1]}"


def checkpoint_problems(url: str | None) -> Iterator[tuple[str, str]]:
    """(field, problem) of `checkpoint.path`."""
    if url is not None and (problem := url_problem(url)) is not None:
        yield "checkpoint.path", problem
