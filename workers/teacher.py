"""Teachers that return the log-probs of whole sequences: frozen models in engines, or behind endpoints."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

import pyarrow as pa

from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import (
    RolloutConfig,
    SamplingConfig,
    ScoresConfig,
    TeacherEndpointConfig,
    TeacherEngineConfig,
)
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.messages import RankPlan, ScoreSummary, WorkerGone, WorkerHealth, identities
from troupe.workers.data.teacher_prompts import TeacherPrompts
from troupe.workers.data.tokenizer import load_tokenizer, vocabulary_texts
from troupe.workers.endpoint import Endpoint, EndpointFailed, read_key
from troupe.workers.engine.errors import EngineClosed
from troupe.workers.engine.prompt_logprobs import prompt_logprobs
from troupe.workers.engine.serving import ServingEngine
from troupe.workers.engine.settings import engine_args, import_vllm, unread_metrics
from troupe.workers.engine.sleep import EngineSleep
from troupe.workers.models.prompt_logprobs import (
    PromptLogprobs,
    ResponseScores,
    read_prompt_logprobs,
    response_table,
    score_response,
)
from troupe.workers.models.token_batch import not_finite

_ENTRY_BYTES, _ENVELOPE_BYTES = 256, 2**16
"""Bytes of an endpoint's answer for each log-prob, most of them the text of its token, and for everything else."""
_LONGEST_TOKENS = 2**20
"""Bytes of an answer with the tokens of a text."""


class SequenceTeacher(ABC):
    """Scores samples by the log-probs of prompt and response together. Calls run concurrently."""

    def __init__(self, config: ScoresConfig, tokenizer: ModelConfig, longest: int) -> None:
        """Loads nothing yet. `tokenizer`: the model that has the policy's; `longest`: most tokens of a sequence."""
        pickle_tables()
        self._scores = config
        self._tokenizer = tokenizer
        self._longest = longest
        self._prompts: TeacherPrompts | None = None

    @abstractmethod
    async def sequences(self, sequences: Sequence[list[int]]) -> list[PromptLogprobs | str]:
        """The log-probs of each sequence, none longer than `longest`, or why it has none. Raises WorkerGone."""

    async def packs(self) -> bool:
        return False

    async def score(self, plan: RankPlan, *rollouts: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): log-probs of the plan's rows. Those of a sample that failed are not a number.
        Raises WorkerGone."""
        rows = [row for micro_batch in plan.micro_batches for row in micro_batch]
        chosen, failed = pa.concat_tables(rollouts).take(pa.array(rows, pa.int64())), dict[tuple[str, int], str]()
        read = chosen
        if self._prompts is not None:
            read, failed = await asyncio.to_thread(self._prompts.apply, chosen, range(len(rows)))
        prompts, responses = (read.column(name).to_pylist() for name in ("prompt_ids", "response_ids"))
        sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        fitting = [one for one in sequences if len(one) <= self._longest]
        found = iter(await self.sequences(fitting))
        scores, top_k = list[ResponseScores](), self._scores.top_k
        for key, sequence, response in zip(identities(chosen), sequences, responses, strict=True):
            one = f"it has more than {self._longest} tokens" if len(sequence) > self._longest else next(found)
            scored = one if isinstance(one, str) else score_response(one, sequence, len(response), top_k)
            if isinstance(scored, str):
                failed.setdefault(key[:2], scored)
                scored = ResponseScores.missing(len(response), top_k)
            scores.append(scored)
        table = response_table(self._scores.column, chosen, scores, top_k)
        return ScoreSummary(len(rows), not_finite(table) | failed), table

    def _load_prompts(self) -> None:
        """Load the policy's tokenizer if the teacher reads other prompts."""
        if self._scores.prompt is not None:
            self._prompts = TeacherPrompts(self._scores.prompt, self._tokenizer, self._longest, self._longest)


class TeacherEngine(SequenceTeacher):
    """A frozen model in one vLLM engine."""

    def __init__(self, config: TeacherEngineConfig, name: str) -> None:
        own = {"max_num_batched_tokens": config.batch_tokens} if config.device == "cuda" else {}
        self._settings = RolloutConfig(
            model=config.model,
            engine=config.engine,
            engine_options=config.engine_options | own,
            sampling=SamplingConfig(max_tokens=1),
            top_logprobs=config.top_k,
            seed=0,
            transfer_backend="shm",
            device=config.device,
            sleep=config.sleep,
            kv_cache_bytes=config.kv_cache_bytes,
        )
        # vLLM samples a token behind each sequence
        super().__init__(config, config.tokenizer or config.model, config.engine.max_model_len - 1)
        self._engine = ServingEngine(self._settings, name)
        self._memory = EngineSleep(config.sleep, self._engine, frozen=True)
        self._serial = itertools.count()

    async def start(self) -> WorkerHealth:
        """Load the model, in minutes that block the event loop. Raises ValueError if its vocabulary is not larger than
        the number of tokens to return, and what `ServingEngine.start` raises."""
        await import_vllm(self._settings.process)
        self._load_prompts()
        await self._engine.start(engine_args(self._settings), [unread_metrics()])
        vocabulary = self._engine.require_live().model_config.get_vocab_size()
        if self._scores.top_k >= vocabulary:
            raise ValueError(f"algorithm.distill.k must be less than the vocabulary, {vocabulary} tokens")
        return await self.health()

    async def sequences(self, sequences: Sequence[list[int]]) -> list[PromptLogprobs | str]:
        async def every() -> list[PromptLogprobs | str]:  # a future of `gather` reports that it was cancelled
            return await asyncio.gather(*map(self._sequence, sequences))

        try:
            return await self._engine.call(every())
        except EngineClosed as error:
            raise WorkerGone(str(error)) from error

    async def _sequence(self, ids: list[int]) -> PromptLogprobs | str:
        request_id = f"teacher/{next(self._serial)}"
        return await prompt_logprobs(self._engine.require_open(), ids, self._scores.top_k, request_id)

    async def sleep(self) -> None:
        await self._memory.sleep()

    async def wake(self) -> None:
        await self._memory.wake()

    async def health(self) -> WorkerHealth:
        return await self._engine.health()

    async def close(self) -> None:
        await self._engine.stop()


