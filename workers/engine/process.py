"""The process of a vLLM engine on a CPU, forked from one that imports vLLM while this process does.

vLLM spawns it afresh: two imports one after the other, of some fifteen seconds each. A fork server (a process without
engine, event loop or model) makes them at the same time, and the engine is forked from there.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Literal

_IMPORTED_AHEAD = ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"]


def import_ahead() -> None:
    """Begin to import vLLM in a process beside this one. What vLLM reads from the environment must be set before."""
    multiprocessing.set_forkserver_preload(_IMPORTED_AHEAD)
    forkserver.ensure_running()


class _EngineProcess(ForkServerProcess):
    """A process with the environment of the one that starts it, not with that of the fork server."""

    def start(self) -> None:
        """Start it, with this process's environment as it is now."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """In the new process: do what it is there for."""
        # Only what differs: a variable that is set anew hides the place of the process's title.
        os.environ |= dict(self._environment.items() - os.environ.items())
        super().run()


class _Context(ForkServerContext):
    Process = _EngineProcess


@contextmanager
def forked_engines(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """Inside the block vLLM forks the engines that it starts on a CPU from the fork server; others are spawned."""
    if device != "cpu":
        yield
        return
    utils: Any = import_module("vllm.v1.engine.utils")
    spawned = utils.get_mp_context
    utils.get_mp_context = _Context  # vLLM offers a choice of fork and spawn only
    try:
        yield
    finally:
        utils.get_mp_context = spawned
