"""The sender's side of transfers from device to device, with engines whose workers are in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from troupe.workers.contract.messages import WeightAck
from troupe.workers.rollout import RolloutWorker


class LoopLink:
    """The sender's link to workers in this process, as `ActorEngines` is to actors. The sender runs in a thread."""

    def __init__(self, workers: Sequence[RolloutWorker]) -> None:
        self.workers = workers
        self.ranks = workers[0].config.engine.tensor_parallel_size
        self.processes = self.ranks * len(workers)
        self.loop = asyncio.get_running_loop()

    def join(self, info: dict[str, Any]) -> None:
        """Every worker behind the ranks of those before it."""
        firsts = (info.get("first_rank", 0) + number * self.ranks for number in range(len(self.workers)))
        infos = [info | {"first_rank": first} for first in firsts]
        self._all([worker.transfer_init(own) for worker, own in zip(self.workers, infos, strict=True)])

    def start(self) -> None:
        """Pause."""
        self._all([worker.transfer_start() for worker in self.workers])

    def receive(self, info: dict[str, Any]) -> None:
        """Receive."""
        self._all([worker.transfer_receive(info) for worker in self.workers])

    def finish(self, version: int, digest: str) -> list[WeightAck]:
        """Serve."""
        return self._all([worker.transfer_finish(version, digest) for worker in self.workers])

    def _all(self, calls: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def gathered() -> list[Any]:
            return await asyncio.gather(*calls)

        return asyncio.run_coroutine_threadsafe(gathered(), self.loop).result(120)
