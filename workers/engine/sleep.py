"""Memory of an engine on a GPU shared with a trainer: it rests while the trainer updates, and wakes in order.

The order matters. vLLM resumes automatically as soon as all of an engine's memory is back, and it reports the old
version over weights that were discarded. So the cache, which is always the last part to come back, waits here until the
weights have been verified.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, Literal, Protocol

from troupe.workers.contract.config import Sleep

GONE = -1
"""Version of an engine whose weights were discarded."""
_WEIGHTS = ["weights"]
_CACHE = ["kv_cache"]


class StaleWake(RuntimeError):
    """The engine would sample from weights that were not verified after they were discarded or overwritten."""


class MemoryState(Enum):
    """The parts of an engine's weights and KV cache that are in memory."""

    AWAKE = "awake"
    """Both."""
    CACHE_GONE = "cache_gone"
    """The weights, unchanged."""
    WEIGHTS_GONE = "weights_gone"
    """Neither."""
    UNVERIFIED = "unverified"
    """Weights that are being loaded, or that a failed update has left."""
    VERIFIED = "verified"
    """Verified weights: equal to the published or sent ones."""


class SleepingEngine(Protocol):
    """The methods of vLLM's `AsyncLLM` that this module uses."""

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Releases weights (kept in host memory at level 1) and cache; `keep`: requests continue after waking."""
        ...

    async def release_kv_cache_memory(self) -> None:
        """Releases the cache; the engine must be paused. Requests that `keep` has paused continue after waking."""
        ...

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Takes memory back; resumes once all of it is there."""
        ...

    async def update_weight_version(self, version: str, /) -> None:
        """Sets the version that requests are recorded under."""
        ...

    async def collective_rpc(self, method: str, /) -> list[Any]:
        """Calls a method of every worker process."""
        ...


class EngineMemory:
    """Lets an engine rest and wakes it. The engine is paused in every state but `AWAKE`."""

    def __init__(self, level: Sleep, call: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
        """An engine that is awake.

        Args:
            level: What the engine releases while it rests.
            call: Waits for a call into the engine's process.
        """
        self._level = level
        self._call = call
        self.state = MemoryState.AWAKE

    @property
    def awake(self) -> bool:
        """Whether the engine has all of its memory."""
        return self.state is MemoryState.AWAKE

    async def rest(self, engine: SleepingEngine) -> None:
        """Release memory. The engine is paused; its requests rest with it, and are recomputed once it wakes.

        Raises:
            ValueError: The level is `none`.
        """
        match self._level:
            case "none":
                raise ValueError("an engine with sleep: none does not rest")
            case "weights":
                if self.state is not MemoryState.WEIGHTS_GONE:
                    # Before they are gone, so that nothing reports weights that are gone.
                    await self._call(engine.collective_rpc("troupe_forget_weights"))
                    await self._call(engine.update_weight_version(str(GONE)))
                    self.state = MemoryState.WEIGHTS_GONE
                    await self._call(engine.sleep(2, "keep"))
            case "kv_cache":
                if self.awake:
                    await self._call(engine.release_kv_cache_memory())
                    self.state = MemoryState.CACHE_GONE

    async def begin_update(self, engine: SleepingEngine) -> None:
        """Take back the memory of the weights, for new ones. They are unverified from now on."""
        if self.state is MemoryState.WEIGHTS_GONE:
            await self._call(engine.wake_up(_WEIGHTS))
        if not self.awake:
            self.state = MemoryState.UNVERIFIED

    def verified(self) -> None:
        """Record that the weights equal the published or sent ones."""
        if self.state is MemoryState.UNVERIFIED:
            self.state = MemoryState.VERIFIED

    async def wake(self, engine: SleepingEngine) -> bool:
        """Take back the cache; vLLM then resumes automatically. Returns whether the engine was resting.

        Raises:
            StaleWake: The weights are gone or unverified.
        """
        if self.awake:
            return False
        if self.state not in (MemoryState.CACHE_GONE, MemoryState.VERIFIED):
            what = "were discarded" if self.state is MemoryState.WEIGHTS_GONE else "were not verified"
            raise StaleWake(f"the engine's weights {what}: it wakes with new ones only")
        await self._call(engine.wake_up(_CACHE))
        self.state = MemoryState.AWAKE
        return True
