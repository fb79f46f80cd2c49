"""Files that are written atomically: readers see the whole old content or the whole new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o600
"""Mode of a file that only its owner can read."""


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield the path of a new file that replaces `path` if the block succeeds, else is removed. Raises OSError."""
    # Random: other threads, and processes with this one's number in other containers, may replace the same file.
    unfinished = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        if error.filename is None:  # a write to a full disk
            error.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file atomically, text as UTF-8. See :func:`replacing`."""
    with replacing(path, mode) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
