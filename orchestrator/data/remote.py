"""The files that a path of data names, on a disk or in an object store (`s3://bucket/train-*.parquet`).

Those of a store are copied to the cache folder once; a file that has changed there since is another one.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import shutil
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from troupe.orchestrator.errors import DataError
from troupe.orchestrator.spec.locations import is_url, matching_files
from troupe.workers.contract.atomic_file import PRIVATE, replacing
from troupe.workers.isolation.interpreters import cache_folder

logger = logging.getLogger(__name__)

_COPY_BYTES = 8 << 20


def local_files(path: str) -> list[Path]:
    """The files of a path, a pattern or a URL whose last part may be a pattern, in order of their names. Raises
    DataError if a URL leads to no file, or its store cannot be read."""
    return list(_copies(path)) if is_url(path) else matching_files(path)


@cache
def _copies(url: str) -> tuple[Path, ...]:
    """Copies of a URL's files. They are looked for once in a process, so that all its parts read the same rows."""
    place, _, options = url.partition("?")
    folder, _, name = place.rpartition("/")
    try:
        store, root = fs.FileSystem.from_uri(f"{folder}?{options}" if options else folder)
        is_pattern = glob.has_magic(name)
        infos = store.get_file_info(fs.FileSelector(root) if is_pattern else [f"{root}/{name}"])
        found = [info for info in infos if info.is_file and (not is_pattern or fnmatchcase(info.base_name, name))]
        if not found:
            raise DataError(f"{place}: no {'file matches' if is_pattern else 'such file'}")
        return tuple(_copied(store, info) for info in sorted(found, key=lambda info: info.base_name))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{place}: {str(error).splitlines()[0]}") from error


def _copied(store: fs.FileSystem, info: fs.FileInfo) -> Path:
    identity = f"{store.type_name} {info.path} {info.size} {info.mtime_ns}"
    copy = cache_folder() / "data" / hashlib.sha256(identity.encode()).hexdigest()[:32] / info.base_name
    if not copy.is_file():
        logger.info("copying %s (%.1f MiB) to %s", info.path, info.size / 2**20, copy)
        copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(copy, PRIVATE) as unfinished, store.open_input_stream(info.path) as source:
            with unfinished.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            if (size := unfinished.stat().st_size) != info.size:
                raise OSError(f"{info.path}: {size} of {info.size} bytes were received")
    return copy
