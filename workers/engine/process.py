"""The process of a vLLM engine on the CPU, forked from a process that imports vLLM in parallel with this one.

By default vLLM spawns it: two imports of some fifteen seconds each, one after the other. Here a fork server (a process
without engine, event loop or model) imports vLLM at the same time as this process, and the engine is forked from it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from workers.contract.config import Device

_IMPORTED_AHEAD = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


def import_ahead() -> None:
    """Start importing vLLM in the fork server. Set the environment variables that vLLM reads first."""
    multiprocessing.set_forkserver_preload(_IMPORTED_AHEAD)
    forkserver.ensure_running()


class _EngineProcess(ForkServerProcess):
    """A process with the environment of the process that starts it, not that of the fork server."""

    def start(self) -> None:
        """Start the process with the current environment of this one."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Set the environment in the new process and run its target."""
        # Only what differs: resetting a variable hides the memory that holds the process title.
        os.environ |= dict(self._environment.items() - os.environ.items())
        super().run()


class _Context(ForkServerContext):
    Process = _EngineProcess


@contextmanager
def forked_engines(device: Device) -> Iterator[None]:
    """Inside the block, vLLM forks CPU engines from the fork server; other engines are spawned."""
    if device != "cpu":
        yield
        return
    utils: Any = import_module("vllm.v1.engine.utils")
    spawned = utils.get_mp_context
    utils.get_mp_context = _Context  # vLLM itself offers only fork and spawn
    try:
        yield
    finally:
        utils.get_mp_context = spawned
