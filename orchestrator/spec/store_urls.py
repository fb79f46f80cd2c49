"""URLs of object stores in a spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from troupe.workers.contract.urls import has_credentials

_STORES = ("s3", "gs", "file")
"""Kinds of object stores, by the scheme of the URL."""
_NO_CREDENTIALS = "a spec holds no credentials; give them to the nodes' environment"
_WITH_AZURE = ("s3", "gs", "abfs", "file")


def url_problem(url: str, schemes: Sequence[str] = _STORES) -> str | None:
    """Why the URL of an object store cannot be used."""
    parts = urlsplit(url)
    if parts.scheme not in schemes:
        return f"expected a URL of {', '.join(schemes[:-1])} or {schemes[-1]}, such as s3://bucket/folder, got {url!r}"
    return _NO_CREDENTIALS if has_credentials(url, names_container=parts.scheme == "abfs") else None


def checkpoint_problems(url: str | None) -> Iterator[tuple[str, str]]:
    """(field, problem) of `checkpoint.path`."""
    if url is not None and (problem := url_problem(url, _WITH_AZURE)) is not None:
        yield "checkpoint.path", problem
