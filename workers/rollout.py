"""The rollout worker: one vLLM engine that samples groups and loads verified weights while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.judges import JudgeLink
from troupe.workers.contract.messages import (
    FinishedSamples,
    GroupRequest,
    GroupSummary,
    WeightAck,
    WeightUpdate,
    WorkerHealth,
)
from troupe.workers.contract.roles import EnvironmentLink, ReferenceLink
from troupe.workers.engine.generation import Generation
from troupe.workers.engine.serving import ServingEngine
from troupe.workers.engine.settings import engine_args, import_vllm, unread_metrics
from troupe.workers.engine.sleep import EngineSleep
from troupe.workers.weights.receiver import EngineWeights, NodeFile

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from troupe.workers.weights.shared_memory import Bytes
    from troupe.workers.weights.store import StoredBytes


class RolloutWorker:
    """Samples groups of completions from the policy and records the weight version of every token. `generate` calls
    run concurrently; `update_weights` pauses them, swaps the weights and resumes with a recomputed KV cache, so
    that every token is sampled from its recorded version. After a failed update the engine stays closed until one
    succeeds. Tensor parallelism is vLLM's (every rank must confirm the digest; untested on GPU)."""

    def __init__(self, config: RolloutConfig, name: str) -> None:
        pickle_tables()
        self.config = config
        self.engine = ServingEngine(config, name)
        self.memory = EngineSleep(config.sleep, self.engine)
        self.weights = EngineWeights(self.engine, self.memory)
        self.generation = Generation(config, self.engine, self.weights.require_adapter)
        self.node_file = NodeFile(name)
        self.stat_loggers: list[Any] = []
        """vLLM tells them about every iteration of the engine."""

    async def start(self) -> WorkerHealth:
        """Load the model. This takes minutes and blocks the event loop.

        Raises ValueError if the tokenizer cannot be loaded or has no chat template, or vLLM has no such tool parser, or
        cannot read the form of `sampling.structured`, EngineDead if the engine's process failed, and other errors if
        vLLM cannot load the model.
        """
        await import_vllm(self.config.process)
        self.generation.load()
        await self.engine.start(self.engine_args(), [unread_metrics(), *self.stat_loggers])
        return await self.health()

    def engine_args(self) -> AsyncEngineArgs:
        return engine_args(self.config)

    async def generate(
        self, request: GroupRequest, prompts: pa.Table, finished: pa.Table | None = None
    ) -> tuple[GroupSummary, pa.Table]:
        """Sample one group, or the rest of one with `request.finished` samples, whose rows are in `finished`, of any
        attempt. Returns the summary and the ROLLOUTS table of the whole group: one row per sample, in order, then
        one per candidate. A prompt that cannot be used gives a summary with `refused` and an empty table.
        `response` is the text of all tokens but special ones, a stop string included: what is scored is what is
        trained; `response_ids` includes a sampled end-of-sequence token. Seeds are those in a whole group. Raises
        EngineClosed, EngineDead, IndexError for a row, ValueError for missing ones."""
        return await self.generation.generate(request, prompts, finished)

    async def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], pa.Table]:
        return self.generation.finished_samples()

    async def connect_environments(self, name: str, link: EnvironmentLink) -> None:
        self.generation.connect(name, link)

    async def connect_judge(self, judge: JudgeLink) -> None:
        self.generation.connect_judge(judge)

    async def connect_reference(self, link: ReferenceLink) -> None:
        self.generation.connect_reference(link)

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        return await self.weights.update(update)

    async def write_weights(self, update: WeightUpdate, payload: Bytes | StoredBytes) -> None:
        await self.node_file.write(update, payload)

    async def change_weights(self, update: WeightUpdate, delta: Bytes | StoredBytes) -> bool:
        return await self.node_file.change(update, delta)

    async def transfer_init(self, init_info: dict[str, Any]) -> None:
        await self.weights.join(init_info)

    async def transfer_start(self) -> None:
        await self.weights.begin()

    async def transfer_receive(self, update_info: dict[str, Any]) -> None:
        await self.weights.receive(update_info)

    async def transfer_finish(self, version: int, digest: str) -> WeightAck:
        return await self.weights.finish(version, digest)

    async def reset_prefix_cache(self) -> bool:
        """Forget the states of all prompts that no running request uses; returns whether the engine did. Raises
        EngineClosed if the engine does not serve, and EngineDead if the engine's process has ended."""
        return await self.engine.call(self.engine.require_open().reset_prefix_cache())

    async def sleep(self) -> None:
        await self.memory.sleep()

    async def wake(self) -> None:
        await self.memory.wake()

    async def health(self) -> WorkerHealth:
        return await self.engine.health()

    async def close(self) -> None:
        """Stop the engine and remove the written weight files. Running requests end with EngineClosed."""
        await self.engine.stop()
        self.node_file.close()
        self.generation.close()
