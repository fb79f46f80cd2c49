"""Held-out prompts sampled by a model behind an endpoint that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from troupe.orchestrator.errors import TroupeError, UsageError
from troupe.orchestrator.rollouts.evaluation import Sampler
from troupe.orchestrator.rollouts.scheduler import sampling_seed
from troupe.workers.contract.environments import OK
from troupe.workers.contract.messages import ROLLOUTS, GroupRequest, GroupSummary, SampleSummary
from troupe.workers.contract.roles import TableRef
from troupe.workers.contract.text import one_line

NAME = "endpoint"
"""Stands for the name of an engine."""
_RETRIES = 4
_LOST = (408, 409, 429)
"""Statuses of requests that another attempt may answer, besides 500 and above."""
_EXTENDED = ("vllm", "sglang")
"""Owners that servers with these extensions of the protocol name for their models."""
_PLAIN: Mapping[str, float] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling without further settings. Such a server takes omitted fields from the model's own
`generation_config.json`, which the engines here do not read."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a model."""

    url: str
    """Address up to `/v1`."""
    model: str | None = None
    """Name of the model, or None for the only one that the endpoint lists."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key; if unset, requests carry none."""


@dataclass(frozen=True)
class _Answer:
    """The endpoint's answer to one request."""

    text: str = ""
    finish_reason: str = "stop"
    tokens: int = 0
    prompt_tokens: int = 0
    status: str = OK
    """Why the endpoint did not answer."""


@asynccontextmanager
async def endpoint_sampler(
    endpoint: Endpoint, put: Callable[[Any], TableRef], *, max_tokens: int, concurrency: int, timeout_s: float
) -> AsyncIterator[Sampler]:
    """Samples at an endpoint, from the PROMPTS table itself; its connections end with the block.

    A request that the endpoint refuses for good (no such model, a wrong key, an unknown parameter) ends the evaluation.
    One that stays unanswered is a failed sample.

    Args:
        endpoint: The endpoint.
        put: Places a table in the object store.
        max_tokens: Longest response if a request sets none.
        concurrency: Most requests at the same time.
        timeout_s: Longest time of a request.

    Raises:
        UsageError: It lists no model, or several and none is named.
        TroupeError: It cannot be reached.
    """
    from openai import AsyncOpenAI

    key = os.environ.get(endpoint.key_variable) or "none"
    client: Any = AsyncOpenAI(base_url=endpoint.url, api_key=key, max_retries=_RETRIES, timeout=timeout_s)
    async with client:
        model, extended = await _find_model(client, endpoint)
        places = asyncio.Semaphore(concurrency)
        asking = _Asking(client, model, _PLAIN if extended else {}, endpoint.url, max_tokens, places, timeout_s)

        async def sample(request: GroupRequest, table: TableRef) -> tuple[GroupSummary, TableRef]:
            prompt = table.slice(request.row, 1).to_pylist()[0]
            started = time.monotonic()
            answers = await asyncio.gather(*(asking.ask(request, index, prompt) for index in range(request.samples)))
            samples = tuple(_summary(index, answer) for index, answer in enumerate(answers))
            seconds = time.monotonic() - started
            rows = _rows(request, prompt, answers)
            return GroupSummary(request.prompt_uid, request.attempt, NAME, samples, seconds), put(rows)

        yield sample


async def _find_model(client: Any, endpoint: Endpoint) -> tuple[str, bool]:
    """Name of the model, and whether its server has the extensions. Raises UsageError or TroupeError."""
    from openai import OpenAIError

    try:
        owners = {model.id: model.owned_by async for model in client.models.list()}
    except OpenAIError as error:
        if endpoint.model is not None:
            return endpoint.model, False
        why = f"its models cannot be listed ({one_line(str(error))}); name one with --served"
        raise TroupeError(f"{endpoint.url}: {why}") from error
    if endpoint.model is not None:
        return endpoint.model, owners.get(endpoint.model) in _EXTENDED
    if len(owners) != 1:
        listed = f"it serves {', '.join([*owners][:8])}" if owners else "it lists no model"
        raise UsageError(f"{endpoint.url}: name the model with --served: {listed}")
    [(name, owner)] = owners.items()
    return name, owner in _EXTENDED


@dataclass(frozen=True)
class _Asking:
    """Settings with which every request is sent."""

    client: Any
    model: str
    extensions: Mapping[str, float]
    """Fields of every request beyond the protocol's."""
    url: str
    max_tokens: int
    places: asyncio.Semaphore
    timeout_s: float

    async def ask(self, request: GroupRequest, index: int, prompt: Mapping[str, Any]) -> _Answer:
        """One sample. Raises TroupeError if no request of this kind would be answered."""
        from openai import APIStatusError, OpenAIError

        options: dict[str, Any] = {"temperature": 0.0 if request.greedy else request.temperature}
        options |= {} if request.greedy else {"seed": sampling_seed(request.seed, str(index))}
        options["top_p"] = request.top_p  # servers have other defaults
        extensions = {"top_k": request.top_k, "min_p": request.min_p}
        options["extra_body"] = {**self.extensions, **{name: value for name, value in extensions.items() if value}}
        try:
            async with self.places, asyncio.timeout(self.timeout_s):
                done = await self.client.chat.completions.create(
                    model=self.model,
                    messages=json.loads(prompt["messages"]),
                    max_tokens=request.max_tokens or self.max_tokens,
                    **options,
                )
        except TimeoutError:
            return _Answer(status=f"endpoint: timeout after {self.timeout_s:g} s")
        except APIStatusError as error:
            if error.status_code < 500 and error.status_code not in _LOST:
                raise TroupeError(f"{self.url}: {one_line(str(error))}") from error
            return _Answer(status=f"endpoint: {one_line(str(error))}")
        except OpenAIError as error:
            return _Answer(status=f"endpoint: {one_line(f'{type(error).__name__}: {error}')}")
        return _read(done)


def _read(done: Any) -> _Answer:
    """The answer in a completion; what has another form is a failed sample."""
    try:
        (choice,), usage = done.choices, done.usage
        text = choice.message.content or ""
        return _Answer(text, choice.finish_reason or "stop", int(usage.completion_tokens), int(usage.prompt_tokens))
    except (AttributeError, TypeError, ValueError) as error:
        return _Answer(status=f"endpoint: not a chat completion with usage ({one_line(str(error))})")


def _summary(index: int, answer: _Answer) -> SampleSummary:
    return SampleSummary(index, answer.prompt_tokens, answer.tokens, answer.finish_reason, 0, 0, answer.status)


def _rows(request: GroupRequest, prompt: Mapping[str, Any], answers: Sequence[_Answer]) -> pa.Table:
    """The ROLLOUTS table of a group. An endpoint returns no token ids: only their number is used here."""
    rows = [
        {
            "prompt_uid": request.prompt_uid,
            "sample_index": index,
            "attempt": request.attempt,
            "segment": 0,
            "prompt_ids": [],
            "response_ids": [0] * answer.tokens,
            "rollout_logprobs": [],
            "loss_mask": [],
            "weight_versions": [],
            "turns": [],
            "finish_reason": answer.finish_reason,
            "episode_status": answer.status,
            "response": answer.text,
            "messages": prompt["messages"],
            "conversation": "",
            "turn_rewards": [],
            "answer": prompt["answer"],
            "metadata": prompt["metadata"],
            "engine": NAME,
            "generate_s": 0.0,
            "first_token_s": 0.0,
        }
        for index, answer in enumerate(answers)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)
