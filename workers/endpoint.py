"""Asks a model behind an endpoint that speaks OpenAI's protocol: retries, timeouts, and answers of bounded length."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import httpx2

from troupe.workers.contract.endpoint import EndpointConfig
from troupe.workers.contract.text import one_line

_LONGEST_REFUSAL = 2**16
"""Bytes of the body of an error that are read. Compressed ones become up to a thousand times as many."""
_wait = ContextVar("_wait", default="")
"""How long the last response to a task's request asks its client to wait, in seconds or until a time."""


class EndpointFailed(Exception):
    """A request has no answer."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        """`late`: whether its time ran out."""
        super().__init__(why)
        self.late = late
        self.said = f"Retry-After: {_wait.get()}" if _wait.get() else ""
        """How long the endpoint asked its client to wait, or empty."""


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


async def _bounded(chunks: AsyncIterator[bytes], longest: int) -> bytes:
    """The bytes of a body until there are more than `longest`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > longest:
            break
    return bytes(body)


def read_key(config: EndpointConfig) -> str:
    """The key of an endpoint. Raises ValueError if its variable is not set."""
    key = os.environ.get(config.api_key_variable, "") if config.api_key_variable else "none"
    if not key:
        raise ValueError(f"the environment variable {config.api_key_variable} is not set")
    return key


class Endpoint:
    """A client of an endpoint, for one event loop."""

    def __init__(
        self,
        config: EndpointConfig,
        key: str,
        timeout_s: float,
        pace: Callable[[httpx2.Request], Awaitable[None]] | None = None,
    ) -> None:
        """Connects to nothing yet. `timeout_s` bounds a request with its repetitions and its wait for a free place;
        `pace` is awaited before each request, also before one that the client repeats."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        self._retries, self._timeout_s = config.retries, timeout_s
        self._places = asyncio.Semaphore(config.concurrency)
        self._client: Any = AsyncOpenAI(
            base_url=config.url,
            api_key=key,
            max_retries=config.retries,
            timeout=timeout_s,
            default_headers=config.headers,
            http_client=DefaultAsyncHttpxClient(
                event_hooks={"request": [pace] if pace else [], "response": [_read_response]}
            ),
        )

    async def ask(self, path: str, body: Mapping[str, Any], longest: int) -> bytes:
        """The body of the response to a request, as it was sent. `path`: below the endpoint's address, or a whole URL.
        Raises EndpointFailed, also for more than `longest` bytes."""
        try:
            async with asyncio.timeout(self._timeout_s), self._places:
                answer = await self._read(path, body, longest, self._retries)
        except TimeoutError as error:
            raise EndpointFailed(f"timeout after {self._timeout_s:g} s", late=True) from error
        except Exception as error:  # the client's, its transport's, or half a character, which cannot be sent
            raise EndpointFailed(one_line(f"{type(error).__name__}: {error}")) from error
        if len(answer) > longest:
            raise EndpointFailed(f"an answer of more than {longest} bytes")
        return answer

    async def _read(self, path: str, body: Mapping[str, Any], longest: int, left: int) -> bytes:
        # As a stream of bytes the client neither reads nor parses the answer: it accepts whatever is JSON.
        response = await self._client.post(path, cast_to=httpx2.Response, body=body, stream=True)
        try:
            return await _bounded(response.aiter_bytes(), longest)
        except Exception:  # the transport's: the client repeats only requests that no answer has begun to
            if not left:
                raise
        finally:
            await response.aclose()
        return await self._read(path, body, longest, left - 1)

    async def close(self) -> None:
        await self._client.close()
