"""Files and folders that are removed when this process ends, also by kill -9."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import IO

_owner_pipes: dict[str, IO[bytes]] = {}
"""Our end of the pipe of `remove_at_death`, by path; when it closes, the file or folder is removed."""


def remove_at_death(path: str | Path, *, prefix: bool = False) -> None:
    """Remove a file or folder as soon as this process ends, even by kill -9; with `prefix`, all that begin with `path`.

    A separate process waits for this process's end of a pipe to close, and then removes it. It is no child of this
    process, so that it is not ended along with it.
    """
    removed = '"$0"*' if prefix else '"$0"'
    script = f"exec 3<&0; (while read -r _ <&3; do :; done; rm -rf -- {removed}) >/dev/null 2>&1 &"
    guard = subprocess.Popen(
        ["/bin/sh", "-c", script, str(path)], env=os.environ.copy(), stdin=subprocess.PIPE, start_new_session=True
    )
    guard.wait()
    if guard.stdin is not None:
        _owner_pipes[str(path)] = guard.stdin


def retire(path: str | Path) -> None:
    """Removes a file whose name will not be used again, and ends its guard process."""
    Path(path).unlink(missing_ok=True)
    owner_pipe = _owner_pipes.pop(str(path), None)
    if owner_pipe is not None:
        owner_pipe.close()
