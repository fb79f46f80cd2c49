"""The rollout worker: one vLLM engine that samples groups and loads verified weights while it runs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa

from troupe.workers.agents.interface import (
    EpisodeRunner,
    LongReader,
    Played,
    SampledTurn,
    TurnLimits,
    TurnReader,
    read_row,
)
from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import RolloutConfig, StructuredConfig
from troupe.workers.contract.environments import EnvironmentGone
from troupe.workers.contract.imports import without_collections
from troupe.workers.contract.messages import (
    ROLLOUTS,
    FinishedSamples,
    GroupRequest,
    GroupSummary,
    Peak,
    SampleSummary,
    WeightAck,
    WeightUpdate,
    WorkerGone,
    WorkerHealth,
)
from troupe.workers.contract.roles import EnvironmentLink
from troupe.workers.data.chat import PromptRefused, encode_prompt, sample_seed, turn_seed
from troupe.workers.data.tokenizer import load_chat_tokenizer, within_embedding
from troupe.workers.data.turn_ends import turn_ends
from troupe.workers.engine.errors import EngineClosed, EngineOutOfStep, engine_dead
from troupe.workers.engine.probe import apart, probe_logprobs
from troupe.workers.engine.process import engine_processes, import_ahead
from troupe.workers.engine.rows import (
    RowBuilder,
    Rows,
    RunningGroup,
    episode_summary,
    merged,
    sample_summary,
    sampled_turn,
)
from troupe.workers.engine.settings import (
    adapter_request,
    check_structured,
    engine_args,
    set_environment,
    structured_outputs,
    unread_metrics,
)
from troupe.workers.engine.sleep import EngineMemory
from troupe.workers.engine.tool_calls import tool_parser
from troupe.workers.isolation.lifetime import remove_at_death, retire
from troupe.workers.telemetry.peak_memory import FamilyPeak
from troupe.workers.telemetry.start_activity import Activity, announce

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from troupe.workers.weights.shared_memory import Bytes
    from troupe.workers.weights.store import StoredBytes

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

INITIAL_VERSION = 0
_PROCESS_FAILED = "Engine core initialization failed"
"""Beginning of the error with which vLLM's client refers to one in the engine's process."""
_ONE_OF_MANY_FAILED = "Worker failed with error"
"""Beginning of the error that vLLM raises for the first of an engine's processes that failed in a call."""
_TURN_S = 0.1
"""Time for the event loop to send its answers."""
_LIVENESS_S = 0.5
_SHORT_PROMPT = 2_000
"""Characters of messages that are tokenized in less than a millisecond. If all cores compute, it takes longer until
a thread runs, and the engine begins without groups that arrive together."""
_SHUTDOWN_S = 30.0  # vLLM needs 5 s on two cores; a process that it has to kill leaves its shared memory behind


async def _fetched(content: Bytes | StoredBytes) -> Bytes:
    """The bytes, read from the object store if they are there. Raises StoreFailed."""
    return content if isinstance(content, np.ndarray) else await asyncio.to_thread(content.fetch)


def _as_in_training(request: GroupRequest) -> bool:
    """Whether the tokens of a request are drawn from the distribution that is trained."""
    return request.temperature is None and not request.greedy


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    UPDATING = "updating"


