"""A started environment worker, which must leave no process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.environment import EnvironmentWorker


def bound(worker: EnvironmentWorker, **seconds: float) -> None:
    """Set bounds from now on. Those of its start are long, because a start takes long on a busy machine."""
    worker._config = worker._config.model_copy(update=seconds)


@asynccontextmanager
async def started(config: EnvironmentConfig) -> AsyncIterator[EnvironmentWorker]:
    """Start a worker, close it after the `with` block, and check that none of its processes is left."""
    others = set(psutil.Process().children(recursive=True))  # of other tests in this process
    worker = EnvironmentWorker(config, "environment-0")
    await worker.start()
    try:
        yield worker
    finally:
        children = [child for child in psutil.Process().children(recursive=True) if child not in others]
        await worker.close()
        _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, alive
