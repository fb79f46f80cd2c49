"""A worker's process that imports vLLM before it has threads, so that its engine can be forked from it.

Ray starts threads before it creates the worker, and a process with threads cannot be forked safely. So this process
imports vLLM first, forks the engine's fork server, and then becomes a worker of Ray: one import of vLLM for both.
"""

from __future__ import annotations

import logging
import runpy
import sys
from importlib import import_module

from troupe.workers.contract.config import EngineProcess
from troupe.workers.engine.process import IMPORTED_AHEAD, fork_server
from troupe.workers.engine.settings import set_environment

logger = logging.getLogger(__name__)

_FRONT_END = "vllm.v1.engine.async_llm"


def run_worker(engine: str, script: str, *arguments: str) -> None:
    """Import vLLM, fork the fork server, and run the script as `python SCRIPT ARGUMENTS...` would.

    Args:
        engine: An `EngineProcess` on the CPU, as JSON.
        script: Ray's script for its workers.
        arguments: Of the script.
    """
    set_environment(EngineProcess.model_validate_json(engine))
    try:
        for module in (*IMPORTED_AHEAD, _FRONT_END):
            import_module(module)
        fork_server()
    except Exception:
        # The worker imports it again when it starts, and reports what is wrong.
        logger.exception("vLLM is not imported ahead")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
