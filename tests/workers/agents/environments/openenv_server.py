"""A server as an author of OpenEnv environments writes it: one that echoes, and one with MCP tools."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

server: Any = importlib.import_module("openenv.core.env_server")
fastmcp: Any = importlib.import_module("fastmcp")


class Say(server.Action):
    message: str


class Heard(server.Observation):
    echo: str
    left: int


class Echo(server.Environment):
    """Repeats a message `turns` times; the reward is its length."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    sessions = 0

    def __init__(self) -> None:
        super().__init__()
        self.left = 0
        type(self).sessions += 1

    def reset(self, seed: int | None = None, turns: int = 2, word: str = "ready") -> Any:
        self.left = turns
        return Heard(echo=f"{word} {seed}", left=turns)

    def step(self, action: Any, timeout_s: float | None = None) -> Any:
        if action.message == "break":
            raise RuntimeError("the echo is gone")
        self.left -= 1
        return Heard(echo=action.message, left=self.left, reward=float(len(action.message)), done=self.left == 0)

    @property
    def state(self) -> Any:
        return server.State()

    def close(self) -> None:
        type(self).sessions -= 1


class Adder(server.MCPEnvironment):
    """Offers a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = fastmcp.FastMCP("adder")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(mcp)

    def reset(self, seed: int | None = None) -> Any:
        return server.Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        raise ValueError("not a tool call")

    @property
    def state(self) -> Any:
        return server.State()


@contextlib.contextmanager
def serving(environment: Any, action: Any, observation: Any) -> Iterator[str]:
    """The url of a server on a free port of the loopback interface."""
    app = server.create_fastapi_app(environment, action, observation, max_concurrent_envs=2)
    runner = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        deadline = time.monotonic() + 20
        while not runner.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        yield f"http://127.0.0.1:{runner.servers[0].sockets[0].getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join(20)
