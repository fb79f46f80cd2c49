"""A custom agent, in any framework: it talks to the policy over the OpenAI chat-completions protocol.

The agent is the environment. Every request that it makes is an observation, and every turn of the policy is the
response to one: what is trained are the tokens of the responses, exactly as they were sampled. A request that continues
one of the conversations so far, in whatever form it writes the turns, continues its tokens. Any other (another
conversation, an earlier turn, a rewritten history, other tools) begins a new row of the sample with its own prompt.
Requests that wait at the same time, and the choices of one request (`n`), are sampled at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from aiohttp import web

from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.gateway.request import (
    MODEL_NAME,
    Choice,
    completion,
    first_difference,
    hints,
    plain,
    read_options,
    read_request,
)
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.contract.imports import import_attribute, locate, require_package
from troupe.workers.rewards.results import as_number

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HOST = "127.0.0.1"
BASE_URL, API_KEY, MODEL = "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"
"""Environment variables that a command reads; `MODEL` is any name, for there is one model."""
ROW_VARIABLE = "TROUPE_ROW"
"""Environment variable of a command: the row, as JSON."""
_SERVED = (
    "The endpoint serves POST /v1/chat/completions and GET /v1/models: let the client use chat completions "
    "(Agents SDK: set_default_openai_api('chat_completions'))"
)
_SHUTDOWN_S = 0.5
_DRAIN_S = 1.0
"""Longest wait for the output of a command that has ended: a process that it left behind may hold its pipes."""
_LONGEST_LINE = 2**24
"""Bytes of a line that a command writes."""


@dataclass(eq=False)
class _PendingRequest:
    """A request that is not answered yet."""

    request: web.Request
    body: Any
    choices: list[Choice]


class Agent(Environment):
    """Runs `function(row, client)`, or a command, against a separate endpoint.

    The function gets the `Row` and an `openai.OpenAI` client (`AsyncOpenAI` if it is a coroutine) and returns the
    reward, or None if `roles.reward` scores. A command gets the endpoint and the row in environment variables; its
    last line of output is the reward if it is a number. The endpoint listens on the loopback interface, with a key for
    each episode. The temperature of a request is ignored: responses are sampled with the spec's.
    """

    def __init__(self, function: str | None = None, command: Sequence[str] = (), args: Mapping[str, Any] | None = None):
        """`function`: `package.module:function`; `command`: program and arguments; `args`: the function's keywords."""
        if (function is None) == (not command):
            raise ValueError("set function or command, and not both")
        if function is not None:
            require_package("openai", "function")
        self._function = None if function is None else _load(function)
        self._command, self._args = list(command), dict(args or {})
        self._key = secrets.token_urlsafe(24)
        self._waiting: asyncio.Queue[Choice] = asyncio.Queue()
        self._pending: list[Choice] = []
        """Choices that are being sampled: the next turn's, then the ones of the other conversations."""
        self._asked: list[_PendingRequest] = []
        """Requests without a response that arrived."""
        self._known: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {}
        """Messages and tools of each conversation whose last turn is answered, by its name."""
        self._agent: asyncio.Task[float | None] | None = None
        self._runner: web.AppRunner | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._requests = self._begun = self._rewritten = 0
        self._notes: list[str] = []
        """What the user should know; each observation takes one."""
        self._hints: set[str] = set()
        self._refused = ""
        """Why the last malformed request was refused; an agent may catch the client's error."""

    async def start(self, row: Row) -> Observation:
        """The agent's first request."""
        app = web.Application(client_max_size=2**24, middlewares=[self._refuse])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        url = f"http://{HOST}:{self._runner.addresses[0][1]}/v1"
        self._agent = asyncio.create_task(self._run(row, url))
        return await self._next()

    async def step(self, message: Message) -> Observation:
        """The responses to the pending requests; then the next requests, or the end."""
        turns = (message, *message.pop("also", ()))
        for place, (choice, turn) in enumerate(zip(self._pending, turns, strict=False)):
            response = choice.read(turn, f"call_{self._requests}_{place}")
            self._begun += not choice.known and "refused" not in response
            # The tokens of a turn with a call that the agent did not get differ from its history's.
            self._known.pop(choice.conversation, None)
            if "refused" not in response and not _has_fewer_calls(response, turn):
                self._known[choice.conversation] = ([*choice.messages, plain(response)], choice.tools)
            if not choice.answer.done():
                choice.answer.set_result(response)
        return await self._next()

    async def close(self) -> None:
        """End a command, close the endpoint and wait for the agent to end.

        An agent that waits for a response gets an error instead. One that does not end then costs its process.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for choice in (*self._pending, *self._waiting_now()):
            choice.answer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._agent is not None:
            await asyncio.gather(self._agent, return_exceptions=True)

    async def _next(self) -> Observation:
        """The next request as an observation; the end, if the agent returns first."""
        if self._agent is None:
            raise RuntimeError("the episode was not started")
        request = asyncio.create_task(self._waiting.get())
        await asyncio.wait({request, self._agent}, return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            reward = self._agent.result()  # raises what the agent raised
            if not self._requests:
                why = f"; its last one was refused: {self._refused}" if self._refused else ""
                raise ValueError(f"the agent ended without a request{why}")
            restarted = max(0, self._begun - 1)
            counts = {"requests": self._requests, "restarted": restarted, "rewritten": self._rewritten}
            info = {name: float(count) for name, count in counts.items()}
            return Observation(reward=reward, done=True, info=info)
        waiting = [request.result(), *self._waiting_now()]
        taken = set[str]()
        rewritten = [note for choice in waiting if (note := self._place(choice, taken))]
        self._rewritten += len(rewritten)
        self._notes += rewritten[:1]
        self._pending = sorted(waiting, key=lambda choice: not choice.known)
        main, *others = self._pending
        note = self._notes.pop(0) if self._notes else ""
        return replace(main.observation, note=note, also=[choice.observation for choice in others])

    def _place(self, choice: Choice, taken: set[str]) -> str:
        """Give a request the longest conversation that it continues and that is not `taken` already, or a new one.

        Returns:
            How it repeats a conversation with a difference; empty if it does not.
        """
        self._requests += 1
        repeated, beside = "", False
        for name, (known, tools) in sorted(self._known.items(), key=lambda item: -len(item[1][0])):
            found = first_difference(known, choice.messages) or (
                "" if tools == choice.tools else "the tools are others"
            )
            if not found and name not in taken:
                taken.add(name)
                choice.conversation, choice.known = name, len(known)
                return ""
            beside = beside or not found
            asked = next((place for place, message in enumerate(known) if message["role"] == "assistant"), 1)
            if len(choice.messages) >= len(known) and not first_difference(known[:asked], choice.messages[:asked]):
                repeated = repeated or found
        choice.conversation = f"conversation {self._requests}"
        begins = "a request repeats its conversation, but begins a new row of the sample with the whole prompt"
        return f"{begins}: {repeated}" if repeated and not beside else ""

    def _waiting_now(self) -> list[Choice]:
        """Takes the choices that wait, without waiting for any."""
        return [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]

    async def _run(self, row: Row, url: str) -> float | None:
        """Run the agent to its end; its reward."""
        if self._function is None:
            return await self._run_command(row, url)
        from openai import AsyncOpenAI, OpenAI

        settings: dict[str, Any] = {"base_url": url, "api_key": self._key, "max_retries": 0, "timeout": None}
        if inspect.iscoroutinefunction(self._function):
            async with AsyncOpenAI(**settings) as client:
                returned = await self._function(row, client, **self._args)
        else:
            with OpenAI(**settings) as client:
                returned = await asyncio.to_thread(self._function, row, client, **self._args)
        if returned is None:
            return None
        reward = as_number(returned)
        if reward is None:
            raise TypeError(f"the agent returned no number, but {type(returned).__name__}")
        return reward

    async def _run_command(self, row: Row, url: str) -> float | None:
        own = {BASE_URL: url, API_KEY: self._key, MODEL: MODEL_NAME, ROW_VARIABLE: json.dumps(vars(row))}
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
        lines = [asyncio.create_task(_last_line(process.stdout))]
        lines.append(asyncio.create_task(_last_line(process.stderr, sys.stderr)))
        ended = asyncio.create_task(process.wait())  # on Python 3.11, also until its pipes are closed
        while process.returncode is None:
            await asyncio.wait({ended}, timeout=_SHUTDOWN_S)
            for line in lines:
                if line.done():
                    line.result()  # raises for one that is too long
        await asyncio.wait(lines, timeout=_DRAIN_S)
        for task in (ended, *lines):
            task.cancel()
        last, said = await asyncio.gather(*lines)
        if code := process.returncode:
            why = f": {said.decode(errors='replace')}" if said else ""
            raise RuntimeError(f"the command ended with exit code {code}{why}")
        with contextlib.suppress(ValueError):
            return float(last)
        return None

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The response to a request without the episode's key; None if it has it."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return None if secrets.compare_digest(given.encode(), self._key.encode()) else _error(401, "wrong API key")

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers what the endpoint does not serve, or cannot read, in the protocol's form of an error."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            self._refused = f"{request.method} {request.path}: {error.reason}. {_SERVED}"
            return _error(error.status, self._refused)

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "owned_by": "troupe"}]}
        return self._refusal(request) or web.json_response(listed)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        try:
            body = await request.json()
            options = read_options(body)
            choices = read_request(options)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            self._refused = "the request is nested too deeply" if deep else str(error)
            return _error(400, self._refused)
        if new := [name for name in hints(options) if name not in self._hints]:
            self._hints.update(new)
            self._notes.append(
                f"options of requests are ignored, because the policy does not read them: {', '.join(new)}"
            )
        asked = self._retried(request, body)
        if asked is None:
            asked = _PendingRequest(request, body, choices)
            self._asked.append(asked)
            for choice in choices:
                self._waiting.put_nowait(choice)
        try:
            messages = [await asyncio.shield(choice.answer) for choice in asked.choices]
        except asyncio.CancelledError:
            return _error(503, "the episode has ended")
        if not _given_up(request):
            self._asked.remove(asked)
        if refused := messages[0].get("refused"):
            return _error(400, refused["message"], refused["code"])
        if not options.stream:
            return web.json_response(completion(messages))
        with_usage = options.stream_options is not None and options.stream_options.include_usage is True
        return await _stream(request, completion(messages), with_usage)

    def _retried(self, request: web.Request, body: Any) -> _PendingRequest | None:
        """The same request, abandoned by its client, for this one to take over, or None."""
        for asked in self._asked:
            if _given_up(asked.request) and asked.body == body:
                asked.request = request
                return asked
        return None


def _has_fewer_calls(response: Message, turn: Message) -> bool:
    return len(response.get("tool_calls") or ()) < len(turn.get("tool_calls") or ())


def _given_up(request: web.Request) -> bool:
    """Whether the client has closed the connection."""
    return request.transport is None or request.transport.is_closing()


def _load(name: str) -> Any:
    function = import_attribute(name, *locate(name, {}, "agent", "package.module:function"))
    if not callable(function):
        raise ValueError(f"{name}: not a function, got {type(function).__name__}")
    return function


async def _last_line(stream: asyncio.StreamReader | None, copy: TextIO | None = None) -> bytes:
    """The last line that is not empty, once the stream has ended or the task is cancelled.

    All lines are written to `copy` as well.
    """
    last = b""
    with contextlib.suppress(asyncio.CancelledError):
        while stream is not None and (line := await stream.readline()):
            last = line.strip() or last
            if copy is not None:
                copy.write(line.decode(errors="replace"))
    return last


async def _stream(request: web.Request, done: dict[str, Any], with_usage: bool) -> web.StreamResponse:
    """The response as server-sent events: the whole message, its end, and once the usage if it is asked for."""
    base = {**done, "object": "chat.completion.chunk"}
    usage = base.pop("usage")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for choice in done["choices"]:
        message = choice["message"]
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
        delta = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        parts = ((delta, None, choice["logprobs"]), ({}, choice["finish_reason"], None))
        for part, reason, logprobs in parts:
            own = {"index": choice["index"], "delta": part, "finish_reason": reason, "logprobs": logprobs}
            chunk = {**base, "choices": [own], **({"usage": None} if with_usage else {})}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    if with_usage:
        last = {**base, "choices": [], "usage": usage}
        await response.write(f"data: {json.dumps(last)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
