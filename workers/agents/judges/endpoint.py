"""A judge behind an endpoint that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import httpx2
from pydantic import Field, field_validator

from troupe.workers.agents.judges.cache import AnswerCache
from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.endpoint import EndpointConfig
from troupe.workers.contract.judges import AnswerToken, JudgeAnswer, Question, whole_words
from troupe.workers.contract.text import valid_text
from troupe.workers.endpoint import Endpoint, EndpointFailed, read_key

_SHOWN_BYTES = 500
"""Bytes of a body in a failure."""
_LONGEST_BODY = 2**20
"""Bytes of a body that are read. Reading a score in 80 MB took a minute of the worker."""
_BYTES_PER_TOKEN = 4
_TOP = 20
"""Likeliest alternatives of each token of an answer: the most that OpenAI returns."""
PACE = {"concurrency", "retries", "requests_per_minute", "tokens_per_minute"}
"""Fields that no answer depends on."""

_request = ContextVar("_request", default=0)
"""Number of the last request for a task's question among those of the last minute; 0: it waits, or is not counted."""


class HttpJudgeConfig(EndpointConfig):
    """A model behind an endpoint that speaks OpenAI's chat-completions protocol."""

    temperature: float | None = Field(default=0.0, ge=0.0)
    """Sampling temperature, or None for the endpoint's own."""
    max_tokens: int | None = Field(default=512, ge=1)
    """Longest answer, or None to leave it out (OpenAI's reasoning models take `max_completion_tokens`, in `body`)."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a request, such as `{max_completion_tokens: 2000, response_format: {type: json_object}}`."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Most requests to this model in a minute, of all workers and runs with the same `cache`, or None for no bound."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Most tokens of these requests and their answers. Until an answer says how many it took, they are estimated from
    the length of the question and the longest answer."""

    @field_validator("body")
    @classmethod
    def _has_other_fields(cls, body: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in ("model", "messages", "temperature", "max_tokens", "stream") if name in body]:
            raise ValueError(f"{own[0]} is decided elsewhere: remove it here")
        return body


class HttpJudge:
    """Asks an endpoint. A request that cannot be answered is a failure of its sample alone."""

    def __init__(self, config: HttpJudgeConfig, cache: AnswerCache | None = None, *, logprobs: bool = False) -> None:
        """Prepare to ask. `cache` counts the requests of the last minute, if they have a bound; with `logprobs` answers
        have the log-probs of their tokens. Raises JudgeError if the key's variable is not set."""
        limits = (config.requests_per_minute, config.tokens_per_minute)
        self._config, self._limits = config, limits
        self._cache = None if limits == (None, None) else cache
        self._logprobs = {"logprobs": True, "top_logprobs": _TOP} if logprobs else {}
        further = "".join(f" {json.dumps(one, sort_keys=True)}" for one in (config.body, config.headers) if one)
        self.name = (
            f"{config.url} {config.model} {config.temperature} {config.max_tokens}{further}{' expected' * logprobs}"
        )
        try:
            self._key = read_key(config)
        except ValueError as error:
            raise JudgeError(str(error)) from error

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        return asyncio.run(self._ask(questions, timeout_s))

    async def _pace(self, request: httpx2.Request) -> None:
        """Waits until the last minute has room for a request, also for one that the client repeats."""
        if self._cache is None:
            return
        _request.set(0)
        tokens = len(request.content) // _BYTES_PER_TOKEN + (self._config.max_tokens or 0)
        while True:
            number, wait_s = self._cache.begin(f"{self._config.url} {self._config.model}", tokens, self._limits)
            if number:
                _request.set(number)
                return
            await asyncio.sleep(wait_s)

    async def _ask(self, questions: Sequence[Question], timeout_s: float) -> list[JudgeAnswer]:
        config = self._config
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= {"model": config.model} | self._logprobs | config.body
        endpoint = Endpoint(config, self._key, timeout_s, self._pace)

        async def one(question: Question) -> JudgeAnswer:
            try:
                request = options | {"messages": question.messages}
                body = await endpoint.ask("/chat/completions", request, _LONGEST_BODY)
            except EndpointFailed as error:
                waits = error.late and self._cache is not None and not _request.get()
                why = ", waiting for requests_per_minute or tokens_per_minute" if waits else ""
                return JudgeAnswer(failure=f"{error}{why}", said=error.said)
            answer, used = read_completion(body)
            if self._cache is not None and used:
                self._cache.end(_request.get(), used)
            return answer

        try:
            return list(await asyncio.gather(*map(one, questions)))
        finally:
            await endpoint.close()


def read_completion(body: bytes) -> tuple[JudgeAnswer, int]:
    """The first choice in the body of a response, or what the body is instead, and the tokens used (0: not said). Of an
    answer that was cut at `max_tokens`, the last word is left out."""
    said = body[:_SHOWN_BYTES].decode("utf-8", "replace")
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return JudgeAnswer(failure="the endpoint's answer is not JSON", said=said), 0
    match completion:
        case {"usage": {"total_tokens": int() as used}}:
            pass
        case _:
            used = 0
    return _read_choice(completion, said), used


def _read_choice(completion: Any, said: str) -> JudgeAnswer:
    match completion:
        case {"choices": [{"message": {"content": str() as text}}, *_]}:
            pass
        case {"choices": [{"message": {"content": list() as parts}}, *_]}:
            read = (part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text")
            text = "".join(one for one in read if isinstance(one, str))
        case {"choices": []} | {"choices": [{"message": {"content": None}}, *_]}:
            text = ""
        case _:
            return JudgeAnswer(failure="the endpoint's answer is not a chat completion", said=said)
    match completion:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            text = whole_words(text)
    if valid_text(text) != text:
        return JudgeAnswer(failure="an answer that is not valid text", said=text)
    if not text.strip():
        return JudgeAnswer(failure="an empty answer", said=said)
    return JudgeAnswer(text, tokens=_tokens(completion))


def _tokens(completion: Any) -> tuple[AnswerToken, ...]:
    """The tokens of an answer with the likeliest ones in their places; empty without log-probs."""
    match completion:
        case {"choices": [{"logprobs": {"content": list() as content}}, *_]}:
            return tuple(_token(one) for one in content)
        case _:
            return ()


def _token(token: Any) -> AnswerToken:
    match token:
        case {"token": str() as text, "top_logprobs": list() as others}:
            pairs = [(one.get("token"), one.get("logprob")) for one in others if isinstance(one, dict)]
            found = {name: value for name, value in pairs if isinstance(name, str) and isinstance(value, float | int)}
            return AnswerToken(text, found)
        case _:
            return AnswerToken("", {})
