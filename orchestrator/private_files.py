"""Files that only their owner can read: a user may have put a secret into a spec, against all advice."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600, atomically: readers see the whole old content or the whole new one.

    Raises:
        OSError: It cannot be written.
    """
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)  # of a process that was killed; its mode could be another
    try:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
