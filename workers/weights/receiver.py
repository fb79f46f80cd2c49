"""How a worker's engine gets new weights: verified, while its requests are paused, and with the node's files."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.workers.contract.messages import WeightAck, WeightUpdate, WorkerGone
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.serving import ServingEngine
from troupe.workers.engine.settings import adapter_request
from troupe.workers.engine.sleep import EngineSleep
from troupe.workers.isolation.lifetime import remove_at_death, retire

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from troupe.workers.weights.shared_memory import Bytes
    from troupe.workers.weights.store import StoredBytes

logger = logging.getLogger(__name__)

_PROBED = tuple(range(1, 13))
"""Tokens that show whether an engine's adapters have an effect."""
_LEAST_EFFECT = 1e-3
"""Nats by which some log-prob must differ. A probe's adapters change them by much more."""


class EngineWeights:
    """Loads versions of the policy's weights into an engine, and confirms what its processes hold. Requests are
    paused during a load. After a failed update the engine stays closed until one succeeds."""

    def __init__(self, engine: ServingEngine, memory: EngineSleep) -> None:
        self._engine = engine
        self._memory = memory
        self._adapts = engine.config.lora is not None
        """Whether the policy trains adapters."""
        self._adapter: LoRARequest | None = None
        """The policy's adapters that the engine has loaded."""

    def require_adapter(self) -> LoRARequest | None:
        """The adapters of the current version, or None if it has whole weights. Raises EngineClosed."""
        if self._adapts and self._adapter is None:
            raise EngineClosed(self._engine.name, "it has not loaded the policy's adapters yet")
        return self._adapter

    async def update(self, update: WeightUpdate) -> WeightAck:
        """Load a published file of weights while running requests are paused; version and digest are as the
        processes that hold them report. After an error, requests end with EngineClosed until an update succeeds.
        Raises WeightDigestMismatch with this worker's name; EngineDead; EngineOutOfStep if one of several
        processes failed; EngineClosed otherwise."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started, call = time.monotonic(), self._engine.call
        async with self._engine.lock:
            engine = await self._engine.pause()
            try:
                await self._memory.begin_update()
                await call(engine.collective_rpc("troupe_forget_unfinished_update"))
                await call(engine.start_weight_update())
                await call(engine.update_weights(WeightTransferUpdateRequest({"fields": asdict(update)})))
                await call(engine.finish_weight_update(str(update.version)))
                if self._adapts:
                    await self._use_adapter(engine)
                await self.confirm(update.version, update.digest)
                if self._adapts:
                    self._adapter = adapter_request(update.version, update.digest)
                await self._memory.resume()
                self._engine.serve(update.version)
            except BaseException as error:
                self._engine.close_for(f"the update to version {update.version} failed")
                if isinstance(error, Exception) and not isinstance(error, WorkerGone):
                    raise await self._failure(update, error) from error
                raise
        return await self._ack(update.version, update.digest, started)

    # The receiving side of transfers from device to device, driven by the trainer's sender. nccl is untested on GPU.

    async def join(self, init_info: dict[str, Any]) -> None:
        """Join the sender of a transfer. An engine that a failed transfer has closed joins again."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        engine = self._engine.require_live()
        await self._engine.call(engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    async def begin(self) -> None:
        """Pause requests for an update from device to device; one that did not end (the trainer died) is forgotten."""
        close_on_failure = self._engine.call_or_close
        async with self._engine.lock:
            engine = await self._engine.pause()
            await close_on_failure(self._memory.begin_update())
            await close_on_failure(engine.collective_rpc("troupe_forget_unfinished_update"))
            await close_on_failure(engine.start_weight_update())

    async def receive(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        received = self._engine.require_live().update_weights(WeightTransferUpdateRequest(update_info))
        await self._engine.call_or_close(received)

    async def finish(self, version: int, digest: str) -> WeightAck:
        """Serve the weights received as `version`. Raises WeightDigestMismatch if a process has others."""
        engine, started = self._engine.require_live(), time.monotonic()
        await self._engine.call_or_close(engine.finish_weight_update(str(version)))
        await self._engine.call_or_close(self.confirm(version, digest))
        await self._engine.call_or_close(self._memory.resume())
        self._engine.serve(version)
        return await self._ack(version, digest, started)

    async def confirm(self, version: int, digest: str) -> None:
        """Raise WeightDigestMismatch unless every process of the engine holds this version and digest."""
        from troupe.workers.weights.file import WeightDigestMismatch

        for rank in await self._held():
            if (rank["version"], rank["digest"]) != (version, digest):
                raise WeightDigestMismatch(self._engine.name, digest, f"{rank['digest']} of version {rank['version']}")

    async def confirm_model(self, digest: str) -> None:
        """Raise WeightDigestMismatch unless every process of the engine has loaded a model of this digest."""
        from troupe.workers.weights.file import WeightDigestMismatch

        engine = self._engine.require_live()
        for loaded in await self._engine.call(engine.collective_rpc("troupe_model_digest")):
            if loaded != digest:
                raise WeightDigestMismatch(self._engine.name, digest, loaded or "none: it has not read all")

    async def _held(self) -> list[dict[str, Any]]:
        """The weights that each process of the engine holds, as a `LoadedWeights`."""
        return await self._engine.call(self._engine.require_live().collective_rpc("troupe_loaded_weights"))

    async def _ack(self, version: int, digest: str, started: float) -> WeightAck:
        seconds = time.monotonic() - started
        return WeightAck(self._engine.name, version, digest, seconds, peak=await self._engine.peak())

    async def _failure(self, update: WeightUpdate, error: Exception) -> Exception:
        """The exception to raise. vLLM forwards the message of a worker's error but not its type: ask the workers."""
        from troupe.workers.weights.file import WeightDigestMismatch

        wrong = [rank["mismatch"] for rank in await self._held() if rank["mismatch"]]
        if wrong:
            return WeightDigestMismatch(self._engine.name, update.digest, wrong[0])
        return EngineClosed(self._engine.name, f"{self._engine.closed_because}: {error}")

    async def _use_adapter(self, engine: AsyncLLM) -> None:
        """Put the received adapters in place. Raises RuntimeError if a first probe shows that they have no effect."""
        call = self._engine.call
        if self._adapter is None:
            await call(engine.collective_rpc("troupe_use_probe"))
            await self._memory.resume()  # sleep leaves the model below as it was, and the probe alone samples now
            probe = adapter_request(self._engine.version, "probe")
            adapted, plain = [await _probe_logprobs(engine, lora) for lora in (probe, None)]
            await call(engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))
            if not _apart(adapted, plain):
                raise RuntimeError("the engine computes the same log-probs with adapters and without")
        await call(engine.collective_rpc("troupe_use_adapter"))


class NodeFile:
    """The weight file that a worker writes for all engines of its node, which is not the policy's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._paths: set[str] = set()
        self._kept = ("", "")
        """Path and digest of the file that was written whole, or empty without one."""

    async def write(self, update: WeightUpdate, payload: Bytes | StoredBytes) -> None:
        """Write the weight file of `update` from its bytes, uint8, or an object store. Raises StoreFailed."""
        from troupe.workers.weights.file import write_payload

        if update.path not in self._paths:
            remove_at_death(update.path)
        for path in self._paths - {update.path}:
            retire(path)
        self._paths, self._kept = {update.path}, ("", "")
        await asyncio.to_thread(write_payload, update, await _fetched(payload))
        self._kept = update.path, update.digest

    async def change(self, update: WeightUpdate, delta: Bytes | StoredBytes) -> bool:
        """Change the last file into that of `update`, for engines to verify; False without the delta's base."""
        from troupe.workers.weights.delta import DeltaRefused, base_of
        from troupe.workers.weights.file import change_payload

        kept, self._kept = self._kept, ("", "")
        try:
            content = await _fetched(delta)
            if kept != (update.path, base_of(content)):
                return False
            await asyncio.to_thread(change_payload, update, content)
        except (DeltaRefused, OSError) as error:
            logger.warning("%s: version %d is sent whole: %s", self._name, update.version, error)
            return False
        self._kept = update.path, update.digest
        return True

    def close(self) -> None:
        for path in self._paths:
            retire(path)


async def _fetched(content: Bytes | StoredBytes) -> Bytes:
    """The bytes, read from the object store if they are there. Raises StoreFailed."""
    return content if isinstance(content, np.ndarray) else await asyncio.to_thread(content.fetch)


async def _probe_logprobs(engine: AsyncLLM, adapter: LoRARequest | None) -> list[float]:
    """Log-probs of some tokens after the others, with the adapter or with the model below alone."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    name = "probe" if adapter is not None else "probe-without"
    final: RequestOutput | None = None
    async for output in engine.generate(tokens_input(list(_PROBED)), params, name, lora_request=adapter):
        final = output
    if final is None or final.prompt_logprobs is None:
        raise RuntimeError("vLLM returned no log-probs of a probe")
    scores = zip(final.prompt_logprobs, _PROBED, strict=True)
    return [known[token].logprob for known, token in scores if known is not None]


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether some of the log-probs differ by more than rounding."""
    gaps = (abs(a - b) for a, b in zip(one, other, strict=True))
    return any(gap > _LEAST_EFFECT or math.isnan(gap) for gap in gaps)
