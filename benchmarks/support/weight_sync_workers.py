"""The product's policy and rollout workers with the measurements that `benchmarks.weight_sync` needs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from benchmarks.support.timing import Parts
from troupe.workers.contract.config import PolicyConfig, Rendezvous, RolloutConfig
from troupe.workers.contract.messages import WeightUpdate, WorkerHealth
from troupe.workers.engine import settings
from troupe.workers.policy import PolicyWorker
from troupe.workers.rollout import RolloutWorker
from troupe.workers.weights import file as weight_file

T = TypeVar("T")

_EXTENSION = "benchmarks.support.weight_sync_extension.MeasuredExtension"


class MeasuredPolicy(PolicyWorker):
    """A policy whose weights change without training, and which times the parts of publishing them."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._parts = Parts()
        self._first: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Start the product's worker and keep a copy of its weights."""
        health = super().start(rendezvous)
        self._parts.watch(weight_file.WeightPublisher, "publish", "write")
        self._first = [tensor.clone() for _, tensor in self.engine.named_weights()]
        self._buffers = [torch.zeros_like(tensor) for tensor in self._first]
        return health

    def disturb(self, seed: int) -> None:
        """Change the weights: each tensor of the loaded model is multiplied by a different factor near 1."""
        factors = random.Random(seed)
        for (_, tensor), first in zip(self.engine.named_weights(), self._first, strict=True):
            torch.mul(first, math.exp(factors.uniform(-0.2, 0.2)), out=tensor)

    def restore(self) -> None:
        """Restore the loaded weights."""
        for (_, tensor), first in zip(self.engine.named_weights(), self._first, strict=True):
            tensor.copy_(first)

    def parts(self) -> dict[str, float]:
        """Seconds of publishing since the last call, including hashing: `write`."""
        return self._parts.read()

    def copy_weights(self) -> float:
        """Copy every weight once into preallocated memory; returns the seconds it took."""
        began = time.perf_counter()
        for (_, tensor), buffer in zip(self.engine.named_weights(), self._buffers, strict=True):
            buffer.copy_(tensor)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.perf_counter() - began


class MeasuredSyncRollout(RolloutWorker):
    """An engine that also loads weights in the two ways that the product is compared with."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self._parts = Parts()
        vars(self.engine)["pause"] = self._timed("pause", self.engine.pause)
        vars(self.memory)["resume"] = self._timed("resume", self.memory.resume)
        settings._EXTENSION = _EXTENSION

    async def update_weights(self, update: WeightUpdate) -> Any:
        """Run the product's update, timed from pause to resume."""
        with self._parts.timed("closed"):
            return await super().update_weights(update)

    async def parts(self) -> dict[str, float]:
        """Seconds by part since the last call, of this worker and of its engine process, which must be a single one."""
        (inside,) = await self.engine.call(self.engine.require_open().collective_rpc("troupe_update_parts"))
        return self._parts.read() | inside

    async def hold(self, update: WeightUpdate) -> None:
        """Have the engine's processes copy a published version into their own memory, but not into the model."""
        await self.engine.call(self.engine.require_open().collective_rpc("hold", args=(asdict(update),)))

    async def apply_held(self) -> float:
        """Load the held weights and reset the prefix cache; returns the seconds of the slowest process."""
        engine = await self.engine.pause()
        seconds: list[float] = await self.engine.call(engine.collective_rpc("apply_held"))
        await self._resume()
        return max(seconds)

    async def reload_from(self, folder: str) -> None:
        """Reload a Hugging Face folder in place with vLLM's own `reload_weights`."""
        with self._parts.timed("closed"):
            engine = await self.engine.pause()
            with self._parts.timed("load"):
                await self.engine.call(engine.collective_rpc("reload_weights", kwargs={"weights_path": folder}))
                await self.engine.call(engine.collective_rpc("repack_heads"))
            await self._resume()

    def _timed(self, part: str, call: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        async def timed() -> T:
            with self._parts.timed(part):
                return await call()

        return timed

    async def _resume(self) -> None:
        await self.memory.resume()
        self.engine.serve(self.engine.version)
