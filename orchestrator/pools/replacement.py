"""Replaces reward and reference workers that have died or stopped answering."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.pools.restart_budget import RestartBudget
from troupe.workers.contract.roles import Replica

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT", bound=Replica)


class Replacer(Generic[WorkerT]):
    """Starts workers of one role again, as long as the budget lasts."""

    def __init__(self, launch: Callable[[str], Awaitable[WorkerHandle[WorkerT]]], budget: RestartBudget) -> None:
        """Replaces nothing yet; `launch` starts the worker of a name, or raises WorkerError."""
        self._launch = launch
        self.budget = budget

    async def replace(self, worker: WorkerHandle[WorkerT], lost: WorkerError) -> WorkerHandle[WorkerT]:
        """Ends the worker's process and starts another one of the same name.

        Raises:
            WorkerError: The budget is used up; it says by what.
        """
        worker.kill()
        while self.budget.take():
            logger.warning("%s is lost: %s; starting a replacement", worker.name, lost)
            try:
                return await self._launch(worker.name)
            except WorkerError as error:
                lost = error
        raise WorkerError(lost.worker, lost.method, f"{lost.detail} ({self.budget})") from lost
