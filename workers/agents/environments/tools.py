"""Tools: the policy calls Python functions or MCP servers, and ends the episode with a turn that calls none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.basic import RewardFunction
from troupe.workers.agents.environments.functions import Tool, ToolCallError, load_tools
from troupe.workers.agents.environments.mcp_servers import McpServer, read_config, server_of
from troupe.workers.contract.environments import CALL_MARKERS, Message, Observation, Row

MALFORMED = "The tool call could not be read. Write it as JSON with a name and arguments."
CUT = "The turn was cut at its token limit. It calls no tool, and it is not the answer. Write a shorter turn."
PARALLEL_CALLS = 8
_LONGEST = 2**20
"""Most characters of a result. The episode cuts what is longer than its `max_observation_chars`."""


def offered(args: Mapping[str, Any]) -> Iterator[str]:
    """What `Tools` with these arguments adds to a prompt: the system message, and the tools as JSON.

    Starts the servers. Raises ValueError.
    """
    try:
        begun = asyncio.run(_begun(Tools(**args)))
    except (TypeError, RuntimeError) as error:
        raise ValueError(error) from error
    yield "".join(message["content"] for message in begun.messages)
    yield json.dumps(begun.tools)


async def _begun(environment: Tools) -> Observation:
    try:
        return await environment.start(Row(()))
    finally:
        await environment.close()


def unread_call(message: Message) -> str | None:
    """The message to a policy whose turn was cut, or has a call that cannot be read; None for any other turn."""
    if message.get("finish_reason") == "length":
        return CUT
    begun = "unread_call" in message or any(marker in message["content"] for marker in CALL_MARKERS)
    return MALFORMED if begun else None


class OfferedTools:
    """Tools by name: runs the calls of a turn, and counts them."""

    def __init__(self, tools: Sequence[Tool], parallel_calls: int = PARALLEL_CALLS) -> None:
        """Offer these tools and run at most `parallel_calls` at the same time. Raises ValueError below 1."""
        if parallel_calls < 1:
            raise ValueError(f"parallel_calls must be at least 1, got {parallel_calls}")
        self._tools, self._parallel_calls = {tool.name: tool for tool in tools}, parallel_calls
        self._calls = self._failed = 0

    def add(self, tool: Tool) -> None:
        """Offer one more. Raises ValueError if one has its name."""
        if tool.name in self._tools:
            raise ValueError(f"two tools have the name {tool.name}: name the tools to offer in servers.tools")
        self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def info(self) -> dict[str, float]:
        """Numbers of calls so far."""
        return {"tool_calls": float(self._calls), "failed_tool_calls": float(self._failed)}

    async def answer(self, message: Message, call_reward: float = 0.0) -> Observation | None:
        """The results of a turn's calls, or what is wrong with it; None for a turn that calls no tool. `call_reward` is
        the reward of a turn all of whose calls succeed."""
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if calls:
            before = self._failed
            slots = asyncio.Semaphore(self._parallel_calls)
            results = await asyncio.gather(*(self._result(call, slots) for call in calls))
            self._calls += len(calls)
            fine = self._failed == before
            return Observation(results, call_reward if fine and call_reward else None, info=self.info)
        if (problem := unread_call(message)) is None:
            return None
        if problem == MALFORMED:
            self._failed += 1
            self._calls += 1
        return Observation([{"role": "user", "content": problem}], info=self.info)

    async def _result(self, call: Mapping[str, Any], slots: asyncio.Semaphore) -> Message:
        """The answer to one call, which waits for a slot: the tool's result or its error."""
        function = call.get("function") or {}
        name = str(function.get("name", ""))
        try:
            async with slots:
                text = await self._call(name, function.get("arguments"))
            if len(text) > _LONGEST:
                raise ToolCallError(f"the result has {len(text):,} characters; at most {_LONGEST:,} can be returned")
        except ToolCallError as error:
            self._failed += 1
            text = f"error: {error}"
        return {"role": "tool", "tool_call_id": str(call.get("id", "")), "name": name, "content": text}

    async def _call(self, name: str, arguments: Any) -> str:
        tool = self._tools.get(name)
        if tool is None:
            raise ToolCallError(f"there is no tool {name!r}; there are: {', '.join(self._tools)}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:  # a model can open any number of brackets
                raise ToolCallError(f"the arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ToolCallError("the arguments are not a JSON object")
        return await tool.call(arguments)


class Tools(Environment):
    """Offers tools, runs the calls of every turn, and answers with their results.

    An episode ends with the first turn without a call that was not cut. Its text is the answer: `function` scores it,
    or, without one, the reward functions of `roles.reward`. What a tool raises, an unknown tool and wrong arguments are
    answered as the tool's error, so that the policy can try again.
    """

    def __init__(
        self,
        tools: Sequence[str] = (),
        servers: Sequence[Mapping[str, Any]] = (),
        function: str | None = None,
        args: Mapping[str, Any] | None = None,
        system: str = "",
        call_reward: float = 0.0,
        parallel_calls: int = PARALLEL_CALLS,
    ) -> None:
        """Load the tools.

        Args:
            tools: Built-in tools (calculator, python) or `package.module:function`.
            servers: MCP servers, which run while the episode does: `command` (program and arguments), or `url` and
                `key_variable` of one that runs elsewhere, `tools` (names of those to offer; all if left out),
                `environment_variables` (names of those to inherit), and `reuse` (keep the server for later episodes of
                the same process).
            function: Reward function of the last turn, as in `roles.reward`, or None if the environment gives no end
                reward.
            args: Its keyword arguments.
            system: System message put before the prompt, unless empty.
            call_reward: Reward of every turn all of whose calls succeeded.
            parallel_calls: Most calls of a turn that run at the same time.
        """
        self._tools = OfferedTools(load_tools(tools), parallel_calls)
        self._servers: list[McpServer] = [server_of(read_config(server)) for server in servers]
        if not tools and not self._servers:
            raise ValueError("no tools are given: set tools or servers")
        self._reward = None if function is None else RewardFunction(function, args)
        self._system, self._call_reward = system, call_reward
        self._row = Row(())

    async def start(self, row: Row) -> Observation:
        """The prompt and the tools. Starts the servers."""
        self._row = row
        for found in await asyncio.gather(*(server.open() for server in self._servers)):
            for tool in found:
                self._tools.add(tool)
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return Observation([*system, *row.messages], tools=self._tools.schemas)

    async def step(self, message: Message) -> Observation:
        """The results of the calls, or the end."""
        if (answer := await self._tools.answer(message, self._call_reward)) is not None:
            return answer
        reward = None if self._reward is None else await self._reward.value(message["content"], self._row)
        return Observation(reward=reward, done=True, info=self._tools.info)

    async def close(self) -> None:
        """End the servers."""
        await asyncio.gather(*(server.close() for server in self._servers))
