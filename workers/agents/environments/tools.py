"""Tools: the policy calls Python functions or MCP servers, and ends the episode with a turn that calls none."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.agents.environments.background import BackgroundCalls
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

    def __init__(
        self,
        tools: Sequence[Tool],
        parallel_calls: int = PARALLEL_CALLS,
        background: Mapping[str, float] | None = None,
    ) -> None:
        """Offer these tools and run at most `parallel_calls` at the same time, and as many of those in `background`,
        which have so many seconds. Raises ValueError below 1."""
        if parallel_calls < 1:
            raise ValueError(f"parallel_calls must be at least 1, got {parallel_calls}")
        self._tools = {tool.name: tool for tool in tools}
        self._parallel_calls, self._background = parallel_calls, dict(background or {})
        self._open = BackgroundCalls(parallel_calls)
        self._calls = self._failed = 0

    def add(self, tool: Tool) -> None:
        """Offer one more. Raises ValueError if one has its name."""
        if tool.name in self._tools:
            raise ValueError(f"two tools have the name {tool.name}: name the tools to offer in servers.tools")
        self._tools[tool.name] = tool

    def check_background(self) -> None:
        """Raises ValueError if a tool whose calls run in the background is not offered."""
        if missing := [name for name in self._background if name not in self._tools]:
            raise ValueError(f"background: no tool {missing[0]!r}; there are: {', '.join(self._tools)}")

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def info(self) -> dict[str, float]:
        """Numbers of calls so far."""
        counts = {"tool_calls": float(self._calls), "failed_tool_calls": float(self._failed)}
        return counts | ({"open_tool_calls": float(len(self._open))} if self._background else {})

    async def answer(self, message: Message, call_reward: float = 0.0) -> Observation | None:
        """The results of a turn's calls and of earlier ones in the background, or what is wrong with the turn; waits if
        it calls no tool and others are open. None for a turn that calls no tool while none is. `call_reward` is the
        reward of a turn all of whose calls succeed, or start in the background."""
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        results, before = list[Message](), self._failed
        if calls:
            slots = asyncio.Semaphore(self._parallel_calls)
            results = await asyncio.gather(*(self._result(call, slots) for call in calls))
            self._calls += len(calls)
        elif (problem := unread_call(message)) is not None:
            results = [{"role": "user", "content": problem}]
            self._failed += problem == MALFORMED
            self._calls += problem == MALFORMED
        elif len(self._open):
            await self._open.wait()
        else:
            return None
        reward = call_reward if calls and self._failed == before and call_reward else None
        return Observation(self._with_answers(results), reward, info=self.info)

    def _with_answers(self, results: list[Message]) -> list[Message]:
        """The results, and below the last one the answers of calls in the background that are done: templates refuse a
        user's message behind results, and a second result of one call."""
        answers, failed = self._open.answers()
        self._failed += failed
        *before, last = results or [{"role": "user", "content": ""}]
        return [*before, {**last, "content": "\n\n".join(filter(None, [last["content"], *answers]))}]

    async def _result(self, call: Mapping[str, Any], slots: asyncio.Semaphore) -> Message:
        """The answer to one call, which waits for a slot: the tool's result or its error, or that it has started."""
        function = call.get("function") or {}
        name = str(function.get("name", ""))
        try:
            result = self._called(name, function.get("arguments"))
            if name in self._background:
                text = self._open.begin(name, result, self._background[name])
            else:
                async with slots:
                    text = await result
        except ToolCallError as error:
            self._failed += 1
            text = f"error: {error}"
        return {"role": "tool", "tool_call_id": str(call.get("id", "")), "name": name, "content": text}

    def _called(self, name: str, arguments: Any) -> Awaitable[str]:
        """The call of a tool, which begins when it is waited for. Raises ToolCallError."""
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
        return _bounded(tool, arguments)

    async def close(self) -> None:
        """End the calls in the background. Raises CallsLeftOpen if there are any."""
        await self._open.close()


async def _bounded(tool: Tool, arguments: dict[str, Any]) -> str:
    """The result of a call. Raises ToolCallError also if it is too long."""
    text = await tool.call(arguments)
    if len(text) > _LONGEST:
        raise ToolCallError(f"the result has {len(text):,} characters; at most {_LONGEST:,} can be returned")
    return text


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
        background: Mapping[str, float] | None = None,
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
            background: Tools whose calls run while the policy continues, and the seconds that a call may take. The
                policy reads at once that the call has started, and its answer with the next message after it is done.
        """
        limits = _read_limits(background or {})
        self._tools = OfferedTools(load_tools(tools, limits), parallel_calls, limits)
        self._servers: list[McpServer] = [server_of(read_config(server)) for server in servers]
        if not tools and not self._servers:
            raise ValueError("no tools are given: set tools or servers")
        if not self._servers:
            self._tools.check_background()
        self._reward = None if function is None else RewardFunction(function, args)
        self._system, self._call_reward = system, call_reward
        self._row = Row(())

    async def start(self, row: Row) -> Observation:
        """The prompt and the tools. Starts the servers."""
        self._row = row
        for found in await asyncio.gather(*(server.open() for server in self._servers)):
            for tool in found:
                self._tools.add(tool)
        self._tools.check_background()
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return Observation([*system, *row.messages], tools=self._tools.schemas)

    async def step(self, message: Message) -> Observation:
        """The results of the calls, or the end."""
        if (answer := await self._tools.answer(message, self._call_reward)) is not None:
            return answer
        reward = None if self._reward is None else await self._reward.value(message["content"], self._row)
        return Observation(reward=reward, done=True, info=self._tools.info)

    async def close(self) -> None:
        """End the calls in the background and the servers. Raises CallsLeftOpen if calls are open."""
        try:
            await self._tools.close()
        finally:
            await asyncio.gather(*(server.close() for server in self._servers))


def _read_limits(background: Mapping[str, float]) -> dict[str, float]:
    """The seconds that calls in the background may take, by the tool's name. Raises ValueError."""
    pairs = background.items() if isinstance(background, Mapping) else ()
    limits = {name: float(seconds) for name, seconds in pairs if type(seconds) in (int, float)}
    if len(limits) < len(background) or not all(0 < seconds < math.inf for seconds in limits.values()):
        form = "names of tools and the seconds that a call may take, such as {render: 120}"
        raise ValueError(f"background: expected {form}, got {background!r:.80}")
    return limits
