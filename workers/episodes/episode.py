"""One episode: the policy's turns on an engine and the environment's answers, until one of them ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from workers.contract.config import EpisodeConfig
from workers.contract.environments import (
    OK,
    EnvironmentGone,
    EpisodeReply,
    Message,
    Observation,
    Row,
    cut,
    failed_status,
)
from workers.contract.roles import EnvironmentLink
from workers.episodes.conversation import Conversation, ConversationError
from workers.episodes.turns import Segment, Turn

RESTARTS = 3
"""How often an episode starts again because its environment worker died."""
_CALL_MARGIN_S = 10.0
"""Time that a call may take beyond the environment's own bound."""
_NO_WORKER_PAUSE_S = 0.5

SampleTurn = Callable[[int, Sequence[int], int, Sequence[str]], Awaitable[Turn]]
"""Samples one turn: (number of the turn, prompt ids, most tokens, further strings that end it)."""


class EpisodeFailed(Exception):
    """The episode ends without a reward; the message is its status."""


@dataclass
class Played:
    """A finished episode."""

    segments: list[Segment]
    finish_reason: str = "stop"
    """`stop`: the environment ended it; `length`: out of tokens; `max_turns`."""
    status: str = OK
    response: str = ""
    """Text of the last turn."""
    messages: list[Message] = field(default_factory=list)
    """The whole conversation."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(tokens of all segments' responses up to the turn that is rewarded, reward)."""
    turns: list[Turn] = field(default_factory=list)
    prompt_tokens: int = 0
    """Tokens of the prompts of all turns."""
    environment_s: float = 0.0
    cut_observations: int = 0
    restarts: int = 0
    info: dict[str, float] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        """Tokens of all segments after their prompts."""
        return sum(len(segment.response_ids) for segment in self.segments)


