"""One engine of vLLM: whether it serves, which version of the weights, and how its processes are called."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Coroutine, Sequence
from enum import Enum
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import Peak, WorkerGone, WorkerHealth
from troupe.workers.engine.errors import EngineClosed, EngineDead, EngineOutOfStep, engine_dead
from troupe.workers.engine.process import engine_processes, how_ended
from troupe.workers.telemetry.peak_memory import FamilyPeak

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

INITIAL_VERSION = 0
_PROCESS_FAILED = "Engine core initialization failed"
"""Beginning of the error with which vLLM's client refers to one in the engine's process."""
_ONE_OF_MANY_FAILED = "Worker failed with error"
"""Beginning of the error that vLLM raises for the first of an engine's processes that failed in a call."""
_LIVENESS_S = 0.5
_WATCH_S = 1.0
_SHUTDOWN_S = 30.0  # a rank or a GPU that vLLM has to kill leaves its memory behind; it needs 5 s on two cores


class Serving(Enum):
    """Whether an engine samples."""

    CLOSED = "closed"
    OPEN = "open"
    UPDATING = "updating"


class ServingEngine:
    """The engine of one worker. Calls into its processes end when a process dies; vLLM does not notice that."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.vllm: AsyncLLM | None = None
        """None before the start and after the end."""
        self.state = Serving.CLOSED
        self.closed_because = "it was not started"
        self.version = INITIAL_VERSION
        """Version of the weights that it serves."""
        self.running: set[asyncio.Task[Any]] = set()
        """Samples that are generated; they are cancelled when the engine closes."""
        self.lock = asyncio.Lock()
        """Held while the engine loads weights, falls asleep or wakes."""
        self._processes: Sequence[BaseProcess] = ()
        self._out_of_step = ""
        """Why the engine's processes no longer answer the same call, or empty if they do."""
        self._family = FamilyPeak()

    async def start(self, arguments: AsyncEngineArgs, loggers: Sequence[Any]) -> None:
        """Create the engine and open it, in minutes that block the event loop. Raises ValueError for settings,
        EngineDead, and vLLM's errors."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            with engine_processes(self.config.device) as self._processes:
                self.vllm = AsyncLLM.from_engine_args(arguments, stat_loggers=list(loggers))
        except RuntimeError as error:
            if _PROCESS_FAILED not in str(error):
                raise
            raise self.dead() from error
        except (TypeError, ValueError) as error:
            if not (options := ", ".join(self.config.engine_options)):
                raise
            why = " ".join(str(error).split())
            raise ValueError(f"vLLM refuses its settings, among them the spec's `engine` ({options}): {why}") from error
        if self.config.sampling.truncates:
            await self.vllm.collective_rpc("troupe_record_kept_tokens")
        await self.vllm.update_weight_version(str(INITIAL_VERSION))
        self.state = Serving.OPEN

    def dead(self) -> EngineDead:
        """The error for its end, with all that is known about it."""
        return engine_dead(self.name, how_ended(self._processes))

    def require_live(self) -> AsyncLLM:
        """The engine of vLLM, open or closed. Raises EngineClosed, EngineDead, EngineOutOfStep."""
        if self.vllm is None:
            raise EngineClosed(self.name, self.closed_because)
        if self.vllm.errored:
            raise self.dead()
        if self._out_of_step:
            raise EngineOutOfStep(self.name, self._out_of_step)
        return self.vllm

    def require_open(self) -> AsyncLLM:
        """The engine of vLLM, which serves or loads weights. Raises EngineClosed, EngineDead, EngineOutOfStep."""
        engine = self.require_live()
        if self.state is Serving.CLOSED:
            raise EngineClosed(self.name, self.closed_because)
        return engine

    async def call(self, call: Awaitable[T]) -> T:
        """Wait for a call into the engine's processes until it answers or one of them dies. Raises WorkerGone if a
        process has died, or failed alone in the call, else the error of the call."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LIVENESS_S)
                if not task.done():
                    self.require_live()
            return task.result()
        except Exception as error:
            if isinstance(error, WorkerGone):
                raise
            if self.vllm is not None and self.vllm.errored:
                raise self.dead() from error
            if _ONE_OF_MANY_FAILED in str(error):
                self._out_of_step = str(error)
                raise EngineOutOfStep(self.name, self._out_of_step) from error
            raise
        finally:
            task.cancel()

    async def call_or_close(self, call: Coroutine[Any, Any, object], failure: str = "a weight update failed") -> None:
        """Wait for a call like `call`, and close the engine if it fails."""
        try:
            await self.call(call)
        except BaseException as error:
            self.close_for(f"{failure}: {error}")
            raise

    async def pause(self, running: Literal["keep", "wait"] = "keep") -> AsyncLLM:
        """Pause the running samples for an update, or wait until they have finished; others wait."""
        engine = self.require_live()
        self.state = Serving.UPDATING
        try:
            # Clearing the cache also makes running requests recompute theirs under the new weights. vLLM's own
            # `pause_generation` does the same and then sleeps 20 ms to order the outputs for its callers.
            await self.call(engine.engine_core.pause_scheduler_async(mode=running, clear_cache=True))
        except BaseException as error:
            self.close_for(f"it could not be paused: {error}")
            raise
        return engine

    def serve(self, version: int) -> None:
        """Record that the engine serves the weights of this version."""
        self.version = version
        self.state = Serving.OPEN

    def close_for(self, reason: str) -> None:
        """Stop serving and cancel the running samples (vLLM drops a request whose consumer is cancelled)."""
        self.state = Serving.CLOSED
        self.closed_because = reason
        for sample in self.running:
            sample.cancel()

    async def stop(self) -> None:
        """End the processes. Running samples end with EngineClosed."""
        self.close_for("it was closed")
        engine, self.vllm = self.vllm, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # or it reports the shutdown as a crash
            alone = self.config.device == "cpu" and self.config.engine.tensor_parallel_size == 1
            # vLLM collects garbage for seconds at its end; what a process without ranks and GPU holds ends with it
            await asyncio.to_thread(_shut_down, engine, 0.0 if alone else _SHUTDOWN_S)

    async def watch(self, seconds: float) -> bool:
        """Whether the engine serves; answers as soon as it does not, else after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                await self.health()
            except (EngineClosed, EngineDead):
                return False
            await asyncio.sleep(min(_WATCH_S, left))
        return True

    async def health(self) -> WorkerHealth:
        """Health of the worker, through the engine's process (a hanging one is silent), after an update that is
        under way. A sleeping engine is healthy. Raises EngineClosed, EngineDead."""
        version = int(await self.call(self.require_open().get_weight_version()))
        peak, running = await self.peak(), len(self.running)
        return WorkerHealth(self.name, socket.gethostname(), os.getpid(), version, running, peak=peak)

    async def peak(self) -> Peak:
        """Peak memory of this process and vLLM's; on GPUs, of the rank with the highest peak. Untested on GPU."""
        import psutil

        gpus: list[int] = []
        if self.config.device == "cuda":
            gpus = await self.call(self.require_live().collective_rpc("troupe_gpu_peak"))
        children = [process.pid for process in psutil.Process().children(recursive=True)]
        return Peak(self._family.read(children), max(gpus, default=0))


def _shut_down(engine: AsyncLLM, timeout_s: float) -> None:
    """End vLLM's processes. vLLM stops half way if one has ended just before it is killed."""
    import psutil

    try:
        engine.shutdown(timeout_s)
    except psutil.NoSuchProcess:
        vars(engine.engine_core)["resources"]()
