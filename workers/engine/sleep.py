"""Memory of an engine on a GPU shared with a trainer: it sleeps while the trainer updates, and wakes in order.

The order matters. vLLM resumes automatically as soon as all of an engine's memory is back, and it reports the old
version over weights that were discarded. So the cache, which is always the last part to come back, waits here until the
weights have been verified.
"""

from __future__ import annotations

from enum import Enum

from troupe.workers.contract.config import Sleep
from troupe.workers.engine.serving import Serving, ServingEngine

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
    """The weights, unchanged or verified; frozen ones may be in host memory."""
    WEIGHTS_GONE = "weights_gone"
    """Neither."""
    UNVERIFIED = "unverified"
    """Weights that are being loaded, or that a failed update has left."""


class EngineSleep:
    """Makes an engine sleep and wakes it. The engine is paused in every state but `AWAKE`."""

    def __init__(self, level: Sleep, engine: ServingEngine, *, frozen: bool = False) -> None:
        """`frozen`: nobody sends new weights. Released ones are in host memory, and wake as they were."""
        self._level = level
        self._engine = engine
        self._frozen = frozen
        self.state = MemoryState.AWAKE

    @property
    def awake(self) -> bool:
        """Whether the engine has all of its memory."""
        return self.state is MemoryState.AWAKE

    async def sleep(self) -> None:
        """Release memory until new weights or `wake`; requests continue then, recomputed, and arriving ones wait. Those
        of a frozen model are finished first: not every runner of vLLM recomputes the log-probs of a prompt. After a
        failure the engine is closed. Raises ValueError if the level is `none`, and EngineDead."""
        engine = self._engine
        async with engine.lock:
            closed = engine.state is Serving.CLOSED
            await engine.pause("wait" if self._frozen else "keep")
            await engine.call_or_close(self._release(), "it could not sleep")
            engine.state = Serving.CLOSED if closed else Serving.OPEN

    async def wake(self) -> None:
        """Serve again with the weights that the engine has. Raises StaleWake (discarded, not verified), EngineDead."""
        async with self._engine.lock:
            self._engine.require_open()
            if not self.awake:
                await self._take_cache()

    async def begin_update(self) -> None:
        """Take back the memory of the weights, for new ones. They are unverified from now on."""
        if self.state is MemoryState.WEIGHTS_GONE:
            await self._engine.call(self._engine.require_live().wake_up(_WEIGHTS))
        if not self.awake:
            self.state = MemoryState.UNVERIFIED

    async def resume(self) -> None:
        """End the pause of an engine whose weights equal the published or sent ones."""
        engine = self._engine.require_live()
        if self.awake:
            await self._engine.call(engine.resume_generation())
            return
        if self.state is MemoryState.UNVERIFIED:
            self.state = MemoryState.CACHE_GONE
        await self._take_cache()

    async def _release(self) -> None:
        engine, call = self._engine.require_live(), self._engine.call
        match self._level:
            case "none":
                raise ValueError("an engine with sleep: none does not sleep")
            case "weights" if self._frozen:
                if self.awake:
                    await call(engine.sleep(1, "keep"))
                    self.state = MemoryState.CACHE_GONE
            case "weights":
                if self.state is not MemoryState.WEIGHTS_GONE:
                    # Before they are gone, so that nothing reports weights that are gone.
                    await call(engine.collective_rpc("troupe_forget_weights"))
                    await call(engine.update_weight_version(str(GONE)))
                    self.state = MemoryState.WEIGHTS_GONE
                    await call(engine.sleep(2, "keep"))
            case "kv_cache":
                if self.awake:
                    await call(engine.release_kv_cache_memory())
                    self.state = MemoryState.CACHE_GONE

    async def _take_cache(self) -> None:
        """Take back the cache, and frozen weights; vLLM then resumes automatically. Raises StaleWake."""
        if self.state is not MemoryState.CACHE_GONE:
            what = "were discarded" if self.state is MemoryState.WEIGHTS_GONE else "were not verified"
            raise StaleWake(f"the engine's weights {what}: it wakes with new ones only")
        await self._engine.call(self._engine.require_live().wake_up(None if self._frozen else _CACHE))
        self.state = MemoryState.AWAKE
