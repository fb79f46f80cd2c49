"""A rollout worker that measures its engine (`troupe bench`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from troupe.workers.contract.config import RolloutConfig, SamplingConfig
from troupe.workers.contract.measurements import BareBatch, EngineReading, UpdateParts
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.data.chat import PromptRefused
from troupe.workers.engine.settings import check_structured
from troupe.workers.rollout import RolloutWorker
from troupe.workers.telemetry.engine_meter import EngineMeter

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM


_EXTENSION = "troupe.workers.weights.measured_transfer.MeasuredExtension"


class MeasuredRollout(RolloutWorker):
    """The rollout worker of a run, with a meter in its engine; see `MeasuredEngine`."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        super().__init__(config, name)
        self._meter = EngineMeter()
        self._stat_loggers = [lambda config, index: self._meter]

    def _engine_args(self) -> AsyncEngineArgs:
        """Arguments of a run's engine, which also reports its iterations in detail and times its weight updates."""
        arguments = super()._engine_args()
        arguments.worker_extension_cls = _EXTENSION
        arguments.enable_logging_iteration_details = True
        return arguments

    async def use_sampling(self, sampling: SamplingConfig) -> None:
        """Sample with these settings from now on. Raises ValueError if vLLM cannot read their form."""
        check_structured(sampling.structured)
        self._config = self._config.model_copy(update={"sampling": sampling})

    async def read_meter(self) -> EngineReading:
        """Work of the engine since the last reading."""
        return self._meter.read(self._name)

    async def read_update(self) -> UpdateParts:
        """Time of the engine's slowest process for weight updates since the last reading, by part."""
        parts: list[dict[str, float]] = await self._call(self._open_engine().collective_rpc("troupe_update_parts"))
        slowest = max(parts, key=lambda one: sum(one.values()))
        return UpdateParts(slowest.get("verify", 0.0), slowest.get("load", 0.0))

    async def sample_bare(self, requests: Sequence[GroupRequest], prompts: pa.Table) -> BareBatch:
        """Sample these groups by calling `AsyncLLM.generate` for all of their samples at once, and keep nothing.

        Prompts are tokenized before the time is taken. Prompts that the worker would refuse are left out.

        Args:
            requests: The groups.
            prompts: The whole PROMPTS pool.
        """
        engine = self._open_engine()
        jobs: list[tuple[list[int], SamplingParams]] = []
        for request in requests:
            messages = prompts.slice(request.row, 1).column("messages").to_pylist()[0]
            try:
                prompt_ids = await self._encode(messages, request.max_tokens)
            except PromptRefused:
                continue
            jobs += [(prompt_ids, self._sampling_params(request, index)) for index in range(request.samples)]
        started = time.monotonic()
        lengths = await asyncio.gather(
            *(_sample(engine, f"bare/{number}/{next(self._serial)}", *job) for number, job in enumerate(jobs))
        )
        return BareBatch(time.monotonic() - started, len(lengths), sum(lengths))


async def _sample(engine: AsyncLLM, request_id: str, prompt_ids: list[int], params: SamplingParams) -> int:
    """Tokens of one sample."""
    from vllm.inputs.engine import tokens_input

    tokens = 0
    async for output in engine.generate(tokens_input(prompt_ids), params, request_id):
        tokens = len(output.outputs[0].token_ids)
    return tokens
