"""Tools of MCP servers: programs that talk over their standard input and output, or servers behind a URL.

Protocol: https://modelcontextprotocol.io/specification, by its own Python SDK (`mcp`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from troupe.workers.agents.environments.functions import Tool, ToolCallError
from troupe.workers.contract.config_base import Frozen, first_problem
from troupe.workers.contract.imports import require_package
from troupe.workers.contract.text import has_credentials, is_secret, valid_json
from troupe.workers.isolation.child import BoundedOutput
from troupe.workers.rewards.results import ProgramFailed

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

_LAUNCH = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Runs a program that ends with the process of its episode (`PR_SET_PDEATHSIG`), also if that is killed."""
_CONNECT_S = 30.0
_DRAIN_S = 0.5
"""Longest wait for the output of a server that has failed."""
_kept: dict[str, McpServer] = {}
"""Servers with `reuse`, by their configuration; of this process."""


class McpServerConfig(Frozen):
    """How a server is started or reached."""

    command: list[str] | None = Field(default=None, min_length=1)
    """Program and arguments."""
    url: str | None = None
    """Address of a server that runs elsewhere (streamable HTTP), instead of `command`."""
    key_variable: str = ""
    """Environment variable with the key that a URL's server asks for (`Authorization: Bearer`)."""
    tools: list[str] | None = None
    """Names of the tools to offer, or None for all of the server's."""
    environment_variables: list[str] = Field(default_factory=list)
    """Names of variables that the server inherits, besides HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    reuse: bool = False
    """Keep the server for later episodes of the same process, which saves its start. Only for servers without state."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServerConfig:
        if (self.command is None) == (self.url is None):
            raise ValueError("set command or url")
        if has_credentials(self.url or ""):
            raise ValueError("url: holds credentials, and a spec holds none: set key_variable")
        return self


def read_config(server: Mapping[str, Any]) -> McpServerConfig:
    """A server's configuration from a spec. Raises ValueError if a field is wrong, there is no such program, or a
    secret or the package `mcp` is missing."""
    require_package("mcp", "servers")
    try:
        config = McpServerConfig.model_validate(server)
    except ValidationError as error:
        raise ValueError(f"servers: {first_problem(error)}") from error
    if config.command is not None and shutil.which(config.command[0]) is None:
        raise ValueError(f"servers: command: no program {config.command[0]} is on the PATH")
    named = {name: "environment_variables" for name in config.environment_variables if is_secret(name)}
    for name, field in (named | ({config.key_variable: "key_variable"} if config.key_variable else {})).items():
        if name not in os.environ:
            problem = f"{name} is not set, or the environment may not read it: name it in its `env` too"
            raise ValueError(f"servers: {field}: {problem}")
    return config


class McpServer:
    """A running server, and the connection to it."""

    def __init__(self, config: McpServerConfig) -> None:
        self._config = config
        self._name = (config.url or " ".join(config.command or ()))[:100]
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._errors: BoundedOutput | None = None

    async def open(self) -> list[Tool]:
        """Start the server, unless it runs; its tools. Raises RuntimeError if the server cannot be started, or does not
        speak the protocol, and ValueError if it lacks a tool that the configuration names."""
        from mcp import MCPError

        if self._client is not None:
            with suppress(MCPError):  # a kept server may have ended since the last episode
                return await self._tools()
            await self._end()
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        # The connection's task groups must be left by the task that entered them, and every call of an environment is
        # a separate task.
        self._task = asyncio.create_task(self._hold(opened, self._closing))
        self._client = await opened
        return await self._tools()

    async def close(self) -> None:
        """End the server, unless it is kept for later episodes."""
        if not self._config.reuse:
            await self._end()

    async def _end(self) -> None:
        self._closing.set()
        if self._task is not None:
            with suppress(Exception):  # errors of a server that is no longer needed
                await self._task

    async def _hold(self, opened: asyncio.Future[Client], closing: asyncio.Event) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = self._program(stack) if self._config.url is None else await self._remote(stack)
                client = await stack.enter_async_context(Client(transport))
                opened.set_result(client)
                await closing.wait()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(await self._failed(f"the MCP server {self._name} does not answer: {_cause(error)}"))

    def _program(self, stack: AsyncExitStack) -> Any:
        """The transport of a server that is started; its errors are read until it has ended."""
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        inherited = {name: os.environ[name] for name in self._config.environment_variables if name in os.environ}
        self._errors = errors = BoundedOutput(self._name)
        errlog = stack.enter_context(os.fdopen(os.dup(errors.descriptor), "w"))
        errors.started()
        launch = ["-S", "-c", _LAUNCH, *(self._config.command or ())]
        parameters = StdioServerParameters(command=sys.executable, args=launch, env=inherited)
        return stdio_client(parameters, errlog=errlog)

    async def _remote(self, stack: AsyncExitStack) -> Any:
        """The transport of a server behind a URL."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        key = os.environ[self._config.key_variable] if self._config.key_variable else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # A call is bounded by the turn; a stream of the server may be silent for as long as the episode takes.
        client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(_CONNECT_S, read=None))
        await stack.enter_async_context(client)
        return streamable_http_client(self._config.url or "", http_client=client)

    async def _tools(self) -> list[Tool]:
        client, wanted = self._connected(), self._config.tools
        found = {}
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                break
        if missing := [name for name in wanted or () if name not in found]:
            raise ValueError(f"the MCP server {self._name} has no tool {missing[0]}; it has: {', '.join(found)}")
        return [
            self._tool(name, tool.description or "", tool.input_schema)
            for name, tool in found.items()
            if wanted is None or name in wanted
        ]

    def _tool(self, name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
        async def call(arguments: dict[str, Any]) -> str:
            return await self._call(name, arguments)

        function = {"name": name, "description": description, "parameters": parameters}
        return Tool(name, {"type": "function", "function": function}, call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises ToolCallError for what the server answers, RuntimeError if it does not."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            # Half a character, which a policy can write, would end the connection.
            result = await self._connected().call_tool(name, valid_json(arguments))
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise await self._failed(f"the MCP server {self._name} has ended") from error
            raise ToolCallError(error.error.message) from error
        if result.is_error:
            raise ToolCallError(_text(result))
        return _text(result)

    async def _failed(self, how: str) -> ProgramFailed:
        """The server's failure, with the last lines that it wrote."""
        if self._errors is not None:
            await asyncio.to_thread(self._errors.drain, _DRAIN_S)
        words = "" if self._errors is None else self._errors.last_lines()
        return ProgramFailed(how + words)

    def _connected(self) -> Client:
        if self._client is None:
            raise RuntimeError(f"the MCP server {self._name} is not open")
        return self._client


def server_of(config: McpServerConfig) -> McpServer:
    """The server of a configuration: a new one, or, with `reuse`, the one that this process keeps."""
    if not config.reuse:
        return McpServer(config)
    key = config.model_dump_json()
    return _kept.setdefault(key, McpServer(config))


def _cause(error: BaseException) -> str:
    """What went wrong, without the groups of the tasks that it went through."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" or type(error).__name__


def _text(result: CallToolResult) -> str:
    """What the policy reads of a result: its texts, and the kind of everything else."""
    from mcp.types import TextContent

    parts = [block.text if isinstance(block, TextContent) else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)
