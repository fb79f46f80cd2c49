"""The rollout worker: one vLLM engine that samples groups and takes verified weights while it runs."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workers.config import RolloutConfig, TransferBackend
from workers.engine_process import forked_engines, import_ahead
from workers.messages import (
    ROLLOUTS,
    GroupRequest,
    GroupSummary,
    Peak,
    SampleSummary,
    WeightAck,
    WeightUpdate,
    WorkerGone,
    WorkerHealth,
)
from workers.peaks import resident_peak
from workers.rollout_prompts import PromptRefused, encode_prompt, sample_seed
from workers.shared_file import remove_at_death, retire

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

INITIAL_VERSION = 0
_TRANSFER_BACKENDS: dict[TransferBackend, str] = {"shm": "troupe_shm", "ipc": "ipc", "nccl": "nccl"}
_EXTENSION = "workers.weight_transfer.EngineExtension"
_OWNER_VARIABLE = "TROUPE_ENGINE_OWNER"
_LIVENESS_S = 0.5
_SHUTDOWN_S = 30.0  # vLLM needs 5 on two cores; one it has to kill leaves its shared memory behind
_CPU_PREFILL_TOKENS = 4096
_CPU_BLOCK_TOKENS = 32
"""In a block of the KV cache. Samples share the whole blocks of their prompt: by default vLLM's CPU build makes them of
128, more than many a prompt. Its kernels want multiples of 32."""


class EngineClosed(RuntimeError):
    """The engine does not serve: it was not started, is shut, or its last weight update failed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)

    def __str__(self) -> str:
        return "{} does not serve: {}".format(*self.args)


class EngineDead(WorkerGone):
    """The engine's process is gone; only a new worker helps."""

    def __init__(self, name: str) -> None:
        super().__init__(name)

    def __str__(self) -> str:
        return f"the engine process of {self.args[0]} is gone"


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    UPDATING = "updating"