class RolloutWorker:
    """Samples groups of completions from the policy and records the weight version of every token.

    `generate` calls run concurrently. `update_weights` pauses them, swaps the weights and resumes them. Their KV cache
    is recomputed, so that every token is sampled from exactly the version it is recorded under. After a failed update
    the engine stays closed until an update succeeds.

    Tensor parallelism is passed to vLLM, and every rank must confirm the digest. It is untested on GPU.
    """

    def __init__(self, config: RolloutConfig, name: str) -> None:
        pickle_tables()
        self._config = config
        self._name = name
        self._family = FamilyPeak()
        self._engine: AsyncLLM | None = None
        self._state = _State.CLOSED
        self._closed_because = "it was not started"
        self._out_of_step = ""
        """Why the engine's processes no longer answer the same call, or empty if they do."""
        self._version = INITIAL_VERSION
        self._running: set[asyncio.Task[Any]] = set()
        self._groups: dict[RunningGroup[Any], None] = {}
        """Groups with samples that run, in order of arrival."""
        self._serial = itertools.count()
        self._update_lock = asyncio.Lock()
        self._memory = EngineMemory(config.sleep, self._call)
        self._adapter: LoRARequest | None = None
        """The policy's adapters that the engine has loaded, if the policy trains adapters."""
        self._files_written: set[str] = set()
        self._kept = ("", "")
        """Path and digest of the weight file that this worker wrote whole, or empty without one."""
        self._environments: dict[str, EnvironmentLink] = {}
        self._readers: dict[str, TurnReader] = {}
        """Turn readers by the name of their environment; `_long` has the same keys."""
        # One thread: a long prompt blocks no other group, and tokenizers are not thread-safe.
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self._in_thread = 0
        """Prompts that the thread tokenizes, or that wait for it."""
        self._long: dict[str, LongReader] = {}
        self._stat_loggers: list[Any] = []
        """vLLM tells them about every iteration of the engine."""

    async def start(self) -> WorkerHealth:
        """Load the model. This takes minutes and blocks the event loop.

        Raises:
            ValueError: the tokenizer cannot be loaded or has no chat template, vLLM has no such tool parser, or cannot
                read the form of `sampling.structured`.
            EngineDead: the engine's process failed.
            Exception: vLLM cannot load the model.
        """
        announce(Activity.IMPORT)
        set_environment(self._config.process)
        if self._config.device == "cpu":
            import_ahead()
        # The import blocks the event loop: the answer to the previous call must be sent first, by which the
        # node's watch finds this process.
        await asyncio.sleep(_TURN_S)
        with without_collections():
            from vllm.v1.engine.async_llm import AsyncLLM

        check_structured(self._config.sampling.structured)
        self._tokenizer = load_chat_tokenizer(self._config.model)
        self._make_readers(self._tokenizer)
        try:
            with engine_processes(self._config.device):
                loggers = [unread_metrics(), *self._stat_loggers]
                self._engine = AsyncLLM.from_engine_args(self._engine_args(), stat_loggers=loggers)
        except RuntimeError as error:
            if _PROCESS_FAILED not in str(error):
                raise
            raise engine_dead(self._name) from error
        except (TypeError, ValueError) as error:
            if not (options := ", ".join(self._config.engine_options)):
                raise
            why = " ".join(str(error).split())
            raise ValueError(f"vLLM refuses its settings, among them the spec's `engine` ({options}): {why}") from error
        if self._config.sampling.truncates:
            await self._engine.collective_rpc("troupe_record_kept_tokens")
        await self._engine.update_weight_version(str(INITIAL_VERSION))
        self._state = _State.OPEN
        return await self.health()

    def _make_readers(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Makes the readers of episodes in each environment. Raises ValueError: vLLM has no such tool parser."""
        if not self._config.episodes:
            return
        other, thread = deepcopy(tokenizer), ThreadPoolExecutor(1, thread_name_prefix="tokenizing-long")
        for name, bounds in self._config.episodes.items():
            self._readers[name] = TurnReader(tokenizer, tool_parser(bounds.tool_parser, tokenizer))
            self._long[name] = LongReader(TurnReader(other, tool_parser(bounds.tool_parser, other)), thread)

    def _engine_args(self) -> AsyncEngineArgs:
        """Arguments of the engine."""
        return engine_args(self._config)

    async def generate(
        self, request: GroupRequest, prompts: pa.Table, finished: pa.Table | None = None
    ) -> tuple[GroupSummary, pa.Table]:
        """Sample one group, or the rest of a group with `request.finished` samples.

        A prompt that cannot be used gives a summary with `refused` set and an empty table. `response` is the text of
        all response tokens except special ones, a stop string included: the text that is scored is the text that is
        trained. `response_ids` includes the end-of-sequence token if it was sampled. Samples have the seeds that
        they have in a whole group.

        Args:
            request: Row of the prompt, number of samples and sampling parameters.
            prompts: The whole PROMPTS pool.
            finished: ROLLOUTS table with the rows of the finished samples, of any attempt, and maybe of other groups.

        Returns:
            The summary and the ROLLOUTS table of the whole group: one row per sample, in order, then one per candidate.

        Raises:
            EngineClosed: the engine does not serve.
            EngineDead: the engine's process has ended.
            IndexError: the pool does not have the row.
            ValueError: a finished sample has no rows.
        """
        self._open_engine()
        if not 0 <= request.row < prompts.num_rows:
            raise IndexError(f"row {request.row} is outside the pool of {prompts.num_rows} prompts")
        prompt = prompts.slice(request.row, 1).to_pylist()[0]
        if request.environment is not None:
            return await self._generate_episodes(request, prompt, request.environment, finished)
        started = time.monotonic()
        try:
            prompt_ids = await self._encode(prompt["messages"], request.max_tokens)
            answers = (
                await self._encode_candidates(prompt, prompt_ids, request.max_tokens) if request.candidates else []
            )
        except PromptRefused as error:
            refused = f"{prompt['origin']}: {error}"
            return self._summary(request, (), 0.0, refused=refused), ROLLOUTS.empty_table()
        engine = self._open_engine()  # it may have been closed since
        builder = RowBuilder(self._name, self._live_tokenizer(), request, prompt, prompt_ids, self._records(request))

        def build(index: int, output: RequestOutput) -> tuple[SampleSummary, Rows]:
            row = builder.sampled(index, output)
            return sample_summary(row, self._version), [row]

        generating = {i: self._sample(engine, request, i, prompt_ids) for i in request.missing}
        outputs = await self._all_or_none(request, generating, build, finished)
        given = [builder.candidate(request.samples + number, ids) for number, ids in enumerate(answers)]
        built = [build(index, output) for index, output in outputs.items()]
        seconds = time.monotonic() - started
        cached = sum(output.num_cached_tokens or 0 for output in outputs.values())
        summary = self._summary(request, [sample for sample, _ in built], seconds, cached_tokens=cached)
        summary = replace(summary, candidates=tuple(sample_summary(row, self._version) for row in given))
        return summary, merged(request, finished, [*(row for _, rows in built for row in rows), *given])

    async def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], pa.Table]:
        """The samples that are finished of all groups that run, and their rows; held-out samples are not among them."""
        found = [group.finished() for group in self._groups if _as_in_training(group.request)]
        found = [(samples, table) for samples, table in found if samples.samples]
        tables = [ROLLOUTS.empty_table(), *(table for _, table in found)]
        return tuple(samples for samples, _ in found), pa.concat_tables(tables).combine_chunks()

    async def _generate_episodes(
        self, request: GroupRequest, prompt: dict[str, Any], environment: str, finished: pa.Table | None
    ) -> tuple[GroupSummary, pa.Table]:
        """Play one episode in the environment of this name for each sample of the group."""
        engine, started = self._open_engine(), time.monotonic()
        tokenizer, bounds = self._live_tokenizer(), self._config.episodes[environment]
        reader, long = self._readers[environment], self._long[environment]
        sizes = (self._config.sampling.max_tokens, self._config.engine.max_model_len)
        records = self._records(request)
        link = partial(self._link, environment)
        runner = EpisodeRunner(bounds, *sizes, reader, self._tokenizing, link, self._form_problem, long)

        async def play(index: int) -> Played:
            async def sample(
                number: int, ids: Sequence[int], max_tokens: int, stop: Sequence[str], form: StructuredConfig | None
            ) -> SampledTurn:
                limits = TurnLimits(number, max_tokens, tuple(stop), form)
                return sampled_turn(await self._sample(engine, request, index, list(ids), limits), records)

            row = read_row(prompt, sample_seed(request.seed, index))
            key = f"{self._name}/{request.prompt_uid}/{request.attempt}/{index}/{next(self._serial)}"
            return await runner.play(key, row, sample)

        builder = RowBuilder(self._name, tokenizer, request, prompt, [], records)

        def build(index: int, played: Played) -> tuple[SampleSummary, Rows]:
            rows = builder.episode(index, played)
            return episode_summary(rows, played, self._version), rows

        playing = {index: play(index) for index in request.missing}
        episodes = await self._all_or_none(request, playing, build, finished)
        built = [build(index, played) for index, played in episodes.items()]
        samples = [sample for sample, _ in built]
        cached = sum(sample.episode.cached_tokens for sample in samples if sample.episode is not None)
        summary = self._summary(request, samples, time.monotonic() - started, cached_tokens=cached)
        return summary, merged(request, finished, [row for _, rows in built for row in rows])

    def _records(self, request: GroupRequest) -> bool:
        """Whether the tokens that the sampler left to each token are part of the samples."""
        return self._config.sampling.truncates and _as_in_training(request)

    async def connect_environments(self, name: str, link: EnvironmentLink) -> None:
        """Use these environment workers for new episodes in the environment of this name."""
        self._environments[name] = link

    def _form_problem(self, form: StructuredConfig) -> str:
        """Why a turn cannot have this form, or empty if it can."""
        if self._config.sampling.structured is not None:
            return "the spec sets that of all turns, sampling.structured"
        if not self._config.turn_forms:
            return "the loss does not account for it; set algorithm.importance.mode to truncate or mask"
        try:
            check_structured(form)
        except ValueError as error:
            return str(error)
        return ""

    def _link(self, environment: str) -> EnvironmentLink:
        if environment not in self._environments:
            raise EnvironmentGone("no environment worker is connected")
        return self._environments[environment]

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Load a published file of weights while running requests are paused.

        The acknowledged version and digest are reported by the processes that hold the weights. After an error,
        running and new requests end with EngineClosed until an update succeeds.

        Raises:
            WeightDigestMismatch: the loaded weights are not the published ones; names this worker.
            EngineClosed: the update failed for another reason.
            EngineDead: the engine's process has ended.
            EngineOutOfStep: the update failed in one of several processes of the engine.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        started = time.monotonic()
        async with self._update_lock:
            engine = await self._pause()
            try:
                await self._memory.begin_update(engine)
                await self._call(engine.collective_rpc("troupe_forget_unfinished_update"))
                await self._call(engine.start_weight_update())
                await self._call(engine.update_weights(WeightTransferUpdateRequest(asdict(update))))
                await self._call(engine.finish_weight_update(str(update.version)))
                if self._config.lora is not None:
                    await self._use_adapter(engine)
                digest = await self._confirmed_digest(update.version, update.digest)
                if self._config.lora is not None:
                    self._adapter = adapter_request(update.version, digest)
                await self._resume(update.version)
            except BaseException as error:
                self._shut(f"the update to version {update.version} failed")
                if isinstance(error, Exception) and not isinstance(error, WorkerGone):
                    raise await self._update_failure(update, error) from error
                raise
        seconds = time.monotonic() - started
        return WeightAck(self._name, update.version, digest, seconds, peak=await self._peak())

    async def _use_adapter(self, engine: AsyncLLM) -> None:
        """Put the received adapters in place, the first time after a probe with other adapters.

        Raises:
            RuntimeError: The engine's results do not depend on its adapters.
        """
        if self._adapter is None:
            await self._call(engine.collective_rpc("troupe_use_probe"))
            self._memory.verified()  # a rest leaves the model below as it was, and the probe alone samples now
            if not await self._memory.wake(engine):
                await self._call(engine.resume_generation())
            probe = adapter_request(self._version, "probe")
            adapted, plain = [await probe_logprobs(engine, lora) for lora in (probe, None)]
            await self._call(engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))
            if not apart(adapted, plain):
                raise RuntimeError("the engine computes the same log-probs with adapters and without")
        await self._call(engine.collective_rpc("troupe_use_adapter"))

    async def write_weights(self, update: WeightUpdate, payload: Bytes | StoredBytes) -> None:
        """Write the weight file of `update` on this node, for all engines of the node.

        Args:
            update: The published version.
            payload: uint8 [update.nbytes], the bytes of the file, or their location in an object store.

        Raises:
            StoreFailed: The object store cannot be read.
        """
        from troupe.workers.weights.file import write_payload

        if update.path not in self._files_written:
            remove_at_death(update.path)
        for path in self._files_written - {update.path}:
            retire(path)
        self._files_written, self._kept = {update.path}, ("", "")
        await asyncio.to_thread(write_payload, update, await _fetched(payload))
        self._kept = update.path, update.digest

    async def change_weights(self, update: WeightUpdate, delta: Bytes | StoredBytes) -> bool:
        """Turn the weight file that this worker wrote last into the file of `update`, for all engines of the node.

        Engines verify the whole file before they load it.

        Args:
            update: The published version.
            delta: uint8, the changes, or their location in an object store.

        Returns:
            False if this node does not have the delta's base: it needs the whole payload.
        """
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

    async def reset_prefix_cache(self) -> bool:
        """Forget the states of all prompts that no running request uses; returns whether the engine did.

        Raises:
            EngineClosed: the engine does not serve.
            EngineDead: the engine's process has ended.
        """
        return await self._call(self._open_engine().reset_prefix_cache())

    async def rest(self) -> None:
        """Release the memory that `sleep` names, until new weights are loaded or `wake` is called.

        Requests that run continue after that; arriving ones wait. A closed engine rests as well. After a failure
        the engine is closed.

        Raises:
            EngineDead: the engine's process has ended.
        """
        async with self._update_lock:
            closed = self._state is _State.CLOSED
            engine = await self._pause()
            await self._closing_on_failure(self._memory.rest(engine), "it could not rest")
            self._state = _State.CLOSED if closed else _State.OPEN

    async def wake(self) -> None:
        """Serve again with the weights that the engine has.

        Raises:
            StaleWake: they were discarded.
            EngineDead: the engine's process has ended.
        """
        async with self._update_lock:
            await self._memory.wake(self._open_engine())

    async def health(self) -> WorkerHealth:
        """Health of the worker, requested through the engine's process: a hanging engine does not answer.

        During an update the engine answers when the update has ended. A resting engine is healthy.

        Raises:
            EngineClosed: the engine does not serve.
            EngineDead: the engine's process has ended.
        """
        version = int(await self._call(self._open_engine().get_weight_version()))
        peak, running = await self._peak(), len(self._running)
        return WorkerHealth(self._name, socket.gethostname(), os.getpid(), version, running, peak=peak)

    async def close(self) -> None:
        """Stop the engine and remove the written weight files. Running requests end with EngineClosed."""
        self._shut("it was closed")
        engine, self._engine = self._engine, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # or it reports the shutdown as a crash
            await asyncio.to_thread(engine.shutdown, _SHUTDOWN_S)
        for path in self._files_written:
            retire(path)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        for long in self._long.values():  # they share a thread
            long.thread.shutdown(wait=False, cancel_futures=True)

    # The receiving side of transfers from device to device, driven by the trainer's sender. nccl is untested on GPU.

    async def transfer_init(self, init_info: dict[str, Any]) -> None:
        """Join the sender of a transfer. An engine that a failed transfer has closed joins again."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._call(self._live_engine().init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    async def transfer_start(self) -> None:
        """Pause running requests for an update from device to device.

        An update that did not end, because the trainer died in it, is forgotten.
        """
        async with self._update_lock:
            engine = await self._pause()
            await self._closing_on_failure(self._memory.begin_update(engine))
            await self._closing_on_failure(engine.collective_rpc("troupe_forget_unfinished_update"))
            await self._closing_on_failure(engine.start_weight_update())

    async def transfer_receive(self, update_info: dict[str, Any]) -> None:
        """Receive weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._closing_on_failure(self._live_engine().update_weights(WeightTransferUpdateRequest(update_info)))

    async def transfer_finish(self, version: int, digest: str) -> WeightAck:
        """Serve the weights received as `version`, if every process of the engine has received this digest.

        Raises:
            WeightDigestMismatch: the loaded weights are not the ones that were sent; the engine stays closed.
        """
        engine, started = self._live_engine(), time.monotonic()
        await self._closing_on_failure(engine.finish_weight_update(str(version)))
        await self._closing_on_failure(self._confirmed_digest(version, digest))
        await self._closing_on_failure(self._resume(version))
        return WeightAck(self._name, version, digest, time.monotonic() - started, peak=await self._peak())

    async def _closing_on_failure(
        self, call: Coroutine[Any, Any, object], failure: str = "a weight update failed"
    ) -> None:
        try:
            await self._call(call)
        except BaseException as error:
            self._shut(f"{failure}: {error}")
            raise

    def _live_engine(self) -> AsyncLLM:
        if self._engine is None:
            raise EngineClosed(self._name, self._closed_because)
        if self._engine.errored:
            raise engine_dead(self._name)
        if self._out_of_step:
            raise EngineOutOfStep(self._name, self._out_of_step)
        return self._engine

    def _open_engine(self) -> AsyncLLM:
        engine = self._live_engine()
        if self._state is _State.CLOSED:
            raise EngineClosed(self._name, self._closed_because)
        return engine

    async def _call(self, call: Awaitable[T]) -> T:
        """Wait for a call into the engine's process until it answers or dies; vLLM does not notice that it died."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LIVENESS_S)
                if not task.done():
                    self._live_engine()
            return task.result()
        except Exception as error:
            if isinstance(error, WorkerGone):
                raise
            if self._engine is not None and self._engine.errored:
                raise engine_dead(self._name) from error
            if _ONE_OF_MANY_FAILED in str(error):
                self._out_of_step = str(error)
                raise EngineOutOfStep(self._name, self._out_of_step) from error
            raise
        finally:
            task.cancel()

    async def _peak(self) -> Peak:
        """Peak memory of this process and vLLM's; on GPUs, of the rank with the highest peak. Untested on GPU."""
        import psutil

        gpus: list[int] = []
        if self._config.device == "cuda":
            gpus = await self._call(self._live_engine().collective_rpc("troupe_gpu_peak"))
        children = [process.pid for process in psutil.Process().children(recursive=True)]
        return Peak(self._family.read(children), max(gpus, default=0))

    async def _pause(self) -> AsyncLLM:
        engine = self._live_engine()
        self._state = _State.UPDATING
        try:
            # Clearing the cache also makes running requests recompute theirs under the new weights. vLLM's own
            # `pause_generation` does the same and then sleeps 20 ms to order the outputs for its callers.
            await self._call(engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))
        except BaseException as error:
            self._shut(f"it could not be paused: {error}")
            raise
        return engine

    async def _resume(self, version: int) -> None:
        """Serve the weights of this version, which have been verified."""
        engine = self._live_engine()
        self._memory.verified()
        if not await self._memory.wake(engine):
            await self._call(engine.resume_generation())
        self._version = version
        self._state = _State.OPEN

    def _shut(self, reason: str) -> None:
        """Stop serving and cancel the running samples (vLLM drops a request whose consumer is cancelled)."""
        self._state = _State.CLOSED
        self._closed_because = reason
        for sample in self._running:
            sample.cancel()

    async def _confirmed_digest(self, version: int, digest: str) -> str:
        from troupe.workers.weights.file import WeightDigestMismatch

        engine = self._live_engine()
        ranks: list[dict[str, Any]] = await self._call(engine.collective_rpc("troupe_loaded_weights"))
        for rank in ranks:
            if (rank["version"], rank["digest"]) != (version, digest):
                raise WeightDigestMismatch(self._name, digest, f"{rank['digest']} of version {rank['version']}")
        return digest

    async def _update_failure(self, update: WeightUpdate, error: Exception) -> Exception:
        """The exception to raise. vLLM forwards the message of a worker's error but not its type: ask the workers."""
        from troupe.workers.weights.file import WeightDigestMismatch

        ranks: list[dict[str, Any]] = await self._call(self._live_engine().collective_rpc("troupe_loaded_weights"))
        wrong = [rank["mismatch"] for rank in ranks if rank["mismatch"]]
        if wrong:
            return WeightDigestMismatch(self._name, update.digest, wrong[0])
        return EngineClosed(self._name, f"{self._closed_because}: {error}")

    def _live_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise EngineClosed(self._name, self._closed_because)
        return self._tokenizer

    async def _encode(self, messages: str, max_tokens: int | None) -> list[int]:
        """Token ids of a prompt that leaves room for a response of so many tokens (None for training's)."""
        tokenizer = self._live_tokenizer()
        longest = self._config.engine.max_model_len - (max_tokens or self._config.sampling.max_tokens)
        if len(messages) <= _SHORT_PROMPT and not self._in_thread and not self._config.episodes:
            return encode_prompt(tokenizer, messages, longest)
        return await self._tokenized(encode_prompt, tokenizer, messages, longest)

    async def _encode_candidates(
        self, prompt: dict[str, Any], prompt_ids: list[int], max_tokens: int | None
    ) -> list[list[int]]:
        """Token ids of the prompt's answers from other sources. Raises PromptRefused if one does not fit."""
        texts = prompt["candidates"]
        if not texts:
            return []
        from troupe.workers.data.examples import encode_candidates

        longest = max_tokens or self._config.sampling.max_tokens
        arguments = (self._live_tokenizer(), prompt["messages"], prompt_ids, texts, longest)
        return await self._tokenized(encode_candidates, *arguments)

    async def _tokenized(self, encode: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Result of `encode` in the thread that tokenizes."""
        self._in_thread += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizing, partial(encode, *args, **kwargs))
        finally:
            self._in_thread -= 1

    def _summary(
        self,
        request: GroupRequest,
        samples: Sequence[SampleSummary],
        seconds: float,
        *,
        refused: str = "",
        cached_tokens: int = 0,
    ) -> GroupSummary:
        """The summary of a group from the samples that were generated and, unless it is refused, earlier ones."""
        ahead = sum(sample.done() for sample in self._running)
        whole = () if refused else sorted([*request.finished, *samples], key=lambda sample: sample.sample_index)
        return GroupSummary(
            request.prompt_uid, request.attempt, self._name, tuple(whole), seconds, refused, cached_tokens, ahead
        )

    async def _all_or_none(
        self,
        request: GroupRequest,
        samples: Mapping[int, Coroutine[Any, Any, T]],
        build: Callable[[int, T], tuple[SampleSummary, Rows]],
        earlier: pa.Table | None,
    ) -> dict[int, T]:
        """Outputs of all samples by index; the first failure cancels the others and is raised.

        Until then `finished_samples` finds the finished ones: `build` makes their rows, `earlier` has older ones.
        """
        by_index = {index: asyncio.create_task(sample) for index, sample in samples.items()}
        tasks, group = list(by_index.values()), RunningGroup(request, by_index, build, earlier)
        self._running.update(tasks)
        self._groups[group] = None
        try:
            return dict(zip(by_index, await asyncio.gather(*tasks), strict=True))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._state is _State.CLOSED and caller is not None and not caller.cancelling():
                raise EngineClosed(self._name, self._closed_because) from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)
            del self._groups[group]

    async def _sample(
        self,
        engine: AsyncLLM,
        request: GroupRequest,
        index: int,
        prompt_ids: list[int],
        limits: TurnLimits | None = None,
    ) -> RequestOutput:
        """One sample as its own request, with its own seed and timings. vLLM would split a larger request anyway.

        `limits`: the limits of an episode's turn.
        """
        from vllm.inputs.engine import tokens_input

        request_id = f"{request.prompt_uid}/{request.attempt}/{index}/{next(self._serial)}"
        params = self._sampling_params(request, index, limits)
        final: RequestOutput | None = None
        try:
            adapter = self._require_adapter()
            async for output in engine.generate(tokens_input(prompt_ids), params, request_id, lora_request=adapter):
                final = output
        except Exception as error:
            if engine.errored:
                raise engine_dead(self._name) from error
            raise
        if final is None or final.outputs[0].finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{self._name}: vLLM ended {request_id} without a complete response")
        if (final.lora_request is None) is not (self._config.lora is None):
            raise RuntimeError(f"{self._name}: vLLM sampled {request_id} without the policy's adapters")
        return final

    def _require_adapter(self) -> LoRARequest | None:
        """The adapters of the current version, or None if the engine holds all weights of the policy.

        Raises:
            EngineClosed: The policy has adapters, and the engine has not loaded any yet.
        """
        if self._config.lora is not None and self._adapter is None:
            raise EngineClosed(self._name, "it has not loaded the policy's adapters yet")
        return self._adapter

    def _sampling_params(self, request: GroupRequest, index: int, limits: TurnLimits | None = None) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self._config.sampling
        limits = limits or TurnLimits(0, request.max_tokens or sampling.max_tokens)
        temperature = sampling.temperature if request.temperature is None else request.temperature
        trained = _as_in_training(request)
        stop = [*sampling.stop, *limits.stop]
        return SamplingParams(
            temperature=0.0 if request.greedy else temperature,
            top_p=sampling.top_p if trained else request.top_p,
            top_k=sampling.top_k if trained else request.top_k,
            min_p=sampling.min_p if trained else 0.0,
            max_tokens=min(limits.max_tokens, request.max_tokens or limits.max_tokens),
            stop=stop,
            # vLLM refuses others: an end that the model has no logit for is never sampled.
            stop_token_ids=within_embedding(self._live_tokenizer(), turn_ends(self._live_tokenizer()).ids),
            seed=turn_seed(request.seed, index, limits.number),
            logprobs=0,  # log-prob of the sampled token only
            flat_logprobs=True,
            detokenize=bool(stop),
            skip_special_tokens=False,  # or a stop string with a special token would never match
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=structured_outputs(
                (limits.structured or sampling.structured) if request.forms else None
            ),
        )
