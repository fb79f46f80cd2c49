"""A pool of replicas: what happens around the loss of one."""

from __future__ import annotations

import asyncio

import pytest

from tests.clock import on_virtual_time
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget


class Named:
    """A worker with a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kill(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("restarts", [0, 1])
def test_who_is_told_of_a_loss_is_told_before_a_replacement_of_the_same_name_starts(restarts: int) -> None:
    told: list[str] = []

    async def launch(name: str) -> Named:
        told.append(f"{name} starts")
        return Named(name)

    async def lost(name: str) -> None:
        await asyncio.sleep(0.01)
        told.append(f"{name} is lost")

    async def run() -> None:
        worker = Named("rollout-0")
        pool = ReplicaPool([worker], launch, RestartBudget("engine", restarts))
        pool._on_loss = lost
        await pool.lose(worker, WorkerDied("rollout-0", "generate", "gone"))
        await pool.until_started("rollout-0")
        await pool.close()

    on_virtual_time(run())
    assert told == ["rollout-0 is lost", "rollout-0 starts"][: 1 + restarts]
