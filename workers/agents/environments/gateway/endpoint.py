"""The endpoint of one episode: it reads requests of every protocol, holds them until they are answered, and answers."""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from troupe.workers.agents.environments.gateway.chat import Chat
from troupe.workers.agents.environments.gateway.completions import Completions, Generate
from troupe.workers.agents.environments.gateway.messages import CountTokens, Messages
from troupe.workers.agents.environments.gateway.protocol import Protocol, Refused
from troupe.workers.agents.environments.gateway.request import MODEL_NAME, Choice, read_options, read_request
from troupe.workers.agents.environments.gateway.responses import Responses

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
PROTOCOLS: tuple[type[Protocol], ...] = (Chat, Responses, Messages, CountTokens, Completions, Generate)
_SERVED = f"The endpoint serves POST {', '.join(one.path for one in PROTOCOLS)} and GET /v1/models"
_MODEL = {"id": MODEL_NAME, "object": "model", "owned_by": "troupe", "created": 0}
_MODEL |= {"type": "model", "display_name": MODEL_NAME, "created_at": "1970-01-01T00:00:00Z"}
"""In the form of both services that have such a list."""
_SHUTDOWN_S = 0.5
_LARGEST = 2**24
"""Bytes of a request."""


@dataclass(eq=False)
class _PendingRequest:
    """A request that is not answered yet."""

    request: web.Request
    body: Any
    choices: list[Choice]


class AgentEndpoint:
    """An HTTP server on the loopback interface, with a key."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.waiting: asyncio.Queue[Choice] = asyncio.Queue()
        """Choices of the requests that arrived."""
        self.notes: list[str] = []
        """What the user should know."""
        self.refused = ""
        """Why the last refused request was refused; an agent may catch the client's error."""
        self._asked: list[_PendingRequest] = []
        self._hints: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._protocols = {kind.path: kind() for kind in PROTOCOLS}

    async def start(self) -> str:
        """Listen; returns the URL."""
        app = web.Application(client_max_size=_LARGEST, middlewares=[self._refuse])
        for path, protocol in self._protocols.items():
            app.router.add_post(path, functools.partial(self._answer, protocol))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening; requests that wait get an error."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers what has no key, what the endpoint does not serve or cannot read, in the form of its protocol."""
        other = Messages.path if "anthropic-version" in request.headers else Chat.path
        error = self._protocols.get(request.path, self._protocols[other]).error
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            return web.json_response(error(401, "wrong API key"), status=401)
        try:
            return await handler(request)
        except web.HTTPException as problem:
            status, code = problem.status, None
            self.refused = f"{request.method} {request.path}: {problem.reason}. {_SERVED}"
        except Refused as problem:
            status, code, self.refused = problem.status, problem.code, str(problem)
        except RecursionError:
            status, code, self.refused = 400, None, "the request is nested too deeply"
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as problem:
            status, code, self.refused = 400, None, str(problem)
        return web.json_response(error(status, self.refused, code), status=status)

    async def _models(self, request: web.Request) -> web.Response:
        if name := request.match_info.get("name"):
            return web.json_response(_MODEL | {"id": name})
        ends = {"first_id": MODEL_NAME, "last_id": MODEL_NAME, "has_more": False}
        return web.json_response({"object": "list", "data": [_MODEL], **ends})

    async def _answer(self, protocol: Protocol, request: web.Request) -> web.StreamResponse:
        """The response to a request, when the policy's turns are sampled."""
        body = await request.json()
        if not isinstance(body, dict):
            raise TypeError(f"expected an object, got {type(body).__name__}")
        noted = protocol.fields.check(body)
        options = read_options(protocol.request(body, noted))
        self._note(noted)
        asked = self._retried(request, body)
        if asked is None:
            asked = _PendingRequest(request, body, read_request(options))
            self._asked.append(asked)
            for choice in asked.choices:
                self.waiting.put_nowait(choice)
        try:
            turns = [await asyncio.shield(choice.answer) for choice in asked.choices]
        except asyncio.CancelledError:
            return web.json_response(protocol.error(503, "the episode has ended"), status=503)
        if not _given_up(request):
            self._asked.remove(asked)
        if refused := turns[0].get("refused"):
            raise Refused(refused["message"], refused["code"])
        response = protocol.response(body, turns)
        return await _stream(protocol, request, body, response) if options.stream else web.json_response(response)

    def _note(self, noted: list[str]) -> None:
        """Notes the fields that are ignored, each once."""
        if new := [name for name in noted if name not in self._hints]:
            self._hints.update(new)
            shown = ", ".join(new)
            self.notes.append(f"options of requests are ignored, because the policy does not read them: {shown}")

    def _retried(self, request: web.Request, body: Any) -> _PendingRequest | None:
        """The same request, abandoned by its client, for this one to take over, or None."""
        for asked in self._asked:
            if _given_up(asked.request) and asked.request.path == request.path and asked.body == body:
                asked.request = request
                return asked
        return None


def _given_up(request: web.Request) -> bool:
    """Whether the client has closed the connection."""
    return request.transport is None or request.transport.is_closing()


async def _stream(protocol: Protocol, request: web.Request, body: Any, done: dict[str, Any]) -> web.StreamResponse:
    """The response as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for name, data in protocol.events(body, done):
        head, text = f"event: {name}\n" if name else "", data if isinstance(data, str) else json.dumps(data)
        await response.write(f"{head}data: {text}\n\n".encode())
    await response.write_eof()
    return response
