"""A worker's process that imports vLLM before it has threads, so that its engine can be forked from it.

Ray starts threads before it creates the worker, and a process with threads cannot be forked safely. So this process
imports vLLM first, forks the engine's fork server, and then becomes a worker of Ray: one import of vLLM for both.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from troupe.workers.contract.config import EngineProcess
from troupe.workers.engine.process import IMPORTED_AHEAD, fork_server
from troupe.workers.engine.settings import set_environment

logger = logging.getLogger(__name__)

_FRONT_END = "vllm.v1.engine.async_llm"
_LOOK_S = 0.5


def run_worker(engine: str, script: str, *arguments: str) -> None:
    """Import vLLM, fork the fork server, and run the script as `python SCRIPT ARGUMENTS...` would.

    Args:
        engine: An `EngineProcess` on the CPU, as JSON.
        script: Ray's script for its workers.
        arguments: Of the script.
    """
    set_environment(EngineProcess.model_validate_json(engine))
    try:
        with _ending_with_parent():
            for module in (*IMPORTED_AHEAD, _FRONT_END):
                import_module(module)
        fork_server()
    except Exception:
        # The worker imports it again when it starts, and reports what is wrong.
        logger.exception("vLLM is not imported ahead")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    """Exit when the parent, which is Ray, has ended; Ray ends the processes that it knows as its workers.

    A timer looks, because a thread would prevent the fork.
    """
    parent = os.getppid()

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
