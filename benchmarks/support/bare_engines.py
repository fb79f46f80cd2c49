"""Sampling baselines: vLLM's two front ends, called directly in child processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from benchmarks.support.harness import Turn
from benchmarks.support.processes import Meter, RemoteObject
from benchmarks.support.workload import Group
from troupe.workers.contract.config import RolloutConfig
from troupe.workers.contract.messages import GroupRequest
from troupe.workers.data.tokenizer import load_chat_tokenizer
from troupe.workers.engine.process import engine_processes, import_ahead
from troupe.workers.engine.settings import engine_args, set_environment
from troupe.workers.rollout import RolloutWorker

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

# The weight transfer, its extension, and the statistics that time each sample.
_PRODUCT_ONLY = {"weight_transfer_config", "worker_extension_cls", "disable_log_stats"}


@dataclass(frozen=True)
class SampledBatch:
    """The samples of one engine in one turn."""

    began: float
    """On the monotonic clock, which all processes of a machine share."""
    ended: float
    response_ids: list[list[int]]
    """Response token ids of every sample of every group, in order."""


def engine_arguments(config: RolloutConfig) -> dict[str, Any]:
    """The product's engine arguments, without those that only the product needs.

    Also sets vLLM's environment variables, so it must be called before vLLM is imported.
    """
    set_environment(config.process)
    if config.device == "cpu":
        import_ahead()
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    product, default = engine_args(config), AsyncEngineArgs(model=config.model.path)
    names = [field.name for field in fields(EngineArgs) if field.name not in _PRODUCT_ONLY]
    values = {name: getattr(product, name) for name in names if getattr(product, name) != getattr(default, name)}
    return values | {"model": config.model.path, "disable_log_stats": True}


def sampling_params(worker: RolloutWorker, group: Group, greedy: bool = False) -> list[SamplingParams]:
    """The product's sampling parameters for each sample of a group; `worker` does not need to be started."""
    generation = worker.generation
    if generation.tokenizer is None:  # it says which tokens end a response
        generation.tokenizer = load_chat_tokenizer(worker.config.model)
    request = GroupRequest(group.uid, group.row, 0, group.samples, group.seed, greedy=greedy)
    return [generation.sampling_params(request, index) for index in range(group.samples)]


def generate_all(llm: LLM, worker: RolloutWorker, groups: Sequence[Group], greedy: bool = False) -> list[RequestOutput]:
    """Run `LLM.generate` on every sample of every group; outputs are in order."""
    prompts: list[Any] = [
        {"prompt_token_ids": list(group.prompt_ids)} for group in groups for _ in range(group.samples)
    ]
    params = [one for group in groups for one in sampling_params(worker, group, greedy)]
    return llm.generate(prompts, params, use_tqdm=False)


def cold_start(config: RolloutConfig, groups: Sequence[Group], timeout_s: float) -> tuple[Turn, SampledBatch]:
    """Start a bare engine in a new process and sample all groups with it. Raises ChildFailed."""
    meter = Meter()
    child = RemoteObject("cold start", BareAsyncLLM, config, RolloutWorker)
    try:
        sampled: SampledBatch = child.call("sample", groups, timeout_s=timeout_s)
        return meter.turn(1), sampled
    finally:
        child.close()


class BareLLM:
    """`LLM.generate`: one call with all samples, which returns when all are finished."""

    def __init__(self, config: RolloutConfig, worker: type[RolloutWorker]) -> None:
        """`worker`: the class of the product's side, which knows the sampling parameters."""
        arguments = engine_arguments(config)
        from vllm import LLM

        self._worker = worker(config, "bare")
        with engine_processes(config.device):
            self._llm = LLM(**arguments)

    def ready(self) -> None:
        """Answers when the engine is up."""

    def sample(self, groups: Sequence[Group], greedy: bool = False) -> SampledBatch:
        """Sample all groups."""
        began = time.monotonic()
        outputs = generate_all(self._llm, self._worker, groups, greedy)
        return SampledBatch(began, time.monotonic(), [list(output.outputs[0].token_ids) for output in outputs])


class BareAsyncLLM:
    """`AsyncLLM.generate`: one concurrent task per sample."""

    def __init__(self, config: RolloutConfig, worker: type[RolloutWorker]) -> None:
        """`worker`: the class of the product's side, which knows the sampling parameters."""
        arguments = engine_arguments(config)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._worker = worker(config, "bare")
        self._serial = itertools.count()
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

        async def build() -> AsyncLLM:
            with engine_processes(config.device):
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, enable_log_requests=False))

        self._engine = self._loop.run_until_complete(build())

    def ready(self) -> None:
        """Answers when the engine is up."""

    def sample(self, groups: Sequence[Group], greedy: bool = False) -> SampledBatch:
        """Sample all groups."""
        return self._loop.run_until_complete(self._sample(groups, greedy))

    async def _sample(self, groups: Sequence[Group], greedy: bool) -> SampledBatch:
        from vllm.inputs.engine import tokens_input

        began = time.monotonic()
        jobs = [(group, params) for group in groups for params in sampling_params(self._worker, group, greedy)]
        outputs = await asyncio.gather(
            *(self._one(tokens_input(list(group.prompt_ids)), params) for group, params in jobs)
        )
        return SampledBatch(began, time.monotonic(), [list(output.outputs[0].token_ids) for output in outputs])

    async def _one(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        final: RequestOutput | None = None
        async for output in self._engine.generate(prompt, params, str(next(self._serial))):
            final = output
        if final is None:
            raise RuntimeError("vLLM finished a request without an output")
        return final
