"""One episode: the policy's turns on an engine and the environment's answers, until one of them ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import (
    OK,
    EnvironmentGone,
    EpisodeReply,
    Message,
    Observation,
    Row,
    cut,
    failed_status,
)
from troupe.workers.contract.roles import EnvironmentLink
from troupe.workers.episodes.conversation import Conversation, ConversationError
from troupe.workers.episodes.turns import SampledTurn, Segment
from troupe.workers.isolation.text import one_line

RESTARTS = 3
"""How often an episode starts again because its environment worker died."""
_CALL_MARGIN_S = 10.0
"""Time that a call may take beyond the environment's own bound."""
_NO_WORKER_PAUSE_S = 0.5

SampleTurn = Callable[[int, Sequence[int], int, Sequence[str]], Awaitable[SampledTurn]]
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
    turns: list[SampledTurn] = field(default_factory=list)
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

    def insert(self, segment: Segment) -> None:
        """Put a finished row before the last one, which continues; rewards of the last one keep their tokens."""
        start = self.response_tokens - len(self.segments[-1].response_ids)
        grown = len(segment.response_ids)
        self.rewards = [(end + grown if end > start else end, reward) for end, reward in self.rewards]
        self.segments.insert(-1, segment)


class Reader(Protocol):
    """What an episode needs of the tokenizer; runs on the thread that owns it."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        """The conversation with its first prompt."""
        ...

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None, *, cut: bool) -> tuple[Message, Message]:
        """From the tokens of a turn, which was `cut` or not, to the message for the environment and for the history."""
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
            state = _OpenEpisode(Played([], restarts=restarts), [message["content"] for message in row.messages])
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

    async def _play(self, state: _OpenEpisode, key: str, row: Row, sample: SampleTurn) -> None:
        link = self.link()
        worker, reply = await self._timed(state, link.begin(key, row, self.config.episode_timeout_s))
        state.begun = True
        try:
            observation = self._observed(state, reply)
            conversation = await self._start(observation)
            state.begin(conversation)
            if len(conversation.prompt_ids) >= self.max_model_len:
                tokens = len(conversation.prompt_ids)
                raise EpisodeFailed(f"the first prompt has {tokens} tokens, and max_model_len is {self.max_model_len}")
            await self._branch(state, observation)
            tools = observation.tools
            while not state.over:
                message = await self._turn(state, conversation, tools, observation, sample)
                timeout_s = self.config.turn_timeout_s + _CALL_MARGIN_S
                reply = await self._timed(state, link.step(worker, key, message, timeout_s))
                observation = self._observed(state, reply)
                if observation.restart and not observation.done:
                    tools = observation.tools
                    conversation = await self._start(observation)
                await self._take(state, conversation, observation)
        finally:
            if not state.done:
                link.end(worker, key)

    async def _turn(
        self,
        state: _OpenEpisode,
        conversation: Conversation,
        tools: Sequence[Any] | None,
        asked: Observation,
        sample: SampleTurn,
    ) -> Message:
        """Sample one turn, with those of the branches, and record them; returns the message for the environment."""
        played, first = state.played, len(state.played.turns)
        branches, state.branches = state.branches[: self.config.max_turns - first - 1], []
        turn, *others = await asyncio.gather(
            self._sample(first, conversation, asked, sample),
            *(self._sample(first + n, one.conversation, one.asked, sample) for n, one in enumerate(branches, 1)),
        )
        also = []
        for branch, other in zip(branches, others, strict=True):
            segment = Segment(list(branch.conversation.prompt_ids))
            message, _ = await self._read(state, segment, other, branch.asked.tools)
            played.insert(segment)
            played.messages += [*branch.asked.messages, message]
            also.append(_told(message, branch.conversation, other))
        message, history = await self._read(state, played.segments[-1], turn, tools)
        answer = _told(message, conversation, turn)
        conversation.add_response(turn.ids, history)
        played.response = message["content"]
        played.messages.append(message)
        return answer | ({"also": also} if also else {})

    async def _sample(
        self, number: int, conversation: Conversation, asked: Observation, sample: SampleTurn
    ) -> SampledTurn:
        """Sample the next turn of a conversation."""
        prompt = conversation.prompt_ids
        room = min(self.max_tokens, self.max_model_len - len(prompt), asked.max_tokens or self.max_tokens)
        return await sample(number, prompt, room, asked.stop)

    async def _read(
        self, state: _OpenEpisode, segment: Segment, turn: SampledTurn, tools: Sequence[Any] | None
    ) -> tuple[Message, Message]:
        """Record a turn at the end of a row; its messages for the environment and for the history."""
        state.played.prompt_tokens += segment.tokens
        state.played.turns.append(turn)
        segment.sampled(turn)
        read = partial(self.reader.read, turn.ids, tools, cut=turn.finish_reason == "length")
        return await self._run(read)

    async def _start(self, asked: Observation) -> Conversation:
        """The conversation that an observation begins. Raises EpisodeFailed for one without tokens."""
        conversation: Conversation = await self._run(self.reader.start, asked.messages, asked.tools)
        if not conversation.prompt_ids:
            raise EpisodeFailed("the prompt is empty")
        return conversation

    async def _branch(self, state: _OpenEpisode, observation: Observation) -> None:
        """Begin the conversations that are sampled along with the next turn; the episode ends where one has no room."""
        for asked in observation.also:
            conversation = await self._start(asked)
            if len(conversation.prompt_ids) >= self.max_model_len:
                state.end("length")
            state.branches.append(_Branch(conversation, asked))

    async def _take(self, state: _OpenEpisode, conversation: Conversation, observation: Observation) -> None:
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
            await self._branch(state, observation)

    def _observed(self, state: _OpenEpisode, reply: EpisodeReply) -> Observation:
        """The observation of a reply, its messages cut to the bound. Raises EpisodeFailed."""
        if reply.status != OK:
            state.done = True  # the worker has closed it
            raise EpisodeFailed(reply.status)
        return self._bounded(state, reply.observation)

    def _bounded(self, state: _OpenEpisode, observation: Observation) -> Observation:
        """The observation with its messages cut to the bound. A prompt of the data in a message does not count."""
        messages: list[Message] = []
        for message in observation.messages:
            content = message["content"]
            prompt = max((len(text) for text in state.prompts if text in content), default=0)
            shown = cut(content, self.config.max_observation_chars + prompt)
            if shown != content:
                state.played.cut_observations += 1
            messages.append(message | {"content": shown})
        return replace(observation, messages=messages, also=[self._bounded(state, one) for one in observation.also])

    async def _timed(self, state: _OpenEpisode, call: Awaitable[Any]) -> Any:
        """Wait for the environment, and count the time."""
        started = time.monotonic()
        try:
            return await call
        finally:
            state.played.environment_s += time.monotonic() - started

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the thread that owns the tokenizer. Raises EpisodeFailed for whatever it raises."""

        def called() -> Any:
            try:
                return function(*args)
            except ConversationError as error:
                raise EpisodeFailed(f"chat template: {error}") from error
            except Exception as error:  # a tokenizer and a parser can raise anything on what an episode says
                raise EpisodeFailed(one_line(f"{type(error).__name__}: {error}")) from error

        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, called)


def _told(message: Message, conversation: Conversation, turn: SampledTurn) -> Message:
    """A turn as the environment gets it, with how it ended and what it cost; before it enters the conversation."""
    counts = {"prompt_tokens": len(conversation.prompt_ids), "completion_tokens": len(turn.ids)}
    return message | {"finish_reason": turn.finish_reason, "usage": counts}


@dataclass(frozen=True)
class _Branch:
    """A conversation of one turn, sampled along with the next turn."""

    conversation: Conversation
    asked: Observation


@dataclass
class _OpenEpisode:
    """An episode under way."""

    played: Played
    prompts: Sequence[str]
    """Texts of the row's messages."""
    branches: list[_Branch] = field(default_factory=list)
    """Sampled along with the next turn."""
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
