"""A local endpoint that speaks OpenAI's protocol and tokenizes as vLLM's server does, with scripted answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Script = Callable[[int, dict[str, Any]], "web.StreamResponse | str | None"]
"""From the number of the request and its body to a response, a text as the answer, or None: no answer at all."""


@dataclass
class Endpoint:
    """A running endpoint."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Every request."""
    keys: list[str] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    busiest: int = 0
    """Most requests at the same time."""


@contextmanager
def endpoint(script: Script, pause_s: float = 0.0) -> Iterator[Endpoint]:
    """Serve on the loopback interface, on a separate thread."""
    served, running = Endpoint(), 0
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal running
        body = await request.json()
        served.bodies.append(body)
        served.keys.append(request.headers["Authorization"])
        served.headers.append(request.headers)
        running += 1
        served.busiest = max(served.busiest, running)
        try:
            await asyncio.sleep(pause_s)
            answer = script(len(served.bodies), body)
            if answer is None:
                await asyncio.sleep(60)
        finally:
            running -= 1
        if isinstance(answer, web.StreamResponse):
            return answer
        message = {"role": "assistant", "content": answer}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    async def serve() -> None:
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            app.router.add_post(path, complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def error(status: int) -> web.Response:
    """A response that refuses."""
    return web.json_response({"error": {"message": "try later"}}, status=status, headers={"Retry-After": "0"})
