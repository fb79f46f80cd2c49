"""Ends the processes of an engine and their temporary files with the rollout worker, also after kill -9."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from functools import cache

from troupe.workers.isolation.death_watch import exit_with
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

    vLLM's engine core outlives a killed parent and keeps its memory and cores.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner in (0, os.getpid()):
        return
    exit_with(owner, _ancestors_below(owner))


@cache
def private_semaphores() -> None:
    """Name the semaphores of multiprocessing after this process, and remove them when it ends.

    The process of multiprocessing that would remove them is killed together with a worker that is lost. Children that
    this process starts inherit the prefix.
    """
    prefix = f"troupe-{os.getpid()}"
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{prefix}"
    remove_at_death(f"/dev/shm/sem.{prefix}-", prefix=True)


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
