"""A rollout worker that behaves as on a host of its own: it gets weights as other nodes get them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from troupe.workers.contract.messages import WeightAck, WeightUpdate, WorkerHealth
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from troupe.workers.weights.shared_memory import Bytes
    from troupe.workers.weights.store import StoredBytes

HOST = "another-host"


def _there(update: WeightUpdate) -> WeightUpdate:
    """The update with its file beside the policy's: another host would have a folder of its own."""
    return replace(update, path=update.path.replace("/troupe-", f"/troupe-{HOST}-"))


class FarRolloutWorker(RolloutWorker):
    """A rollout worker on this machine that says that it is on another one."""

    async def health(self) -> WorkerHealth:
        """Health of the worker, on the other host."""
        return replace(await super().health(), host=HOST)

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Load the other host's file."""
        return await super().update_weights(_there(update))

    async def write_weights(self, update: WeightUpdate, payload: Bytes | StoredBytes) -> None:
        """Write the other host's file."""
        await super().write_weights(_there(update), payload)

    async def change_weights(self, update: WeightUpdate, delta: Bytes | StoredBytes) -> bool:
        """Change the other host's file."""
        return await super().change_weights(_there(update), delta)