class Reader(Protocol):
    """What an episode needs of the tokenizer; runs on the thread that owns it."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        """The conversation with its first prompt."""
        ...

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None) -> tuple[Message, Message]:
        """From the tokens of a turn to the message for the environment and the one for the history."""
        ...


@dataclass(frozen=True)
class EpisodeRunner:
    """Plays episodes with the same engine, environment and bounds."""

    config: EpisodeConfig
    max_tokens: int
    """Most tokens of one turn."""
    max_model_len: int
    reader: Reader
    tokenizing: Executor
    """The thread that owns the tokenizer."""
    link: Callable[[], EnvironmentLink]
    """The current link: environment workers come and go."""

    async def play(self, key: str, row: Row, sample: SampleTurn) -> Played:
        """Play one episode. A failure of the environment is a status; errors of the engine are raised.

        Args:
            key: Name of the episode, unique over all engines.
            row: The row of the data.
            sample: Samples one turn.
        """
        deadline = asyncio.get_running_loop().time() + self.config.episode_timeout_s
        restarts = 0
        while True:
            state = _State(Played([], restarts=restarts))
            try:
                async with asyncio.timeout_at(deadline):
                    await self._play(state, f"{key}/{restarts}", row, sample)
            except EnvironmentGone as error:
                state.fail(f"its environment worker died: {error}")
                if state.begun and restarts == RESTARTS:
                    return state.played
                restarts += state.begun
                await asyncio.sleep(0 if state.begun else _NO_WORKER_PAUSE_S)  # until the deadline
                continue
            except EpisodeFailed as error:
                state.fail(str(error))
            except TimeoutError:
                state.fail(f"the episode is not done after {self.config.episode_timeout_s:g} s")
            return state.played

    async def _play(self, state: _State, key: str, row: Row, sample: SampleTurn) -> None:
        link = self.link()
        worker, reply = await self._timed(state, link.begin(key, row, self.config.episode_timeout_s))
        state.begun = True
        try:
            observation = self._observed(state, reply)
            conversation = await self._run(self.reader.start, observation.messages, observation.tools)
            state.begin(conversation)
            if len(conversation.prompt_ids) >= self.max_model_len:
                tokens = len(conversation.prompt_ids)
                raise EpisodeFailed(f"the first prompt has {tokens} tokens, and max_model_len is {self.max_model_len}")
            tools = observation.tools
            while not state.over:
                message = await self._turn(state, conversation, tools, observation, sample)
                timeout_s = self.config.turn_timeout_s + _CALL_MARGIN_S
                reply = await self._timed(state, link.step(worker, key, message, timeout_s))
                observation = self._observed(state, reply)
                if observation.restart and not observation.done:
                    tools = observation.tools
                    conversation = await self._run(self.reader.start, observation.messages, tools)
                await self._take(state, conversation, observation)
        finally:
            if not state.done:
                link.end(worker, key)

    async def _turn(
        self,
        state: _State,
        conversation: Conversation,
        tools: Sequence[Any] | None,
        asked: Observation,
        sample: SampleTurn,
    ) -> Message:
        """Sample one turn and record it; returns the message for the environment."""
        played, prompt = state.played, conversation.prompt_ids
        room = min(self.max_tokens, self.max_model_len - len(prompt), asked.max_tokens or self.max_tokens)
        turn = await sample(len(played.turns), prompt, room, asked.stop)
        played.prompt_tokens += len(prompt)
        played.turns.append(turn)
        played.segments[-1].sampled(turn)
        message, history = await self._run(self.reader.read, turn.ids, tools)
        conversation.add_response(turn.ids, history)
        played.response = message["content"]
        played.messages.append(message)
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(turn.ids)}
        return message | {"finish_reason": turn.finish_reason, "usage": counts}

    async def _take(self, state: _State, conversation: Conversation, observation: Observation) -> None:
        """Record the environment's answer to a turn, and whether the episode ends with it."""
        played = state.played
        played.messages += observation.messages
        played.info |= observation.info
        if observation.reward is not None:
            played.rewards.append((played.response_tokens, observation.reward))
        state.done = observation.done
        if played.turns[-1].finish_reason == "length" and self.config.truncated_turns == "end":
            state.end("length")
        elif observation.done:
            state.end("stop")
        elif len(played.turns) >= self.config.max_turns:
            state.end("max_turns")
        else:
            added = None
            if not observation.restart:
                added = await self._run(conversation.add_messages, observation.messages)
            if len(conversation.prompt_ids) >= self.max_model_len:
                state.end("length")
            elif added is None or added.forked:
                played.segments.append(Segment(list(conversation.prompt_ids)))
            else:
                played.segments[-1].added(added.ids)

    def _observed(self, state: _State, reply: EpisodeReply) -> Observation:
        """The observation of a reply, its messages cut to the bound. Raises EpisodeFailed."""
        if reply.status != OK:
            state.done = True  # the worker has closed it
            raise EpisodeFailed(reply.status)
        given, limit = reply.observation.messages, self.config.max_observation_chars
        state.played.cut_observations += sum(len(message["content"]) > limit for message in given)
        messages = [message | {"content": cut(message["content"], limit)} for message in given]
        return replace(reply.observation, messages=messages)

    async def _timed(self, state: _State, call: Awaitable[Any]) -> Any:
        """Wait for the environment, and count the time."""
        started = time.monotonic()
        try:
            return await call
        finally:
            state.played.environment_s += time.monotonic() - started

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the thread that owns the tokenizer. Raises EpisodeFailed for what cannot be rendered."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.tokenizing, function, *args)
        except ConversationError as error:
            raise EpisodeFailed(f"chat template: {error}") from error


@dataclass
class _State:
    """An episode under way."""

    played: Played
    begun: bool = False
    """Whether a worker holds, or held, the episode."""
    over: bool = False
    """Whether no further turn is sampled."""
    done: bool = False
    """Whether the environment has ended it."""

    def begin(self, conversation: Conversation) -> None:
        self.played.segments.append(Segment(list(conversation.prompt_ids)))
        self.played.messages = list(conversation.messages)

    def end(self, reason: str) -> None:
        self.played.finish_reason = reason
        self.over = True

    def fail(self, status: str) -> None:
        self.played.status = failed_status(len(self.played.turns), status, self.played.response)
