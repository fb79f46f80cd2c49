"""URLs of object stores in a spec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from urllib.parse import parse_qsl, urlsplit

_STORES = ("s3", "gs", "file")
"""Kinds of object stores, by the scheme of the URL."""
_NO_CREDENTIALS = "a spec holds no credentials; give them to the nodes' environment"
_SECRET = re.compile(r"secret|token|key|password|credential|^sig$", re.IGNORECASE)
"""In the names of options that are credentials."""
_NO_USER = {("gs", "anonymous")}
"""Before the `@` of a URL, this asks for no credentials."""
_WITH_AZURE = ("s3", "gs", "abfs", "file")


def url_problem(url: str, schemes: Sequence[str] = _STORES) -> str | None:
    """Why the URL of an object store cannot be used."""
    parts = urlsplit(url)
    if parts.scheme not in schemes:
        return f"expected a URL of {', '.join(schemes[:-1])} or {schemes[-1]}, such as s3://bucket/folder, got {url!r}"
    before_at = parts.netloc.rpartition("@")[0]
    named = parts.scheme == "abfs" or (parts.scheme, before_at) in _NO_USER  # abfs://container@account/...
    if parts.password is not None or (before_at and not named):
        return _NO_CREDENTIALS
    if any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return _NO_CREDENTIALS
    return None


def checkpoint_problems(url: str | None) -> Iterator[tuple[str, str]]:
    """(field, problem) of `checkpoint.path`."""
    if url is not None and (problem := url_problem(url, _WITH_AZURE)) is not None:
        yield "checkpoint.path", problem
