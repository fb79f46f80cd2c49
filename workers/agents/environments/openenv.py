"""Environments of an OpenEnv server (package `openenv-core`)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from troupe.workers.agents.environments.base import Environment, add_to_user
from troupe.workers.agents.environments.tools import unread_call
from troupe.workers.contract.environments import Message, Observation, Row
from troupe.workers.contract.rewards import total

NEEDS = "the environment openenv needs the package openenv-core: pip install openenv-core"
_CUT = "error: the turn was cut at its token limit, and is no action"
_REFUSED = "(code: VALIDATION_ERROR)"
"""What the client's error ends with if the server could not read the action."""


class OpenEnv(Environment):
    """One session on a server: a turn of the policy is an action, and the answer to it is a user message.

    A turn that the server cannot read as an action is answered with the error, so that the policy can try again; any
    other error of the server fails the episode. With `tools`, the server's tools are offered instead, calls are
    answered with their results, and the first turn without a call ends the episode.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
    ) -> None:
        """Create the client; it connects at the start of the episode.

        Args:
            url: The server, `http://host:port`.
            action: Field of the action that gets the text of a turn. If None, the text is the action, as a JSON object.
            observation: Field of the observation to show, or None for all of it, as JSON.
            tools: Whether it is an MCP environment, whose actions are calls of tools.
            reset: Arguments of the environment's `reset`; `seed` is the seed of the episode if not given.
            columns: Columns of the data that are arguments of `reset` too.
        """
        try:
            client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        except ImportError as error:
            raise ValueError(f"{NEEDS} ({error})") from error
        if tools and action is not None:
            raise ValueError("set action or tools, and not both")
        # No time limit of the client's own: the episode's is `turn_timeout_s`.
        self._client: Any = client(base_url=url, message_timeout_s=None, mode="simulation")
        self._action, self._field, self._tools = action, observation, tools
        self._reset, self._columns = dict(reset or {}), columns

    async def start(self, row: Row) -> Observation:
        """The prompt and the first observation, and the tools."""
        if missing := [name for name in self._columns if name not in row.metadata]:
            raise ValueError(f"the row has no column {', '.join(missing)}")
        chosen = {name: row.metadata[name] for name in self._columns}
        result = await self._client.reset(**{"seed": row.seed, **self._reset, **chosen})
        schemas = None
        if self._tools:
            listed = await self._client.step({"type": "list_tools"})
            schemas = [_schema(tool) for tool in listed.observation["tools"]]
        messages = add_to_user(row.messages, self._text(result.observation))
        return Observation(messages, done=result.done, tools=schemas)

    async def step(self, message: Message) -> Observation:
        """The server's answer to an action, or to calls of tools. A turn that was cut is neither."""
        if self._tools:
            calls = message.get("tool_calls") or ()
            if not calls and (problem := unread_call(message)) is not None:
                return Observation([_user(problem)])
            return await self._call(calls)
        if message.get("finish_reason") == "length":
            return Observation([_user(_CUT)])
        try:
            action = self._read(message["content"])
        except ValueError as error:
            return Observation([_user(f"error: {error}")])
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if str(error).endswith(_REFUSED):
                return Observation([_user("error: not a valid action")])
            raise
        return Observation([_user(self._text(result.observation))], reward=result.reward, done=result.done)

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, calls: Sequence[Mapping[str, Any]]) -> Observation:
        """The results of calls, until one of them ends the episode; the reward is the sum of theirs."""
        answers: list[Message] = []
        rewards: list[float] = []
        done = not calls
        for call in calls:
            name = str(call["function"]["name"])
            answer = {"role": "tool", "tool_call_id": str(call.get("id", "")), "name": name}
            try:
                arguments = _json_object(call["function"].get("arguments") or "{}")
            except ValueError as error:
                answers.append({**answer, "content": f"error: {error}"})
                continue
            result = await self._client.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            answers.append({**answer, "content": _result_text(result.observation)})
            if result.reward is not None:
                rewards.append(float(result.reward))
            if done := result.done:
                break
        return Observation(answers, reward=total(rewards) if rewards else None, done=done)

    def _read(self, text: str) -> dict[str, Any]:
        """The action that a turn is. Raises ValueError if it is none."""
        return _json_object(text) if self._action is None else {self._action: text}

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._field is None:
            return _as_text(dict(observation))
        if self._field not in observation:
            raise ValueError(f"the observation has no field {self._field!r}; it has: {', '.join(observation)}")
        return _as_text(observation[self._field])


def _json_object(value: Any) -> dict[str, Any]:
    """A JSON object from text, also inside a Markdown fence."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text[3:-3].strip().removeprefix("json")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object, but {type(value).__name__}")
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _result_text(observation: Mapping[str, Any]) -> str:
    """What a tool returned, without FastMCP's wrapping, or why the call failed."""
    if error := observation.get("error"):
        return f"error: {error['message']}"
    result = observation.get("result")
    return _as_text(result["data"] if isinstance(result, dict) and "data" in result else result)
