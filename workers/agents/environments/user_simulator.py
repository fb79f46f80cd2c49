"""A user that is a model: it wants what the row says, and answers the policy until it ends the conversation."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from troupe.workers.agents.environments.base import Environment, load
from troupe.workers.agents.judges.endpoint import HttpJudge, HttpJudgeConfig
from troupe.workers.contract.config_base import first_problem
from troupe.workers.contract.environments import ASSISTANT, ENVIRONMENTS, USER, Message, Observation, Row
from troupe.workers.contract.imports import require_package
from troupe.workers.contract.judges import Question
from troupe.workers.contract.templates import checked_fields, template_fields
from troupe.workers.rewards.answer_text import visible

INSTRUCTIONS = (
    "You are the user in a conversation with an assistant. What you want, and all that you know:\n\n{scenario}\n\n"
    "Write the user's next message and nothing else. Say only what the conversation needs now, in your own words, and "
    "make nothing up. When you have what you want, or the assistant cannot help, write {stop}."
)
GREETING = "Hello! How can I help you?"
_ALONE = "single_turn"
_SWAPPED = {USER: ASSISTANT, ASSISTANT: USER}
_IDLE = {"concurrency", "requests_per_minute", "tokens_per_minute"}
"""Fields of an endpoint that have an effect if one process asks for many samples."""


class UserSimulator(Environment):
    """Plays the user: its model answers the policy's turns. In its own conversation it is the assistant.

    With `environment`, a turn goes there first, and to the user when that environment is done: with `tools`, a turn
    that calls none. When the conversation ends, the reward and the numbers of its last answer count.
    """

    def __init__(
        self,
        scenario: str = "",
        instructions: str = INSTRUCTIONS,
        stop: str = "###STOP###",
        turns: int = 10,
        environment: Mapping[str, Any] | None = None,
        endpoint: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Load the environment and read the endpoint.

        Args:
            scenario: Column of `metadata` with what the user wants. The conversation then begins with the prompt, and
                the policy answers first if that ends with the user's message. If empty, the last message of the
                prompt is what the user wants; the policy does not see it, and the user speaks first.
            instructions: System message of the user's model, with `{scenario}`, `{stop}` and columns of `metadata`.
            stop: What the user writes to end the conversation.
            turns: Most messages of the model; the policy's answer to the last one ends the conversation.
            environment: `name` and `args` of the environment that gets the policy's turns first.
            endpoint: The user's model, as `endpoint` of a judge. If None, `roles.judge` plays the player `user`.
            timeout_s: Longest answer of the endpoint.
        """
        checked_fields(instructions, ("scenario", "stop"))
        if turns < 1 or not stop:
            raise ValueError(f"turns must be at least 1, got {turns}" if stop else "stop is empty")
        inner = {"name": _ALONE, "args": {}, **(environment or {})}
        if inner["name"] in ENVIRONMENTS and inner["name"] not in (_ALONE, "tools"):
            raise ValueError(f"environment: {inner['name']} is not asked again once it is done: use tools, or your own")
        self._inner: Any = load(inner["name"], inner["args"])()
        self._scenario, self._instructions, self._stop = scenario, instructions, stop
        self._turns = self._left = turns
        self._endpoint, self._timeout_s = None if endpoint is None else _read_endpoint(endpoint), timeout_s
        self._user: HttpJudge | None = None
        self._talk: list[Message] = []
        """What the user's model has not read yet; all of its conversation with an endpoint."""
        self._row: Row | None = None
        """The row, until the policy's first turn is asked for."""
        self._listens = False
        """Whether the next turn is that of the player `user`."""
        self._last = Observation()
        """The last answer of the inner environment."""

    async def start(self, row: Row) -> Observation:
        """The policy's first turn, or the user's."""
        if self._endpoint is not None:
            self._user = HttpJudge(self._endpoint)
        messages = list(row.messages)
        fields = {"stop": self._stop, **row.metadata}
        if not self._scenario:
            fields["scenario"] = messages.pop()["content"]
        elif self._scenario in fields:
            fields["scenario"] = fields[self._scenario]
        if missing := [name for name in ("scenario", *template_fields(self._instructions)) if name not in fields]:
            raise ValueError(f"the row has no column {self._scenario if missing[0] == 'scenario' else missing[0]}")
        said = [message for message in messages if message["role"] in _SWAPPED]
        self._talk = [
            {"role": "system", "content": self._instructions.format_map(fields)},
            {"role": USER, "content": GREETING},
            *({"role": _SWAPPED[message["role"]], "content": message["content"]} for message in said),
        ]
        self._row = replace(row, messages=tuple(messages))
        return await self._ask() if not said or said[-1]["role"] == ASSISTANT else await self._begin()

    async def step(self, message: Message) -> Observation:
        """The user's answer, or that of the inner environment; the end."""
        if self._listens:
            self._listens = False
            return await self._heard(message["content"])
        self._last = await _settled(self._inner.step(message))
        if not self._last.done:
            return self._to_policy(self._last)
        self._talk.append({"role": USER, "content": visible(message["content"])})
        return await self._ask() if self._left else self._end()

    async def close(self) -> None:
        """Close the inner environment."""
        await _settled(self._inner.close())

    async def _begin(self, *said: Message) -> Observation:
        """The policy's first turn, behind what the user has said."""
        row, self._row = self._row or Row(()), None
        return self._to_policy(await _settled(self._inner.start(replace(row, messages=(*row.messages, *said)))))

    async def _ask(self) -> Observation:
        """What follows the user's next message, or its turn if it is a player. Raises ValueError."""
        if self._user is None:
            self._listens, talk, self._talk = True, self._talk, []
            return Observation(talk, player=USER)
        (answer,) = await asyncio.to_thread(self._user.ask, [Question(self._talk)], self._timeout_s)
        if answer.failure:
            raise ValueError(f"the user's model: {answer.failure}{answer.said and f' ({answer.said[:200]})'}")
        self._talk.append({"role": ASSISTANT, "content": answer.text})
        return await self._heard(answer.text)

    async def _heard(self, text: str) -> Observation:
        """What follows a message of the user. Raises ValueError if it says nothing."""
        said, ends, _ = visible(text).partition(self._stop)
        if ends and self._row is None:
            return self._end()
        if ends or not said.strip():
            raise ValueError("the user ends the conversation before it begins" if ends else "the user says nothing")
        self._left -= 1
        message = {"role": USER, "content": said.strip()}
        return await self._begin(message) if self._row is not None else self._to_policy(Observation([message]))

    def _end(self) -> Observation:
        reward, info = self._last.reward, {**self._last.info, "user_turns": float(self._turns - self._left)}
        if self._user is not None or reward is None:
            return Observation(reward=reward, done=True, info=info)
        return Observation(rewards={ASSISTANT: reward}, done=True, info=info)

    def _to_policy(self, observation: Observation) -> Observation:
        if observation.player is not None:
            raise ValueError("the inner environment has players")
        return observation if self._user is not None else replace(observation, player=ASSISTANT)


def _read_endpoint(endpoint: Mapping[str, Any]) -> HttpJudgeConfig:
    """The endpoint of arguments. Raises ValueError."""
    require_package("openai", "an endpoint")
    importlib.import_module("openai")  # the forks of the episodes share it
    try:
        read = HttpJudgeConfig.model_validate(endpoint)
    except ValidationError as error:
        raise ValueError(f"endpoint.{first_problem(error)}") from error
    if idle := sorted(_IDLE & read.model_fields_set):
        raise ValueError(f"endpoint.{idle[0]}: has no effect, for every episode asks separately; remove it")
    return read


async def _settled(value: Any) -> Any:
    """The value, or what a coroutine returns."""
    return await value if inspect.isawaitable(value) else value
