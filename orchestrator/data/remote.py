"""The files that a path of data names, on a disk or in an object store (`s3://bucket/train-*.parquet`).

Files of a store are copied to the cache folder once; a file that has changed there since is another one.
"""

from __future__ import annotations

import glob
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from troupe.orchestrator.errors import DataError, first_line
from troupe.orchestrator.spec.locations import is_url, matching_files
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


def _copies(url: str) -> list[Path]:
    place, _, options = url.partition("?")
    folder, _, name = place.rpartition("/")
    try:
        at = f"{folder}?{options}" if options else folder
        store, root = fs.FileSystem.from_uri(at)
        is_pattern = glob.has_magic(name)
        infos = store.get_file_info(fs.FileSelector(root) if is_pattern else [f"{root}/{name}"])
        found = [info for info in infos if info.is_file and (not is_pattern or fnmatchcase(info.base_name, name))]
        if not found:
            raise DataError(f"{place}: no {'file matches' if is_pattern else 'such file'}")
        return [_copied(store, at, info) for info in sorted(found, key=lambda info: info.base_name)]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{place}: {first_line(error)}") from error


def _copied(store: fs.FileSystem, at: str, info: fs.FileInfo) -> Path:
    """The copy of a file in the folder with the URL `at`, which may be one of several stores with this path."""
    identity = f"{at} {info.base_name} {info.size} {info.mtime_ns}"
    copy = cache_folder() / "data" / hashlib.sha256(identity.encode()).hexdigest()[:32] / info.base_name
    if not copy.is_file():
        logger.info("copying %s (%.1f MiB) to %s", info.path, info.size / 2**20, copy)
        copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(copy, PRIVATE) as unfinished, store.open_input_stream(info.path) as source:
            with unfinished.open("wb") as target:
                while part := source.read(_COPY_BYTES):
                    target.write(part)
                    _show.get()(info.base_name, target.tell(), info.size)
            if (size := unfinished.stat().st_size) != info.size:
                raise OSError(f"{info.path}: {size} of {info.size} bytes were received")
    return copy
