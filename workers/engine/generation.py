"""Generation on one engine: groups of responses and of episodes, each sample as its own request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pyarrow as pa

from troupe.workers.agents.interface import (
    EpisodeRunner,
    LongReader,
    Played,
    RecordedTurns,
    SampledTurn,
    TurnLimits,
    TurnReader,
    read_row,
)
from troupe.workers.contract.config import RolloutConfig, StructuredConfig
from troupe.workers.contract.environments import EnvironmentGone
from troupe.workers.contract.judges import JudgeLink
from troupe.workers.contract.messages import (
    ROLLOUTS,
    FinishedSamples,
    GroupRequest,
    GroupSummary,
    ReferenceGone,
    ReferenceResponse,
    SampleSummary,
)
from troupe.workers.contract.roles import EnvironmentLink, ReferenceLink
from troupe.workers.data.chat import PromptRefused, encode_prompt, sample_seed, turn_seed
from troupe.workers.data.tokenizer import load_chat_tokenizer, within_embedding
from troupe.workers.data.turn_ends import turn_ends
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.opponent import Opponent
from troupe.workers.engine.rows import (
    Built,
    RowBuilder,
    Rows,
    RunningGroup,
    episode_samples,
    merged,
    recorded_turns,
    sample_summary,
    sampled_turn,
)
from troupe.workers.engine.serving import Serving, ServingEngine
from troupe.workers.engine.settings import check_structured, structured_outputs
from troupe.workers.engine.tool_calls import tool_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_SHORT_PROMPT = 2_000
"""Characters of messages that are tokenized in less than a millisecond. If all cores compute, it takes longer until
a thread runs, and the engine begins without groups that arrive together."""


def _as_in_training(request: GroupRequest) -> bool:
    """Whether the tokens of a request are drawn from the distribution that is trained."""
    return request.temperature is None and not request.greedy


class Generation:
    """Samples groups on an engine. Calls run concurrently; an update of the weights pauses them."""

    def __init__(self, config: RolloutConfig, engine: ServingEngine, adapter: Callable[[], LoRARequest | None]) -> None:
        """Loads nothing yet. `adapter` returns the adapters to sample with, or raises EngineClosed."""
        self.config = config
        """Read for every group: sampling, and the bounds of episodes."""
        self.tokenizer: PreTrainedTokenizerBase | None = None
        """None before `load`."""
        self._engine = engine
        self._adapter = adapter
        self._groups: dict[RunningGroup[Any], None] = {}
        """Groups with samples that run, in order of arrival."""
        self._serial = itertools.count()
        self._environments: dict[str, EnvironmentLink] = {}
        self._readers: dict[str, TurnReader] = {}
        """Turn readers by the name of their environment; `_long` has the same keys."""
        self._judge: JudgeLink | None = None
        self._reference: ReferenceLink | None = None
        self._noted = set[tuple[str, str]]()
        """Environments with a note in the log."""
        self._long: dict[str, LongReader] = {}
        # One thread: a long prompt blocks no other group, and tokenizers are not thread-safe.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self._in_thread = 0
        """Prompts that the thread tokenizes, or that wait for it."""

    def load(self) -> None:
        """Load the tokenizer, and make the readers of episodes. Raises ValueError if it cannot be loaded or lacks a
        template, or vLLM has no such tool parser, or cannot read the form of `sampling.structured`."""
        check_structured(self.config.sampling.structured)
        tokenizer = self.tokenizer = load_chat_tokenizer(self.config.model)
        if not self.config.episodes:
            return
        other, thread = deepcopy(tokenizer), ThreadPoolExecutor(1, thread_name_prefix="tokenizing-long")
        for name, bounds in self.config.episodes.items():
            self._readers[name] = TurnReader(tokenizer, tool_parser(bounds.tool_parser, tokenizer))
            self._long[name] = LongReader(TurnReader(other, tool_parser(bounds.tool_parser, other)), thread)

    def connect_judge(self, judge: JudgeLink) -> None:
        """Let this judge play as the players of games that the policy does not play."""
        self._judge = judge

    def connect_reference(self, link: ReferenceLink) -> None:
        """Compare samples with responses of these engines."""
        self._reference = link

    def connect(self, environment: str, link: EnvironmentLink) -> None:
        """Use these environment workers for new episodes in the environment of this name."""
        self._environments[environment] = link

    async def generate(
        self, request: GroupRequest, prompts: pa.Table, finished: pa.Table | None = None
    ) -> tuple[GroupSummary, pa.Table]:
        """Sample one group; see `RolloutWorker.generate`."""
        self._engine.require_open()
        if not 0 <= request.row < prompts.num_rows:
            raise IndexError(f"row {request.row} is outside the pool of {prompts.num_rows} prompts")
        prompt = prompts.slice(request.row, 1).to_pylist()[0]
        if request.environment is not None:
            return await self._generate_episodes(request, prompt, request.environment, finished)
        started = time.monotonic()
        try:
            prompt_ids = await self.encode(prompt["messages"], request.max_tokens)
            answers = (
                await self._encode_candidates(prompt, prompt_ids, request.max_tokens) if request.candidates else []
            )
        except PromptRefused as error:
            refused = f"{prompt['origin']}: {error}"
            return self._summary(request, (), 0.0, refused=refused), ROLLOUTS.empty_table()
        self._engine.require_open()  # it may have been closed since
        builder = RowBuilder(
            self._engine.name,
            self._require_tokenizer(),
            request,
            prompt,
            prompt_ids,
            *self._parts(request),
        )

        def build(index: int, output: RequestOutput) -> Built:
            rows = [builder.sampled(index, output)]
            return [sample_summary(rows, self._engine.version)], rows

        sampling = {index: self._sample(request, index, prompt_ids) for index in request.missing}
        beside = asyncio.create_task(self._of_reference(request, prompt_ids))
        outputs = await self._all_or_none(request, sampling, build, finished, beside=beside)
        candidates = [builder.candidate(request.samples + number, ids) for number, ids in enumerate(answers)]
        candidates += [builder.of_reference(request.samples + n, one) for n, one in enumerate(beside.result())]
        built = [build(index, output) for index, output in outputs.items()]
        summary = self._summary(
            request,
            [sample for samples, _ in built for sample in samples],
            time.monotonic() - started,
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs.values()),
            candidates=[sample_summary([row], self._engine.version) for row in candidates],
        )
        return summary, merged(request, finished, [*(row for _, rows in built for row in rows), *candidates])

    async def answer(self, request: GroupRequest, messages: str) -> tuple[CompletionOutput, PreTrainedTokenizerBase]:
        """One response to a conversation, and its tokenizer. Raises PromptRefused, EngineClosed, EngineDead."""
        self._engine.require_open()
        ids = await self.encode(messages, request.max_tokens)
        (output,) = await self.complete(request, ids, (0,))
        return output.outputs[0], self._require_tokenizer()

    async def complete(
        self, request: GroupRequest, prompt_ids: list[int], indices: Sequence[int]
    ) -> list[RequestOutput]:
        """Responses to a tokenized prompt with the seeds of these samples. Raises EngineClosed, EngineDead."""
        self._engine.require_open()
        sampling = {index: self._sample(request, index, prompt_ids) for index in indices}
        return list((await self._all_or_none(request, sampling, lambda *_: ([], []), None)).values())

    async def _of_reference(self, request: GroupRequest, prompt_ids: list[int]) -> list[ReferenceResponse]:
        """A response of the reference for each sample of a group for training, if the algorithm compares them. Waits
        for an engine until the request times out."""
        if not (self.config.compares_reference and request.candidates):
            return []
        indices = range(request.samples, 2 * request.samples)  # other seeds: the policy may equal the reference
        while True:
            if self._reference is not None:
                with contextlib.suppress(ReferenceGone):
                    return await self._reference.complete(replace(request, finished=()), prompt_ids, indices)
            await asyncio.sleep(_PAUSE_S)

    async def _generate_episodes(
        self, request: GroupRequest, prompt: dict[str, Any], environment: str, finished: pa.Table | None
    ) -> tuple[GroupSummary, pa.Table]:
        """Play one episode in the environment of this name for each sample of the group."""
        started = time.monotonic()
        parts = self._parts(request)
        bounds = self.config.episodes[environment]
        runner = EpisodeRunner(
            bounds,
            max_tokens=self.config.sampling.max_tokens,
            max_model_len=self.config.engine.max_model_len,
            reader=self._readers[environment],
            tokenizing=self._tokenizing,
            link=partial(self._link, environment),
            form_problem=self._form_problem,
            long=self._long[environment],
        )

        turns = recorded_turns(request, finished)

        async def play(index: int) -> Played:
            async def sample(ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
                return sampled_turn(await self._sample(request, index, list(ids), limits), *parts)

            row = read_row(prompt, sample_seed(request.seed, index))
            opponent = Opponent(lambda: self._judge, request.seed, index, bounds.episode_timeout_s)
            key = f"{self._engine.name}/{request.prompt_uid}/{request.attempt}/{index}/{next(self._serial)}"
            recorded = turns.setdefault(index, RecordedTurns())
            return await replace(runner, opponent=opponent).play(key, row, partial(recorded.sample, sample))

        builder = RowBuilder(self._engine.name, self._require_tokenizer(), request, prompt, [], *parts)

        def build(index: int, played: Played) -> Built:
            return episode_samples(builder, index, played, bounds.trained, self._engine.version)

        def open_rows(index: int) -> Rows:
            return builder.turns(index, turns.get(index, RecordedTurns()))

        # A sample is the part of one player: the samples of an episode follow each other.
        playing = {index: play(index) for index in request.missing if index % max(1, len(bounds.trained)) == 0}
        episodes = await self._all_or_none(request, playing, build, finished, open_rows)
        for kind, note in [item for played in episodes.values() for item in played.notes.items()]:
            if (environment, kind) not in self._noted:
                self._noted.add((environment, kind))
                logger.warning("%s: %s", environment or "the environment", note)
        built = [build(index, played) for index, played in episodes.items()]
        samples = [sample for samples, _ in built for sample in samples]
        cached = sum(sample.episode.cached_tokens for sample in samples if sample.episode is not None)
        summary = self._summary(request, samples, time.monotonic() - started, cached_tokens=cached)
        return summary, merged(request, finished, [row for _, rows in built for row in rows])

    def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], pa.Table]:
        """What all groups that run keep of themselves (`FinishedSamples`), and the rows, without held-out samples."""
        found = [group.finished() for group in self._groups if _as_in_training(group.request)]
        found = [(samples, table) for samples, table in found if samples.samples or samples.turns]
        tables = [ROLLOUTS.empty_table(), *(table for _, table in found)]
        return tuple(samples for samples, _ in found), pa.concat_tables(tables).combine_chunks()

    async def encode(self, messages: str, max_tokens: int | None) -> list[int]:
        """Token ids of a prompt that leaves room for `max_tokens` (None: training's). Raises PromptRefused."""
        tokenizer = self._require_tokenizer()
        longest = self.config.engine.max_model_len - (max_tokens or self.config.sampling.max_tokens)
        if len(messages) <= _SHORT_PROMPT and not self._in_thread and not self.config.episodes:
            return encode_prompt(tokenizer, messages, longest)
        return await self._tokenized(encode_prompt, tokenizer, messages, longest)

    def sampling_params(self, request: GroupRequest, index: int, limits: TurnLimits | None = None) -> SamplingParams:
        """vLLM's parameters of one sample, whose seed depends on its index; `limits` bound an episode's turn."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling, tokenizer = self.config.sampling, self._require_tokenizer()
        limits = limits or TurnLimits(0, request.max_tokens or sampling.max_tokens)
        temperature = sampling.temperature if request.temperature is None else request.temperature
        trained = _as_in_training(request)
        stop = [*(sampling.stop if request.stop is None else request.stop), *limits.stop]
        return SamplingParams(
            temperature=0.0 if request.greedy else temperature,
            top_p=sampling.top_p if trained else request.top_p,
            top_k=sampling.top_k if trained else request.top_k,
            min_p=sampling.min_p if trained else request.min_p,
            max_tokens=min(limits.max_tokens, request.max_tokens or limits.max_tokens),
            stop=stop,
            # vLLM refuses others: an end that the model has no logit for is never sampled.
            stop_token_ids=within_embedding(tokenizer, turn_ends(tokenizer).ids),
            seed=turn_seed(request.seed, index, limits.number),
            logprobs=self.config.top_logprobs,  # besides the log-prob of the sampled token
            flat_logprobs=True,
            detokenize=bool(stop),
            skip_special_tokens=False,  # or a stop string with a special token would never match
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=structured_outputs(
                (limits.structured or sampling.structured) if request.forms else None
            ),
        )

    def close(self) -> None:
        """End the threads."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        for long in self._long.values():  # they share a thread
            long.thread.shutdown(wait=False, cancel_futures=True)

    def _parts(self, request: GroupRequest) -> tuple[bool, bool, int]:
        """Whether the tokens that the sampler left to each token, and the experts of each are part of the samples, and
        how many of the likeliest tokens."""
        if not _as_in_training(request):
            return False, False, 0
        return self.config.sampling.truncates, self.config.sampling.router_replay, self.config.top_logprobs

    def _form_problem(self, form: StructuredConfig) -> str:
        """Why a turn cannot have this form, or empty if it can."""
        if self.config.sampling.structured is not None:
            return "the spec sets that of all turns, sampling.structured"
        if not self.config.turn_forms:
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

    def _require_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise EngineClosed(self._engine.name, self._engine.closed_because)
        return self.tokenizer

    async def _encode_candidates(
        self, prompt: dict[str, Any], prompt_ids: list[int], max_tokens: int | None
    ) -> list[list[int]]:
        """Token ids of the prompt's answers from other sources. Raises PromptRefused if one does not fit."""
        texts = prompt["candidates"]
        if not texts:
            return []
        from troupe.workers.data.examples import encode_candidates

        longest = max_tokens or self.config.sampling.max_tokens
        arguments = (self._require_tokenizer(), prompt["messages"], prompt_ids, texts, longest)
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
        candidates: Sequence[SampleSummary] = (),
    ) -> GroupSummary:
        """The summary of a group from the samples that were generated and, unless it is refused, earlier ones."""
        whole = () if refused else sorted([*request.finished, *samples], key=lambda sample: sample.sample_index)
        return GroupSummary(
            request.prompt_uid,
            request.attempt,
            self._engine.name,
            tuple(whole),
            seconds,
            refused=refused,
            cached_tokens=cached_tokens,
            finished_ahead=sum(sample.done() for sample in self._engine.running),
            candidates=tuple(candidates),
        )

    async def _all_or_none(
        self,
        request: GroupRequest,
        samples: Mapping[int, Coroutine[Any, Any, T]],
        build: Callable[[int, T], Built],
        earlier: pa.Table | None,
        open_rows: Callable[[int], Rows] = lambda index: [],
        beside: asyncio.Task[Any] | None = None,
    ) -> dict[int, T]:
        """Outputs of all samples by index, once `beside` is done too; the first failure cancels the others and is
        raised. Until then `finished_samples` finds the finished ones' rows (`build`), older ones (`earlier`), and those
        of the others (`open_rows`)."""
        engine = self._engine
        by_index = {index: asyncio.create_task(sample) for index, sample in samples.items()}
        tasks, group = list(by_index.values()), RunningGroup(request, by_index, build, earlier, open_rows)
        others = [] if beside is None else [beside]
        engine.running.update(tasks)
        self._groups[group] = None
        try:
            await asyncio.gather(*tasks, *others)
            return {index: task.result() for index, task in by_index.items()}
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if engine.state is Serving.CLOSED and caller is not None and not caller.cancelling():
                raise EngineClosed(engine.name, engine.closed_because) from None
            raise
        finally:
            for task in (*tasks, *others):
                task.cancel()
            engine.running.difference_update(tasks)
            del self._groups[group]

    async def _sample(
        self, request: GroupRequest, index: int, prompt_ids: list[int], limits: TurnLimits | None = None
    ) -> RequestOutput:
        """One sample as a separate request, with its seed and timings. vLLM would split a larger request anyway."""
        from vllm.inputs.engine import tokens_input

        engine, name = self._engine.require_open(), self._engine.name
        request_id = f"{request.prompt_uid}/{request.attempt}/{index}/{next(self._serial)}"
        params = self.sampling_params(request, index, limits)
        final: RequestOutput | None = None
        try:
            adapter = self._adapter()
            async for output in engine.generate(tokens_input(prompt_ids), params, request_id, lora_request=adapter):
                final = output
        except Exception as error:
            if engine.errored:
                raise self._engine.dead() from error
            raise
        if final is None or final.outputs[0].finish_reason not in ("stop", "length"):
            raise RuntimeError(f"{name}: vLLM ended {request_id} without a complete response")
        if (final.lora_request is None) is not (self.config.lora is None):
            raise RuntimeError(f"{name}: vLLM sampled {request_id} without the policy's adapters")
        return final
