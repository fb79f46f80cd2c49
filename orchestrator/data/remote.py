"""The files that a path of data names, on a disk or in an object store (`s3://bucket/train-*.parquet`).

Files of a store are copied to the cache folder once; a file that has changed there since is another one.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from pyarrow import fs

from troupe.orchestrator.errors import DataError, first_line
from troupe.orchestrator.spec.locations import is_arrow_store, is_url, matching_files
from troupe.workers.contract.atomic_file import PRIVATE, replacing
from troupe.workers.isolation.interpreters import cache_folder

logger = logging.getLogger(__name__)

_COPY_BYTES = 8 << 20

Show = Callable[[str, int, int], object]
"""Called with the name of a file that is copied, the bytes that have arrived, and all of them."""
_show: ContextVar[Show] = ContextVar("show", default=lambda name, done, total: None)


@contextmanager
def copies_shown(show: Show) -> Iterator[None]:
    """Shows the progress of files that are copied within the block."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def local_files(path: str) -> list[Path]:
    """The files of a path, or of a URL, which may be patterns, by name. Raises DataError for a URL without a file."""
    return _copies(path) if is_url(path) else matching_files(path)


@dataclass(frozen=True)
class _RemoteFile:
    """A file of a store."""

    name: str
    identity: str
    """Differs between stores, and between versions of a file."""
    size: int | None
    """In bytes, or None if the store does not tell it."""
    open: Callable[[], AbstractContextManager[Any]]
    """Opens it to read its bytes."""


def _copies(url: str) -> list[Path]:
    place = url.partition("?")[0]
    is_pattern = glob.has_magic(place.rpartition("/")[2])
    try:
        found = (_in_arrow if is_arrow_store(url) else _in_fsspec)(url, is_pattern)
        if not found:
            raise DataError(f"{place}: no {'file matches' if is_pattern else 'such file'}")
        return [_copied(file) for file in sorted(found, key=lambda file: file.name)]
    except (OSError, ValueError, ImportError, pa.ArrowException) as error:
        raise DataError(f"{place}: {first_line(error)}") from error


def _in_arrow(url: str, is_pattern: bool) -> list[_RemoteFile]:
    place, _, options = url.partition("?")
    folder, _, name = place.rpartition("/")
    at = f"{folder}?{options}" if options else folder
    store, root = fs.FileSystem.from_uri(at)
    infos = store.get_file_info(fs.FileSelector(root) if is_pattern else [f"{root}/{name}"])
    return [
        _RemoteFile(
            info.base_name,
            f"{at} {info.base_name} {info.size} {info.mtime_ns}",
            info.size,
            partial(store.open_input_stream, info.path),
        )
        for info in infos
        if info.is_file and (not is_pattern or fnmatchcase(info.base_name, name))
    ]


def _in_fsspec(url: str, is_pattern: bool) -> list[_RemoteFile]:
    """Files of the stores that Arrow does not know, such as `https://`."""
    store, path = fsspec.core.url_to_fs(url)
    found = []
    for one in store.glob(path) if is_pattern else [path]:
        try:
            info = store.info(one)
        except FileNotFoundError:
            continue
        name = one.partition("?")[0].rpartition("/")[2]
        found.append(_RemoteFile(name, f"{url} {sorted(info.items())}", info["size"], partial(store.open, one, "rb")))
    return found


def _copied(file: _RemoteFile) -> Path:
    copy = cache_folder() / "data" / hashlib.sha256(file.identity.encode()).hexdigest()[:32] / file.name
    if not copy.is_file():
        logger.info("copying %s (%.1f MiB) to %s", file.name, (file.size or 0) / 2**20, copy)
        copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(copy, PRIVATE) as unfinished, file.open() as source:
            with unfinished.open("wb") as target:
                while part := source.read(_COPY_BYTES):
                    target.write(part)
                    _show.get()(file.name, target.tell(), file.size or target.tell())
            if (size := unfinished.stat().st_size) != file.size and file.size is not None:
                raise OSError(f"{file.name}: {size} of {file.size} bytes were received")
    return copy
