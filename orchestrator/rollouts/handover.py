"""Hands the memory of GPUs that engines share with the policy to the trainers, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.pools.engines import EnginePool


class MemoryHandover:
    """Hands the memory of shared GPUs over for the updates of a step.

    A step has three phases. While engines sample, the policy has its weights in the GPU's memory and its optimizer in
    host memory. For the updates the engines sleep. Before the new weights are sent, the optimizer leaves again; each
    engine takes back its KV cache once it has verified them.
    """

    def __init__(self, pool: EnginePool, policy: PolicyGroup, timeout_s: float) -> None:
        """Hands over nothing yet.

        Args:
            pool: The engines.
            policy: The trainers on the engines' GPUs.
            timeout_s: Bound on the sleep of an engine and on the move of a trainer's states, in seconds.
        """
        self._pool = pool
        self._policy = policy
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainers have the memory in the block. Afterwards the engines still sleep, until they get weights.

        After an error in the block nothing is moved: the trainers are restarted, or the run ends.

        Raises:
            WorkerError: A trainer did not move its states.
        """
        async with self._pool.memory.training():
            await self._pool.sleep(self._timeout_s)
            yield
            await self._policy.offload_states(timeout_s=self._timeout_s)
