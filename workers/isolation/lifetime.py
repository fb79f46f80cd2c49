"""What ends together: a process with its parent, and files and folders with their process, also by kill -9."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO


def exit_with(owner: int, between: Sequence[int] = ()) -> None:
    """Exit when the process `owner` ends, and kill those `between` it and this one. A pidfd becomes readable when
    its process ends, also if nobody reaps it, and never refers to another process that reuses the id."""
    try:
        owner_fd = os.pidfd_open(owner)
        others = [os.pidfd_open(pid) for pid in between]
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(owner_fd, others), name=f"exit with {owner}", daemon=True).start()


@cache
def exit_with_node() -> None:
    """Exit when Ray's node that started this worker ends. Ray first looks for a lost head for 25 s, then for an id."""
    if node := int(os.environ.get("RAY_RAYLET_PID", 0)):
        exit_with(node)


def _exit_after(owner_fd: int, others: Sequence[int]) -> None:
    waiting = select.poll()
    waiting.register(owner_fd, select.POLLIN)
    waiting.poll()
    for fd in others:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(1)


_owner_pipes: dict[str, IO[bytes]] = {}
"""Our end of the pipe of `remove_at_death`, by path; when it closes, the file or folder is removed."""


def remove_at_death(path: str | Path, *, prefix: bool = False) -> None:
    """Remove a file or folder (with `prefix`, all that begin so) when this process ends, even by kill -9, by a
    process that waits for its end of a pipe and is no child of it. A guarded path keeps its guard."""
    if str(path) in _owner_pipes:
        return
    removed = '"$0"*' if prefix else '"$0"'
    script = f"exec 3<&0; (read -r _ <&3 || rm -rf -- {removed}) >/dev/null 2>&1 &"
    guard = subprocess.Popen(
        ["/bin/sh", "-c", script, str(path)], env=os.environ.copy(), stdin=subprocess.PIPE, start_new_session=True
    )
    guard.wait()
    if guard.stdin is not None:
        _owner_pipes[str(path)] = guard.stdin


def retire(path: str | Path) -> None:
    """Removes a file, and ends its guard process, which no longer removes what has this name."""
    Path(path).unlink(missing_ok=True)
    owner_pipe = _owner_pipes.pop(str(path), None)
    if owner_pipe is not None:
        with suppress(BrokenPipeError), owner_pipe:  # the guard was killed
            owner_pipe.write(b"\n")
