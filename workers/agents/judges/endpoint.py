"""A judge behind an endpoint that speaks OpenAI's chat-completions protocol."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import Field, field_validator

from troupe.workers.agents.judges.scores import JudgeError
from troupe.workers.contract.config import Frozen
from troupe.workers.contract.environments import Message
from troupe.workers.contract.judges import JudgeAnswer, whole_words
from troupe.workers.contract.text import has_credentials, is_secret, one_line, valid_text

_CREDENTIALS = "holds credentials, and a spec holds none: put the key into a variable (api_key_variable)"
_SHOWN_BYTES = 500
"""Bytes of a body in a failure."""
_LONGEST_BODY = 2**20
"""Bytes of a body that are read. Reading a score in 80 MB took a minute of the worker."""

_wait = ContextVar("_wait", default="")
"""How long the last response to a task's question asks its client to wait, in seconds or until a time."""


async def _read_refusal(response: Any) -> None:
    """Notes the wait, and reads a bounded part of the body of an error or a redirection; the client would read all."""
    _wait.set(response.headers.get("retry-after", ""))
    if not response.is_success:
        response._content = await _bounded(response.aiter_bytes())
        await response.aclose()


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

    def __init__(self, config: HttpJudgeConfig) -> None:
        """Raises JudgeError if the key's variable is not set."""
        self._config = config
        further = "".join(f" {json.dumps(one, sort_keys=True)}" for one in (config.body, config.headers) if one)
        self.name = f"{config.url} {config.model} {config.temperature} {config.max_tokens}{further}"
        self._key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else "none"
        if not self._key:
            raise JudgeError(f"the environment variable {config.api_key_variable} is not set")

    def ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        """One answer to each question."""
        return asyncio.run(self._ask(questions, timeout_s))

    async def _ask(self, questions: Sequence[list[Message]], timeout_s: float) -> list[JudgeAnswer]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        config = self._config
        places = asyncio.Semaphore(config.concurrency)
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= {"extra_headers": config.headers, "extra_body": config.body}
        client: Any = AsyncOpenAI(
            base_url=config.url,
            api_key=self._key,
            max_retries=config.retries,
            timeout=timeout_s,
            http_client=DefaultAsyncHttpxClient(event_hooks={"response": [_read_refusal]}),
        )

        async def read(question: list[Message], left: int) -> JudgeAnswer:
            # What the endpoint sent, unread: the client accepts whatever is JSON, and text that is not.
            create = client.chat.completions.with_streaming_response.create
            async with create(model=config.model, messages=question, **options) as response:
                try:
                    body = await _bounded(response.iter_bytes())
                    if len(body) > _LONGEST_BODY:
                        return JudgeAnswer(failure=f"an answer of more than {_LONGEST_BODY} bytes")
                    return read_completion(body)
                except Exception:  # the transport's: the client repeats only requests that no answer has begun to
                    if not left:
                        raise
            return await read(question, left - 1)

        async def one(question: list[Message]) -> JudgeAnswer:
            try:
                async with asyncio.timeout(timeout_s), places:
                    return await read(question, config.retries)
            except TimeoutError:
                why = f"timeout after {timeout_s:g} s"
            except Exception as error:  # the client's, its transport's, or half a character, which cannot be sent
                why = one_line(f"{type(error).__name__}: {error}")
            return JudgeAnswer(failure=why, said=f"Retry-After: {_wait.get()}" if _wait.get() else "")

        async with client:
            return list(await asyncio.gather(*map(one, questions)))


def read_completion(body: bytes) -> JudgeAnswer:
    """The text of the first choice in the body of a response, or what the body is instead.

    Of an answer that was cut at `max_tokens`, the last word is left out.
    """
    said = body[:_SHOWN_BYTES].decode("utf-8", "replace")
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError):
        return JudgeAnswer(failure="the endpoint's answer is not JSON", said=said)
    match completion:
        case {"choices": [{"message": {"content": str() as text}}, *_]}:
            pass
        case {"choices": [{"message": {"content": list() as parts}}, *_]}:
            text = "".join(_text_of(part) for part in parts)
        case {"choices": []} | {"choices": [{"message": {"content": None}}, *_]}:
            text = ""
        case _:
            return JudgeAnswer(failure="the endpoint's answer is not a chat completion", said=said)
    match completion:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            text = whole_words(text)
    if valid_text(text) != text:
        return JudgeAnswer(failure="an answer that is not valid text", said=text)
    return JudgeAnswer(text) if text.strip() else JudgeAnswer(failure="an empty answer", said=said)


def _text_of(part: Any) -> str:
    """The text of a part of a message; empty for a part of another type."""
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            return ""
