"""What ends with the rollout worker: the processes of its engine and their temporary files, also after kill -9."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import threading
from functools import cache

from troupe.workers.isolation.removal import remove_at_death

OWNER_VARIABLE = "TROUPE_ENGINE_OWNER"
"""Environment variable with the process id of the rollout worker that owns the engine's processes."""
FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's environment variable with the folder of its sockets."""


@cache
def temporary_folder() -> str:
    """A private folder that is removed when this process ends. vLLM itself leaves its sockets in the shared one."""
    folder = tempfile.mkdtemp(prefix="troupe-")
    remove_at_death(folder)
    return folder


@cache
def die_with_owner() -> None:
    """Exit, together with the processes in between, when the rollout worker named in the environment ends.

    vLLM's engine core outlives a killed parent and keeps its memory and cores. A pidfd becomes readable when its
    process ends, and never refers to another process that reuses the id.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    try:
        owner_fd = os.pidfd_open(owner)
        between = [os.pidfd_open(pid) for pid in _ancestors_below(owner)]
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_exit_after, args=(owner_fd, between), name="die-with-owner", daemon=True).start()


def _ancestors_below(owner: int) -> list[int]:
    """Processes between this one and its ancestor `owner`; empty if `owner` is no ancestor."""
    between: list[int] = []
    pid = os.getppid()
    while pid > 1:
        if pid == owner:
            return between
        between.append(pid)
        with open(f"/proc/{pid}/stat", "rb") as stat:
            pid = int(stat.read().rpartition(b")")[2].split()[1])
    return []


def _exit_after(owner_fd: int, between: list[int]) -> None:
    waiting = select.poll()
    waiting.register(owner_fd, select.POLLIN)
    waiting.poll()
    for fd in between:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(1)
