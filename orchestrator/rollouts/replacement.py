"""Replaces reward and reference workers that have died or stopped answering."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from orchestrator.cluster.worker_group import WorkerHandle
from orchestrator.errors import WorkerError
from workers.contract.roles import Replica

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT", bound=Replica)


class Replacer(Generic[WorkerT]):
    """Starts workers of one role again, as long as the budget lasts."""

    def __init__(self, launch: Callable[[str], Awaitable[WorkerHandle[WorkerT]]], restarts: int, role: str) -> None:
        """Replaces nothing yet.

        Args:
            launch: Starts the worker of this name. Raises WorkerError.
            restarts: Replacements in the whole run.
            role: `failures.{role}_restarts` is the budget.
        """
        self._launch = launch
        self._restarts = restarts
        self._role = role
        self.used = 0

    async def replace(self, worker: WorkerHandle[WorkerT], lost: WorkerError) -> WorkerHandle[WorkerT]:
        """Ends the worker's process and starts another one of the same name.

        Raises:
            WorkerError: The budget is used up; it says by what.
        """
        worker.kill()
        while self.used < self._restarts:
            self.used += 1
            logger.warning("%s is lost: %s; starting a replacement", worker.name, lost)
            try:
                return await self._launch(worker.name)
            except WorkerError as error:
                lost = error
        budget = f"{self.used} of {self._restarts} restarts used: failures.{self._role}_restarts"
        raise WorkerError(lost.worker, lost.method, f"{lost.detail} ({budget})") from lost
