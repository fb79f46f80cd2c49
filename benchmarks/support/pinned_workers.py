"""Workers that keep their processes on one core each, and are the product's otherwise."""

from __future__ import annotations

import os

import psutil

from troupe.workers.contract.messages import WorkerHealth
from troupe.workers.policy import PolicyWorker
from troupe.workers.rollout import RolloutWorker


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin(core: int) -> None:
    """Keep all threads of this process and of its descendants on a core; threads that they start follow."""
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


class PinnedRollout(RolloutWorker):
    """A rollout worker whose processes, vLLM's included, run on the first core."""

    async def start(self) -> WorkerHealth:
        """Start, then pin."""
        health, core = await super().start(), cores()[0]
        pin(core)
        return health


class PinnedPolicy(PolicyWorker):
    """A policy that trains on the second core."""

    def build(self) -> WorkerHealth:
        """Load the models, then pin."""
        health, core = super().build(), cores()[1]
        pin(core)
        return health
