"""A judge behind an endpoint that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import httpx2
from pydantic import Field, field_validator

from troupe.workers.agents.judges.cache import AnswerCache
from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.judges import AnswerToken, JudgeAnswer, Question, whole_words
from troupe.workers.contract.text import has_credentials, is_secret, one_line, valid_text

_CREDENTIALS = "holds credentials, and a spec holds none: put the key into a variable (api_key_variable)"
_SHOWN_BYTES = 500
"""Bytes of a body in a failure."""
_LONGEST_BODY = 2**20
"""Bytes of a body that are read. Reading a score in 80 MB took a minute of the worker."""
_LONGEST_REFUSAL = 2**16
"""Bytes of the body of an error that are read. Compressed ones become up to a thousand times as many."""
_BYTES_PER_TOKEN = 4
_TOP = 20
"""Likeliest alternatives of each token of an answer: the most that OpenAI returns."""
PACE = {"concurrency", "retries", "requests_per_minute", "tokens_per_minute"}
"""Fields that no answer depends on."""

_wait = ContextVar("_wait", default="")
"""How long the last response to a task's question asks its client to wait, in seconds or until a time."""
_request = ContextVar("_request", default=0)
"""Number of the last request for a task's question among those of the last minute; 0: it waits, or is not counted."""


class _Refusal(httpx2.AsyncByteStream):
    """The beginning of the body of an error; the client would read all of it."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = _LONGEST_REFUSAL
        async for chunk in self._stream:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                break

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _read_response(response: httpx2.Response) -> None:
    """Notes the wait, and bounds the body of an error or a redirection."""
    _wait.set(response.headers.get("retry-after", ""))
    if not response.is_success and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Refusal(response.stream)


async def _bounded(chunks: AsyncIterator[bytes]) -> bytes:
    """The bytes of a body until there are more than `_LONGEST_BODY`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > _LONGEST_BODY:
            break
    return bytes(body)


class HttpJudgeConfig(Frozen):
    """A model behind an endpoint that speaks OpenAI's chat-completions protocol."""

    url: str
    """Address of the endpoint, such as `https://api.openai.com/v1`."""
    model: str
    """Name of the model."""
    api_key_variable: str = ""
    """Environment variable of the reward workers with the key; empty if the endpoint needs none."""
    temperature: float | None = Field(default=0.0, ge=0.0)
    """Sampling temperature, or None for the endpoint's own."""
    max_tokens: int | None = Field(default=512, ge=1)
    """Longest answer, or None to leave it out (OpenAI's reasoning models take `max_completion_tokens`, in `body`)."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a request, such as `{max_completion_tokens: 2000, response_format: {type: json_object}}`."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers of a request."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Most requests to this model in a minute, of all workers and runs with the same `cache`, or None for no bound."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Most tokens of these requests and their answers. Until an answer says how many it took, they are estimated from
    the length of the question and the longest answer."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests of one reward worker at the same time."""
    retries: int = Field(default=4, ge=0)
    """Repetitions of a request that was refused for load (429), failed (5xx) or lost, with exponential back-off."""

    @field_validator("url")
    @classmethod
    def _has_no_credentials(cls, url: str) -> str:
        if has_credentials(url):
            raise ValueError(_CREDENTIALS)
        return url

    @field_validator("headers")
    @classmethod
    def _have_no_credentials(cls, headers: dict[str, str]) -> dict[str, str]:
        if any(is_secret(name.replace("-", "_")) for name in headers):
            raise ValueError(_CREDENTIALS)
        return headers

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
        self._key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else "none"
        if not self._key:
            raise JudgeError(f"the environment variable {config.api_key_variable} is not set")

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
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        config = self._config
        places = asyncio.Semaphore(config.concurrency)
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= self._logprobs | {"extra_headers": config.headers, "extra_body": config.body}
        client: Any = AsyncOpenAI(
            base_url=config.url,
            api_key=self._key,
            max_retries=config.retries,
            timeout=timeout_s,
            http_client=DefaultAsyncHttpxClient(event_hooks={"request": [self._pace], "response": [_read_response]}),
        )

        async def read(question: Question, left: int) -> JudgeAnswer:
            # What the endpoint sent, unread: the client accepts whatever is JSON, and text that is not.
            create = client.chat.completions.with_streaming_response.create
            async with create(model=config.model, messages=question.messages, **options) as response:
                try:
                    body = await _bounded(response.iter_bytes())
                    if len(body) > _LONGEST_BODY:
                        return JudgeAnswer(failure=f"an answer of more than {_LONGEST_BODY} bytes")
                    answer, used = read_completion(body)
                    if self._cache is not None and used:
                        self._cache.end(_request.get(), used)
                    return answer
                except Exception:  # the transport's: the client repeats only requests that no answer has begun to
                    if not left:
                        raise
            return await read(question, left - 1)

        async def one(question: Question) -> JudgeAnswer:
            try:
                async with asyncio.timeout(timeout_s), places:
                    return await read(question, config.retries)
            except TimeoutError:
                why = f"timeout after {timeout_s:g} s"
                if self._cache is not None and not _request.get():
                    why += ", waiting for requests_per_minute or tokens_per_minute"
            except Exception as error:  # the client's, its transport's, or half a character, which cannot be sent
                why = one_line(f"{type(error).__name__}: {error}")
            return JudgeAnswer(failure=why, said=f"Retry-After: {_wait.get()}" if _wait.get() else "")

        async with client:
            return list(await asyncio.gather(*map(one, questions)))


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