class TeacherEndpoint(SequenceTeacher):
    """A frozen model behind an endpoint: a vLLM server, whose completions have the log-probs of the prompt."""

    def __init__(self, config: TeacherEndpointConfig, name: str) -> None:
        super().__init__(config, config.policy, config.longest)
        self._config = config
        self._name = name
        self._endpoint: Endpoint | None = None

    async def start(self) -> WorkerHealth:
        """Compare the endpoint with the policy. Raises ValueError if it cannot be reached or returns too few log-probs,
        if it has no room for the policy's longest sequence, or if its tokenizer is another than the policy's."""
        config = self._config
        self._endpoint = Endpoint(config, read_key(config), config.timeout_s)
        room = await self._compare_tokenizers(self._endpoint)
        if room <= config.longest:
            raise ValueError(f"{config.url}: its max_model_len is {room}, and must be at least {config.longest + 1}")
        self._longest = room - 1
        self._load_prompts()
        (found,) = await self.sequences([[0, 0]])
        if isinstance(found, str):
            raise ValueError(found)
        return await self.health()

    async def _compare_tokenizers(self, endpoint: Endpoint) -> int:
        """Tokens of the endpoint's longest sequence. Raises ValueError if it reads a piece of the policy's vocabulary
        as other tokens, or does not tokenize."""
        config, room = self._config, 0
        tokenizer = await asyncio.to_thread(load_tokenizer, config.policy)
        url = f"{config.url.rstrip('/').removesuffix('/v1')}/tokenize"
        for text, ours in await asyncio.to_thread(vocabulary_texts, tokenizer):
            request = {"model": config.model, "prompt": text, "add_special_tokens": False}
            try:
                theirs, room = _read_tokens(await endpoint.ask(url, request, _LONGEST_TOKENS))
            except EndpointFailed as error:
                raise ValueError(f"{url}, which compares its tokenizer with the policy's: {error}") from error
            if theirs != ours:
                pairs = enumerate(itertools.zip_longest(ours, theirs))
                first = next(at for at, (here, there) in pairs if here != there)
                piece, there = tokenizer.decode(ours[first : first + 1]), theirs[first : first + 1]
                why = f"the text of the tokens {ours[first : first + 1]} ({piece!r}) is {there} there"
                raise ValueError(f"{config.url}: its tokenizer is another than the policy's: {why}")
        return room

    async def sequences(self, sequences: Sequence[list[int]]) -> list[PromptLogprobs | str]:
        endpoint = self._endpoint
        if endpoint is None:
            raise WorkerGone("its worker has not started")

        async def one(ids: list[int]) -> PromptLogprobs | str:
            try:
                return await self._sequence(endpoint, ids)
            except EndpointFailed as error:
                return f"{self._config.url}: {error}"

        return list(await asyncio.gather(*map(one, sequences)))

    async def _sequence(self, endpoint: Endpoint, ids: list[int]) -> PromptLogprobs | str:
        """Raises EndpointFailed."""
        top_k = self._scores.top_k
        # vLLM samples a token behind the sequence.
        request = {"model": self._config.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0}
        longest = _ENVELOPE_BYTES + _ENTRY_BYTES * len(ids) * (1 + top_k)
        body = await endpoint.ask("/completions", request | {"prompt_logprobs": top_k}, longest)
        return await asyncio.to_thread(read_prompt_logprobs, body, ids, top_k)

    async def health(self) -> WorkerHealth:
        return WorkerHealth(self._name, socket.gethostname(), os.getpid(), 0, 0)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()


def _read_tokens(body: bytes) -> tuple[list[int], int]:
    """The tokens of a text, and the server's `max_model_len`. Raises EndpointFailed."""
    try:
        match json.loads(body):
            case {"tokens": [*tokens], "max_model_len": int() as room}:
                return tokens, room
    except (ValueError, RecursionError):
        pass
    raise EndpointFailed("its answer has no tokens and max_model_len, as a vLLM server's has")
