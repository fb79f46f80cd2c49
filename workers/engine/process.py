"""The process of a vLLM engine: it ends with its worker, and on the CPU it starts sooner.

By default vLLM spawns it: two imports of some fifteen seconds each, one after the other. On the CPU a fork server (a
process without engine, event loop or model) imports vLLM at the same time as this process, and the engine is forked
from it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from typing import Any

from troupe.workers.contract.config import Device
from troupe.workers.engine.owner_watch import FOLDER_VARIABLE, die_with_owner, temporary_folder

_IMPORTED_AHEAD = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


def import_ahead() -> None:
    """Start importing vLLM in the fork server. Set the environment variables that vLLM reads first."""
    multiprocessing.set_forkserver_preload(_IMPORTED_AHEAD)
    with _temporary_files_in(temporary_folder()):  # its socket
        forkserver.ensure_running()


class _ForkedProcess(ForkServerProcess):
    """A process with the environment of the process that starts it, not that of the fork server."""

    def start(self) -> None:
        """Start the process with the current environment of this one."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Set the environment in the new process and run its target."""
        # Only what differs: resetting a variable hides the memory that holds the process title.
        os.environ |= dict(self._environment.items() - os.environ.items())
        _run(super().run)


class _SpawnedProcess(SpawnProcess):
    def run(self) -> None:
        """Run the target in the new process."""
        _run(super().run)


class _ForkedContext(ForkServerContext):
    Process = _ForkedProcess


class _SpawnContext(SpawnContext):
    Process = _SpawnedProcess


@contextmanager
def engine_processes(device: Device) -> Iterator[None]:
    """Inside the block, engines of vLLM end with this process, and CPU engines are forked from the fork server."""
    utils: Any = import_module("vllm.v1.engine.utils")
    original = utils.get_mp_context
    utils.get_mp_context = _ForkedContext if device == "cpu" else _SpawnContext
    try:
        yield
    finally:
        utils.get_mp_context = original


def _run(target: Callable[[], None]) -> None:
    """Run an engine so that no process and no temporary file of it outlives the worker."""
    die_with_owner()  # vLLM waits minutes for a worker that has ended, before it imports anything of ours
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imports torch, which the worker does not

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # later runs use what this one compiles
    with _temporary_files_in(os.environ[FOLDER_VARIABLE]):
        target()


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    original, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = original