class RolloutWorker:
    """Samples groups of completions from the policy, token by token accountable to a weight version.

    Several `generate` calls run at once. `update_weights` freezes them, swaps the weights and lets them go on; their
    KV cache is computed anew, so that every token is sampled from exactly the version it is recorded under. After an
    update that failed the engine stays closed until a good one arrives.

    Tensor parallelism passes through to vLLM and every rank must confirm the digest, but it has not been tried.
    """

    def __init__(self, config: RolloutConfig, name: str) -> None:
        self._config = config
        self._name = name
        self._engine: AsyncLLM | None = None
        self._state = _State.CLOSED
        self._closed_because = "it was not started"
        self._version = INITIAL_VERSION
        self._running: set[asyncio.Task[RequestOutput]] = set()
        self._serial = itertools.count()
        self._update_lock = asyncio.Lock()
        self._files_written: set[str] = set()
        # Its own tokenizer in one thread: a long prompt blocks no other group, and a tokenizer is not shared.
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")

    async def start(self) -> WorkerHealth:
        """Load the model; minutes, and the event loop waits with it.

        Raises ValueError for a model without a chat template, and what vLLM raises for one it cannot load.
        """
        _set_environment(self._config)
        from transformers import AutoTokenizer
        from vllm.v1.engine.async_llm import AsyncLLM

        model = self._config.model
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer in {model.path} has no chat template")
        self._tokenizer = tokenizer
        with forked_engines(self._config.device):
            self._engine = AsyncLLM.from_engine_args(_engine_args(self._config))
        await self._engine.update_weight_version(str(INITIAL_VERSION))
        self._state = _State.OPEN
        return await self.health()

    async def generate(self, request: GroupRequest, prompts: pa.Table) -> tuple[GroupSummary, pa.Table]:
        """Sample one group; returns its summary and its ROLLOUTS table, one row per sample, in order.

        `prompts`: the whole PROMPTS pool. A prompt that cannot be used gives a summary with `refused` set and an
        empty table. `response` is the text of all response tokens but special ones, a stop string included: what is
        scored is what is trained. The end-of-sequence token is part of `response_ids` where it was sampled.

        Raises EngineClosed, EngineDead, and IndexError for a row the pool does not have.
        """
        self._open_engine()
        if not 0 <= request.row < prompts.num_rows:
            raise IndexError(f"row {request.row} of a pool of {prompts.num_rows} prompts")
        prompt = prompts.slice(request.row, 1).to_pylist()[0]
        started = time.monotonic()
        try:
            prompt_ids = await self._encode(prompt["messages"])
        except PromptRefused as error:
            refused = f"{prompt['origin']}: {error}"
            return self._summary(request, (), 0.0, refused=refused), ROLLOUTS.empty_table()
        engine = self._open_engine()  # it may have been shut meanwhile
        outputs = await self._all_or_none(
            [self._sample(engine, request, index, prompt_ids) for index in range(request.samples)]
        )
        rows = [self._row(request, index, prompt, prompt_ids, output) for index, output in enumerate(outputs)]
        samples = tuple(_sample_summary(row, self._version) for row in rows)
        seconds = time.monotonic() - started
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        summary = self._summary(request, samples, seconds, cached_tokens=cached)
        return summary, pa.Table.from_pylist(rows, schema=ROLLOUTS)

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Swap in a published version (shared-memory back-end) while running requests wait.

        The acknowledged version and digest are the word of the processes that hold the weights. Raises
        WeightDigestMismatch (naming this worker), or EngineClosed for whatever else kept the update from arriving. From
        then on running and new requests end with EngineClosed until an update succeeds.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started = time.monotonic()
        async with self._update_lock:
            engine = await self._pause()
            try:
                await self._call(engine.collective_rpc("troupe_forget_unfinished_update"))
                await self._call(engine.start_weight_update())
                await self._call(engine.update_weights(WeightTransferUpdateRequest(asdict(update))))
                await self._call(engine.finish_weight_update(str(update.version)))
                digest = await self._confirmed_digest(update)
                await self._resume(update.version)
            except BaseException as error:
                self._shut(f"the update to version {update.version} failed")
                if isinstance(error, Exception) and not isinstance(error, EngineDead):
                    raise await self._update_failure(update, error) from error
                raise
        seconds = time.monotonic() - started
        return WeightAck(self._name, update.version, digest, seconds, peak=await self._peak())

    async def write_weights(self, update: WeightUpdate, payload: npt.NDArray[np.uint8]) -> None:
        """Make the weight file of `update` on this node, for all engines here. `payload`: its bytes."""
        from workers.weight_file import write_payload

        if update.path not in self._files_written:
            remove_at_death(update.path)
        for path in self._files_written - {update.path}:
            retire(path)
        self._files_written = {update.path}
        await asyncio.to_thread(write_payload, update, payload)

    async def health(self) -> WorkerHealth:
        """A sign of life that has been through the engine's process, so that a hanging engine does not answer.

        Raises EngineClosed and EngineDead; an engine in the middle of an update answers after it.
        """
        version = int(await self._call(self._open_engine().get_weight_version()))
        peak, running = await self._peak(), len(self._running)
        return WorkerHealth(self._name, socket.gethostname(), os.getpid(), version, running, peak=peak)

    async def close(self) -> None:
        """Stop the engine and remove what was written. Running requests end with EngineClosed."""
        self._shut("it was shut")
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # or it takes the end of the engine for its death, and says so
            await asyncio.to_thread(engine.shutdown, _SHUTDOWN_S)
        for path in self._files_written:
            retire(path)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    # The receiving side of vLLM's own GPU back-ends, driven by the trainer's sender. Untried on a GPU.

    async def transfer_init(self, init_info: dict[str, Any]) -> None:
        """vLLM's `init_weight_transfer_engine` (nccl, ipc)."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._call(self._open_engine().init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    async def transfer_start(self) -> None:
        """vLLM's `start_weight_update` (nccl, ipc), with running requests frozen."""
        async with self._update_lock:
            engine = await self._pause()
            await self._closing_on_failure(engine.start_weight_update())

    async def transfer_receive(self, update_info: dict[str, Any]) -> None:
        """vLLM's `update_weights` (nccl, ipc)."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._closing_on_failure(self._live_engine().update_weights(WeightTransferUpdateRequest(update_info)))

    async def transfer_finish(self, version: int) -> None:
        """vLLM's `finish_weight_update` (nccl, ipc); serve `version` from here on.

        These back-ends carry no digest: nothing but the transport vouches for the bytes.
        """
        await self._closing_on_failure(self._live_engine().finish_weight_update(str(version)))
        await self._resume(version)

    async def _closing_on_failure(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await self._call(call)
        except BaseException as error:
            self._shut(f"a weight update failed: {error}")
            raise

    def _live_engine(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineClosed(self._name, self._closed_because)
        if self._engine.errored:
            raise EngineDead(self._name)
        return self._engine

    def _open_engine(self) -> AsyncLLM:
        engine = self._live_engine()
        if self._state is _State.CLOSED:
            raise EngineClosed(self._name, self._closed_because)
        return engine

    async def _call(self, call: Awaitable[T]) -> T:
        """Wait for a call into the engine's process; vLLM itself waits for ever when that dies before it answers."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LIVENESS_S)
                if not task.done():
                    self._live_engine()
            return task.result()
        except Exception as error:
            if self._engine is not None and self._engine.errored:
                raise EngineDead(self._name) from error
            raise
        finally:
            task.cancel()

    async def _peak(self) -> Peak:
        """Of this process and vLLM's; on GPUs of the rank that holds most. Untried on a GPU."""
        import psutil

        gpus: list[int] = []
        if self._config.device == "cuda":
            gpus = await self._call(self._live_engine().collective_rpc("troupe_gpu_peak"))
        children = [process.pid for process in psutil.Process().children(recursive=True)]
        return Peak(resident_peak(children), max(gpus, default=0))

    async def _pause(self) -> AsyncLLM:
        engine = self._live_engine()
        self._state = _State.UPDATING
        try:
            # Clearing the cache also sends the running requests back to recompute theirs under the new weights. vLLM's
            # own `pause_generation` does this and then sleeps 20 ms for its callers to see outputs in a certain order.
            await self._call(engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))
        except BaseException as error:
            self._shut(f"it could not be paused: {error}")
            raise
        return engine

    async def _resume(self, version: int) -> None:
        await self._call(self._live_engine().resume_generation())
        self._version = version
        self._state = _State.OPEN

    def _shut(self, reason: str) -> None:
        """Serve no more, and end what is running (vLLM drops a request whose consumer is cancelled)."""
        self._state = _State.CLOSED
        self._closed_because = reason
        for sample in self._running:
            sample.cancel()

    async def _confirmed_digest(self, update: WeightUpdate) -> str:
        engine = self._live_engine()
        ranks: list[dict[str, Any]] = await self._call(engine.collective_rpc("troupe_loaded_weights"))
        held = {(rank["version"], rank["digest"]) for rank in ranks}
        if held != {(update.version, update.digest)}:
            raise RuntimeError(f"the processes of {self._name} hold {sorted(map(str, held))}, not {update.digest}")
        return update.digest

    async def _update_failure(self, update: WeightUpdate, error: Exception) -> Exception:
        """vLLM hands on the message of a worker's error but not its type: ask the workers what they saw."""
        from workers.weight_file import WeightDigestMismatch

        ranks: list[dict[str, Any]] = await self._call(self._live_engine().collective_rpc("troupe_loaded_weights"))
        wrong = [rank["mismatch"] for rank in ranks if rank["mismatch"]]
        if wrong:
            return WeightDigestMismatch(self._name, update.digest, wrong[0])
        return EngineClosed(self._name, f"{self._closed_because}: {error}")

    async def _encode(self, messages: str) -> list[int]:
        if self._tokenizer is None:
            raise EngineClosed(self._name, self._closed_because)
        longest = self._config.engine.max_model_len - self._config.sampling.max_tokens
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, encode_prompt, self._tokenizer, messages, longest)

    def _summary(
        self,
        request: GroupRequest,
        samples: tuple[SampleSummary, ...],
        seconds: float,
        *,
        refused: str = "",
        cached_tokens: int = 0,
    ) -> GroupSummary:
        ahead = sum(sample.done() for sample in self._running)
        return GroupSummary(
            request.prompt_uid, request.attempt, self._name, samples, seconds, refused, cached_tokens, ahead
        )

    async def _all_or_none(self, samples: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
        """Outputs of all; the first failure cancels the rest and is raised."""
        tasks = [asyncio.create_task(sample) for sample in samples]
        self._running.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._state is _State.CLOSED and caller is not None and not caller.cancelling():
                raise EngineClosed(self._name, self._closed_because) from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)

    async def _sample(
        self, engine: AsyncLLM, request: GroupRequest, index: int, prompt_ids: list[int]
    ) -> RequestOutput:
        """One sample as a request of its own: its own seed and its own timings, and vLLM would split it up anyway."""
        from vllm.inputs.engine import tokens_input

        request_id = f"{request.prompt_uid}/{request.attempt}/{index}/{next(self._serial)}"
        params = self._sampling_params(request, index)
        final: RequestOutput | None = None
        try:
            async for output in engine.generate(tokens_input(prompt_ids), params, request_id):
                final = output
        except Exception as error:
            if engine.errored:
                raise EngineDead(self._name) from error
            raise
        if final is None or final.outputs[0].finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name}: vLLM ended {request_id} without a complete response")
        return final

    def _sampling_params(self, request: GroupRequest, index: int) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self._config.sampling
        temperature = sampling.temperature if request.temperature is None else request.temperature
        return SamplingParams(
            temperature=0.0 if request.greedy else temperature,
            top_p=request.top_p,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            seed=sample_seed(request.seed, index),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _row(
        self, request: GroupRequest, index: int, prompt: dict[str, Any], prompt_ids: list[int], output: RequestOutput
    ) -> dict[str, Any]:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        timing = output.metrics
        if self._tokenizer is None or timing is None:
            raise RuntimeError(f"{self._name}: no tokenizer or no timings")
        return {
            "prompt_uid": request.prompt_uid,
            "sample_index": index,
            "attempt": request.attempt,
            "prompt_ids": prompt_ids,
            "response_ids": ids,
            "rollout_logprobs": _sampled_logprobs(completion),
            "loss_mask": [True] * len(ids),
            "weight_versions": _version_spans(completion),
            "turns": [{"name": "assistant", "start": 0, "end": len(ids)}] if ids else [],
            "finish_reason": completion.finish_reason,
            "response": self._tokenizer.decode(ids, skip_special_tokens=True),
            "messages": prompt["messages"],
            "answer": prompt["answer"],
            "metadata": prompt["metadata"],
            "engine": self._name,
            "generate_s": max(0.0, timing.last_token_ts - timing.queued_ts),
            "first_token_s": max(0.0, timing.first_token_ts - timing.queued_ts),
        }


def _set_environment(config: RolloutConfig) -> None:
    """What vLLM reads from the environment, set before its first import and inherited by its processes; on a CPU that
    import begins here, for the engine's process."""
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # A fork of a process with threads and an event loop hangs sooner or later.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        _OWNER_VARIABLE: str(os.getpid()),
    }
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }.items():
        os.environ.setdefault(name, value)
    if config.device == "cpu":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several actors share the cores
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override `kv_cache_gib`
        if config.engine.threads:
            os.environ["OMP_NUM_THREADS"] = str(config.engine.threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        if config.engine.enforce_eager:
            # vLLM compiles one small function all the same, in the first `generate`: seconds, and it needs a compiler.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
        import_ahead()


def _engine_args(config: RolloutConfig) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    engine = config.engine
    on_cpu = config.device == "cpu"
    # A prompt that is prefilled in parts makes vLLM rewind its sampler's generator, which a CPU generator cannot: the
    # engine dies. So on the CPU prompts are prefilled whole.
    special: dict[str, Any] = (
        {
            "kv_cache_memory_bytes": int(engine.kv_cache_gib * 2**30),
            "enable_chunked_prefill": False,
            "block_size": _CPU_BLOCK_TOKENS,
            "max_num_batched_tokens": max(engine.max_model_len, _CPU_PREFILL_TOKENS),
        }
        if on_cpu
        else {"gpu_memory_utilization": engine.gpu_memory_utilization}
    )
    if on_cpu and engine.tensor_parallel_size == 1:
        # The model in the engine's own process. By default vLLM's CPU build gives it a process of its own, to set the
        # compute threads there; they are set here for all. One process less starts sooner, and samples faster.
        special["distributed_executor_backend"] = UniProcExecutor
    return AsyncEngineArgs(
        model=config.model.path,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed & 0xFFFFFFFF,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled: after temperature and top-p
        weight_transfer_config=WeightTransferConfig(backend=_TRANSFER_BACKENDS[config.transfer_backend]),
        worker_extension_cls=_EXTENSION,
        enable_log_requests=False,
        use_tqdm_on_load=False,
        disable_log_stats=False,  # the timings of each sample come from them
        **special,
    )


def _sampled_logprobs(completion: CompletionOutput) -> list[float]:
    """[response tokens] log-probabilities, in nats, of the tokens that were sampled."""
    from vllm.logprobs import FlatLogprobs

    flat = completion.logprobs
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(completion.token_ids):
        raise RuntimeError("vLLM did not return one log-probability per sampled token")
    return [flat.logprobs[start] for start in flat.start_indices]


def _version_spans(completion: CompletionOutput) -> list[dict[str, int]]:
    spans = completion.weight_versions
    if spans is None:
        raise RuntimeError("vLLM did not say which weights sampled a response")
    return [{"version": int(span.version), "start": span.start, "end": span.end} for span in spans]


def _sample_summary(row: dict[str, Any], version: int) -> SampleSummary:
    """`version`: of the engine now, for a response without tokens."""
    versions = [span["version"] for span in row["weight_versions"]] or [version]
    return SampleSummary(
        sample_index=row["sample_index"],
        prompt_tokens=len(row["prompt_ids"]),
        response_tokens=len(row["response_ids"]),
        finish_reason=row["finish_reason"],
        oldest_version=min(versions),
        newest_version=max(versions),
    )
