"""The product's policy and rollout workers, with what the weight_sync benchmark needs beside them."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.timing import Parts
from workers import rollout, weight_file
from workers.config import PolicyConfig, Rendezvous, RolloutConfig
from workers.messages import WeightUpdate, WorkerHealth
from workers.policy import PolicyWorker
from workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_EXTENSION = "benchmarks.weight_extension.MeasuredExtension"


class MeasuredPolicy(PolicyWorker):
    """A policy whose weights can be made others without training, and that says where publishing spends its time."""

    def __init__(self, config: PolicyConfig, name: str) -> None:
        super().__init__(config, name)
        self._parts = Parts()
        self._first: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """As the product's; then remember the weights."""
        health = super().start(rendezvous)
        self._parts.watch(weight_file.WeightPublisher, "publish", "write")
        self._first = [tensor.clone() for _, tensor in self.engine.named_weights()]
        self._buffers = [torch.zeros_like(tensor) for tensor in self._first]
        return health

    def disturb(self, seed: int) -> None:
        """Other weights than before: each tensor of the model that was loaded, times a factor of its own near 1."""
        factors = random.Random(seed)
        for (_, tensor), first in zip(self.engine.named_weights(), self._first, strict=True):
            torch.mul(first, math.exp(factors.uniform(-0.2, 0.2)), out=tensor)

    def restore(self) -> None:
        """The weights that were loaded."""
        for (_, tensor), first in zip(self.engine.named_weights(), self._first, strict=True):
            tensor.copy_(first)

    def parts(self) -> dict[str, float]:
        """Seconds of publishing since the last call, hashed on the way: `write`."""
        return self._parts.read()

    def copy_weights(self) -> float:
        """Copy every weight once, into memory that is in use already; seconds that took."""
        began = time.perf_counter()
        for (_, tensor), buffer in zip(self.engine.named_weights(), self._buffers, strict=True):
            buffer.copy_(tensor)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        return time.perf_counter() - began


class MeasuredRollout(RolloutWorker):
    """An engine that also takes weights in the two ways the product is compared with."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self._parts = Parts()
        rollout._EXTENSION = _EXTENSION

    async def update_weights(self, update: WeightUpdate) -> Any:
        """The product's, from its pause to its resumption."""
        with self._parts.noted("closed"):
            return await super().update_weights(update)

    async def parts(self) -> dict[str, float]:
        """Seconds by part since the last call: this worker's and its engine process's (which must be one)."""
        (inside,) = await self._call(self._open_engine().collective_rpc("parts"))
        return self._parts.read() | inside

    async def hold(self, update: WeightUpdate) -> None:
        """Have the engine's processes copy a published version into their own memory."""
        await self._call(self._open_engine().collective_rpc("hold", args=(asdict(update),)))

    async def apply_held(self) -> float:
        """Load what is held; seconds of the slowest process. What was cached under the old weights is forgotten."""
        engine = await self._pause()
        seconds: list[float] = await self._call(engine.collective_rpc("apply_held"))
        await self._resume(self._version)
        return max(seconds)

    async def reload_from(self, folder: str) -> None:
        """Reload a Hugging Face folder in place, by vLLM's own means."""
        with self._parts.noted("closed"):
            engine = await self._pause()
            with self._parts.noted("load"):
                await self._call(engine.collective_rpc("reload_weights", kwargs={"weights_path": folder}))
                await self._call(engine.collective_rpc("repack_heads"))
            await self._resume(self._version)

    async def _pause(self) -> AsyncLLM:
        with self._parts.noted("pause"):
            return await super()._pause()

    async def _resume(self, version: int) -> None:
        with self._parts.noted("resume"):
            await super()._resume(version)
