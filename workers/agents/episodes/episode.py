"""One episode: the policy's turns on an engine and the environment's answers, until one of them ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from troupe.workers.agents.episodes.conversation import Added, Conversation, ConversationError
from troupe.workers.agents.episodes.observations import cut_observation
from troupe.workers.agents.episodes.turns import Played, SampledTurn, SampleTurn, Segment, TurnLimits
from troupe.workers.contract.config import EpisodeConfig, StructuredConfig
from troupe.workers.contract.environments import (
    OK,
    EnvironmentGone,
    EpisodeReply,
    Message,
    Observation,
    Row,
    failed_status,
    parted,
)
from troupe.workers.contract.judges import JudgeAnswer
from troupe.workers.contract.roles import EnvironmentLink
from troupe.workers.contract.text import one_line

RESTARTS = 3
"""How often an episode starts again because its environment worker died."""
_CALL_MARGIN_S = 10.0
"""Time that a call may take beyond the environment's own bound."""
_NO_WORKER_PAUSE_S = 0.5
_LONG_CHARS = 100_000
"""Characters of a long conversation: rendering and tokenizing one of these takes about 0.1 s."""
_LONG_TURN = 512
"""Tokens of a long turn: parsers of tool calls take seconds for some, and less than 0.1 s for shorter ones."""
_MESSAGE_CHARS = 50
"""What a message counts besides its content."""

Opponent = Callable[[list[Message], int], Awaitable[JudgeAnswer]]
"""A frozen model's turn of this number, by what its player has seen."""


class EpisodeFailed(Exception):
    """The episode ends without a reward; the message is its status."""


class Reader(Protocol):
    """What an episode needs of the tokenizer; runs on the thread that owns it."""

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        """The conversation with its first prompt."""
        ...

    def start_raw(self, messages: Sequence[Message]) -> Conversation:
        """The same without the chat template."""
        ...

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None, *, cut: bool) -> tuple[Message, Message]:
        """From the tokens of a turn, which was `cut` or not, to the message for the environment and for the history."""
        ...

    def texts(self, ids: Sequence[int]) -> list[str]: ...

    def adopt(self, conversation: Conversation) -> None:
        """Continue a conversation that another reader began."""
        ...


@dataclass(frozen=True)
class LongReader:
    """A reader with its own tokenizer, and the thread that owns it."""

    reader: Reader
    thread: Executor


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
    form_problem: Callable[[StructuredConfig], str] = lambda form: ""
    """Why a turn cannot have this form; empty if it can."""
    opponent: Opponent | None = None
    """Plays as the players that the policy does not play, or None without any."""
    long: LongReader | None = None
    """Reads long conversations and turns, so that other episodes do not wait for them. If None, one thread reads
    all."""

    async def play(self, key: str, row: Row, sample: SampleTurn) -> Played:
        """Play one episode, whose key is unique over all engines. A failure of the environment is a status; errors of
        the engine are raised."""
        deadline = asyncio.get_running_loop().time() + self.config.episode_timeout_s
        restarts = 0
        while True:
            prompts = [message["content"] for message in row.messages]
            state = _OpenEpisode(Played([], restarts=restarts), prompts, sample, time.monotonic())
            try:
                async with asyncio.timeout_at(deadline):
                    await self._play(state, f"{key}/{restarts}", row)
            except EnvironmentGone as error:
                state.fail(f"it was lost: {error}")
                if (state.begun and restarts == RESTARTS) or asyncio.get_running_loop().time() >= deadline:
                    return state.played
                restarts += state.begun
                await asyncio.sleep(0 if state.begun else _NO_WORKER_PAUSE_S)  # until the deadline
                continue
            except EpisodeFailed as error:
                state.fail(str(error))
            except TimeoutError:
                state.fail(f"the episode is not done after {self.config.episode_timeout_s:g} s")
            return state.played

    async def _play(self, state: _OpenEpisode, key: str, row: Row) -> None:
        link = self.link()
        worker, reply = await self._timed(state, link.begin(key, row, self.config.episode_timeout_s))
        state.begun = True
        try:
            observation = self._observed(state, reply)
            state.done = observation.done
            asked = await self._first(state, observation)
            while not state.over:
                message = await self._turn(state, asked)
                if state.over:
                    break
                timeout_s = self.config.turn_timeout_s + _CALL_MARGIN_S
                reply = await self._timed(state, link.step(worker, key, message, timeout_s))
                asked = await self._take(state, asked, self._observed(state, reply))
        finally:
            if not state.done:
                link.end(worker, key)

    async def _first(self, state: _OpenEpisode, observation: Observation) -> _Asked:
        """The policy's first request. Raises EpisodeFailed."""
        if observation.done:
            raise EpisodeFailed("start: it is done before the policy's first turn, which leaves nothing to train")
        for reward in filter(None, (observation.reward, *observation.rewards.values())):
            raise EpisodeFailed(f"start: the reward {parted(reward)[0]:g} is for no turn: step gives rewards")
        state.played.hear(observation)
        asked = await self._open(state, observation)
        if asked.refusal is None or not observation.refusable:
            asked.begin()
        if asked.refusal is not None and not observation.refusable:
            tokens = len(asked.conversation.prompt_ids)
            raise EpisodeFailed(f"the first prompt has {tokens} tokens, and max_model_len is {self.max_model_len}")
        await self._branch(state, observation)
        return asked

    async def _turn(self, state: _OpenEpisode, asked: _Asked) -> Message:
        """Samples one turn, with the branches' turns, and records them; returns the message for the environment."""
        first = state.played.sampled_turns
        branches, state.branches = state.branches, []
        wanted = [one for one in (asked, *branches) if one.refusal is None]
        sampled = wanted[: self.config.max_turns - first]
        room, budget = self._room(state, sampled)
        if room < 1:
            if not first:
                raise EpisodeFailed(f"{budget} is used up before the first turn")
            state.end(budget)
            return {}
        sampling = (
            self._sample(state, number, one, room, one is not asked) for number, one in enumerate(sampled, first)
        )
        turns = dict(zip(sampled, await asyncio.gather(*sampling), strict=True))
        also = []
        for branch in branches:
            if branch.refusal is not None:
                also.append(branch.refusal)
            elif branch in turns:
                branch.side.messages += branch.observation.messages
                also.append(await self._read(state, branch, turns[branch]))
        answer = asked.refusal or await self._read(state, asked, turns[asked])
        if asked.refusal is None:
            state.cut, state.played.response = turns[asked].finish_reason == "length", answer["content"]
        if len(sampled) < len(wanted) and asked.observation.refusable:
            state.end("max_turns")  # those without a response would wait for it
        return answer | ({"also": also} if also else {})

    def _room(self, state: _OpenEpisode, asked: Sequence[_Asked] = ()) -> tuple[int, str]:
        """Tokens that the budgets leave to each of these turns, which begin together, and the tightest budget."""
        config, played = self.config, state.played
        left = [(self.max_model_len, "length")]
        if config.max_sampled_tokens is not None:
            left.append((config.max_sampled_tokens - played.sampled_tokens, "max_sampled_tokens"))
        if config.max_total_tokens is not None:
            new = sum(one.new_tokens for one in asked)
            left.append((config.max_total_tokens - played.tokens - new, "max_total_tokens"))
        if config.max_seconds is not None and time.monotonic() - state.started >= config.max_seconds:
            left.append((0, "max_seconds"))
        tokens, budget = min(left)
        return tokens // max(len(asked), 1), budget

    async def _sample(
        self, state: _OpenEpisode, number: int, asked: _Asked, room: int, beside: bool = False
    ) -> SampledTurn:
        """Sample the next turn of a conversation, which is one `beside` others or not, in at most `room` tokens."""
        if asked.observation.player is not None and asked.observation.player not in self.config.trained:
            new = asked.observation.messages if beside else ()
            return await self._opponents_turn([*asked.side.messages, *new], number, asked.observation.player)
        prompt, longest = asked.conversation.prompt_ids, asked.observation.max_tokens or self.max_tokens
        room = min(self.max_tokens, self.max_model_len - len(prompt), longest, room)
        form = asked.observation.structured
        structured = None if form is None else StructuredConfig.model_validate(form)
        return await state.sample(prompt, TurnLimits(number, room, tuple(asked.observation.stop), structured))

    async def _opponents_turn(self, messages: list[Message], number: int, player: str) -> SampledTurn:
        """The turn of a player that the policy does not play: a text without tokens. Raises EpisodeFailed."""
        if self.opponent is None:
            raise EpisodeFailed(f"{player}: no judge plays here")
        answer = await self.opponent(messages, number)
        if answer.failure:
            raise EpisodeFailed(f"{player}: {answer.failure}")
        return SampledTurn((), (), (), "stop", text=answer.text)

    async def _read(self, state: _OpenEpisode, asked: _Asked, turn: SampledTurn) -> Message:
        """Record a turn at the end of its conversation's row; its message for the environment."""
        asked.side.prompt_tokens += len(asked.conversation.prompt_ids)
        asked.side.record(asked.segment, asked.added, turn)
        long = len(turn.ids) > _LONG_TURN
        if turn.text is not None:
            message = history = {"role": "assistant", "content": turn.text}
        else:
            message, history = await self._run(
                partial(self._on(long).reader.read, turn.ids, asked.tools, cut=turn.finish_reason == "length"),
                long=long,
            )
        told = await self._told(message, asked, turn)
        asked.conversation.add_response(turn.ids, history)
        asked.side.messages.append(message)
        if asked.side is not state.played:
            asked.side.response = message["content"]
        return told

    async def _told(self, message: Message, asked: _Asked, turn: SampledTurn) -> Message:
        """A turn as the environment gets it, with how it ended and what it cost; before it enters the conversation."""
        counts = {"prompt_tokens": len(asked.conversation.prompt_ids), "completion_tokens": len(turn.ids)}
        told = message | {"finish_reason": turn.finish_reason, "usage": counts}
        if asked.observation.raw:
            told["token_ids"] = list(turn.ids)
        if not asked.observation.logprobs:
            return told
        texts = await self._run(self.reader.texts, turn.ids)
        return told | {"logprobs": [[text, value] for text, value in zip(texts, turn.logprobs, strict=True)]}

    async def _start(self, asked: Observation) -> Conversation:
        """The conversation that an observation begins. Raises EpisodeFailed for one without tokens."""
        long = self._is_long(asked.messages, asked.tools)
        reader = self._on(long).reader
        start = reader.start_raw if asked.raw else partial(reader.start, tools=asked.tools)
        conversation: Conversation = await self._run(start, asked.messages, long=long)
        if not conversation.prompt_ids:
            raise EpisodeFailed("the prompt is empty")
        return conversation

    async def _branch(self, state: _OpenEpisode, observation: Observation) -> None:
        """Open the conversations that are sampled along with the next turn; the episode ends if one has no room."""
        for asked in observation.also:
            branch = await self._open(state, asked, beside=True)
            if branch.refusal is not None and not asked.refusable:
                state.end("length")
            state.branches.append(branch)

    async def _open(self, state: _OpenEpisode, observation: Observation, *, beside: bool = False) -> _Asked:
        """Begin or continue the conversation of an observation; `beside` others, one without a name is new."""
        player, name = self._player(observation), (observation.player or "", observation.conversation)
        before = None if observation.restart or (beside and not any(name)) else state.conversations.get(name)
        if before is not None and before.refusal is not None:
            raise EpisodeFailed("a request that was refused can only be followed by a separate conversation")
        if before is None:
            conversation, tools, added = await self._start(observation), observation.tools, Added([])
        else:
            tools = before.tools
            conversation, added = await self._continue(state, before, observation.messages)
        row = Segment(list(conversation.prompt_ids)) if before is None or added.forked else before.segment
        refusal = await self._refusal(conversation, observation)
        asked = _Asked(conversation, observation, tools, refusal, row, added.ids, state.played.side(player))
        if any(name) or not beside:
            state.conversations[name] = asked
        return asked

    async def _continue(
        self, state: _OpenEpisode, before: _Asked, new: Sequence[Message]
    ) -> tuple[Conversation, Added]:
        """A conversation with what follows its last turn; one that has become long is compacted and begins a row."""
        conversation, how, most = before.conversation, self.config.compaction, self.max_model_len
        own = before.observation.player in (None, *self.config.trained)
        agent = before.observation.raw or before.observation.refusable
        if how is None or agent or not own or conversation.turns <= how.keep_turns:
            return conversation, await self._extend(conversation, new, conversation.add_messages)
        if len(conversation.prompt_ids) <= how.at * most:
            longer, added = await self._extend(conversation, new, conversation.asked)
            if len(longer.prompt_ids) < most:
                return longer, added
        summary = "" if how.summary is None else await self._summary(state, before, new, how.summary)
        note = f"[Summary of the earlier turns]\n{summary}" if summary else "[Earlier turns are left out.]"
        short = await self._extend(conversation, new, partial(conversation.compacted, how.keep_turns, note))
        self.reader.adopt(short)
        before.side.compactions += 1
        return short, Added([], forked=True)

    async def _summary(self, state: _OpenEpisode, before: _Asked, new: Sequence[Message], request: str) -> str:
        """The policy's summary of a conversation, a turn at the end of its row; empty if there is no room for it."""
        if state.played.sampled_turns + 2 > self.config.max_turns:
            return ""
        asking: Message = {"role": "user", "content": request}
        shown = [*new, asking]
        if new and new[-1]["role"] == "user":  # templates refuse two messages of the user
            shown = [*new[:-1], new[-1] | {"content": f"{new[-1]['content']}\n\n{request}"}]
        conversation, added = await self._extend(before.conversation, shown, before.conversation.asked)
        row = Segment(list(conversation.prompt_ids)) if added.forked else before.segment
        asked = replace(before, conversation=conversation, observation=Observation(shown), segment=row, added=added.ids)
        room = min(self._room(state, [asked])[0], self.max_model_len - len(conversation.prompt_ids))
        if room < 1:
            return ""
        side, response = before.side, before.side.response
        side.messages.append(asking)
        turn = await self._sample(state, state.played.sampled_turns, asked, room)
        summary = await self._read(state, asked, turn)
        side.response = response  # the environment's last turn
        return str(summary["content"])

    def _player(self, observation: Observation) -> str | None:
        """The player whose turn is asked for. Raises EpisodeFailed."""
        if observation.player is None and self.config.players:
            raise EpisodeFailed(f"no player is named whose turn it is, one of {', '.join(self.config.players)}")
        return None if observation.player is None else self._known(observation.player)

    def _known(self, player: str) -> str:
        """The name of a player. Raises EpisodeFailed."""
        if player not in self.config.players:
            known = ", ".join(self.config.players) or "none"
            raise EpisodeFailed(f"there is no player {player!r} in roles.environment.players ({known})")
        return player

    async def _refusal(self, conversation: Conversation, observation: Observation) -> Message | None:
        """The answer to a request that is refused or counted, or None if a turn is sampled. Raises EpisodeFailed."""
        tokens, most, refused = len(conversation.prompt_ids), self.max_model_len, None
        if tokens >= most:
            why = f"This model's maximum context length is {most} tokens. However, your messages have {tokens} tokens."
            refused = _refused("context_length_exceeded", f"{why} Please reduce the length of the messages.")
        elif observation.counted:
            usage = {"prompt_tokens": tokens, "completion_tokens": 0}
            refused = {"role": "assistant", "content": "", "usage": usage}
        elif observation.structured is not None:
            form = StructuredConfig.model_validate(observation.structured)
            if problem := await self._run(self.form_problem, form):
                if not observation.refusable:
                    raise EpisodeFailed(f"structured: {problem}")
                refused = _refused("unsupported_form", f"the form of the response cannot be used: {problem}")
        return refused

    async def _take(self, state: _OpenEpisode, asked: _Asked, observation: Observation) -> _Asked:
        """Record the environment's answer to a turn, and whether the episode ends with it; what it asks next."""
        played = state.played
        played.hear(observation)
        state.done = observation.done
        if not played.sampled_turns and (observation.done or observation.reward):
            raise EpisodeFailed("it ended before the policy's first turn")
        if observation.reward is not None and played.sampled_turns:
            asked.side.earn(observation.reward)
        for player, reward in observation.rewards.items():
            played.side(self._known(player)).earn(reward)
        if state.cut and self.config.truncated_turns == "end":
            room, budget = self._room(state)
            state.end("length" if room > 0 else budget)
        elif observation.done:
            state.end("stop")
        elif played.sampled_turns >= self.config.max_turns:
            state.end("max_turns")
        else:
            return await self._next(state, observation)
        asked.side.messages += observation.messages
        return asked

    async def _next(self, state: _OpenEpisode, observation: Observation) -> _Asked:
        """Continue or begin a conversation; the turns that follow."""
        following = await self._open(state, observation)
        if following.refusal is None or not observation.refusable:
            following.side.messages += observation.messages
        if following.refusal is not None and "refused" in following.refusal:
            state.refusals += 1
            if not observation.refusable or state.refusals >= self.config.max_turns:
                state.end("length")
        await self._branch(state, observation)
        return following

    def _observed(self, state: _OpenEpisode, reply: EpisodeReply) -> Observation:
        """The observation of a reply, its messages cut to the bound. Raises EpisodeFailed."""
        if reply.status != OK:
            state.done = True  # the worker has closed it
            raise EpisodeFailed(reply.status)
        return self._bounded(state, reply.observation)

    def _bounded(self, state: _OpenEpisode, observation: Observation) -> Observation:
        """The observation with its messages cut to the bound. What they show of the data's prompt does not count."""
        messages: list[Message] = []
        for message in observation.messages:
            shown = cut_observation(message["content"], self.config.max_observation_chars, state.prompts)
            if shown != message["content"]:
                state.played.side(observation.player).cut_observations += 1
            messages.append(message | {"content": shown})
        return replace(observation, messages=messages, also=[self._bounded(state, one) for one in observation.also])

    async def _timed(self, state: _OpenEpisode, call: Awaitable[Any]) -> Any:
        """Wait for the environment, and count the time."""
        started = time.monotonic()
        try:
            return await call
        finally:
            state.played.environment_s += time.monotonic() - started

    async def _extend(
        self, conversation: Conversation, messages: Sequence[Message], extend: Callable[[Sequence[Message]], Any]
    ) -> Any:
        """Call `extend` of a conversation with what follows a turn. Raises EpisodeFailed."""
        if self.long is None or not self._is_long([*conversation.messages, *messages]):
            return await self._run(extend, messages)
        reader = self.long.reader

        def on_thread() -> Any:
            reader.adopt(conversation)
            return extend(messages)

        return await self._run(on_thread, long=True)

    def _is_long(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> bool:
        """Whether the messages are read on a thread that others do not wait for, if there is one."""
        others = [tools or (), *(message.get("tool_calls") or () for message in messages)]
        texts = sum(len(message["content"]) + _MESSAGE_CHARS for message in messages)
        return texts + sum(len(str(other)) for other in others if other) > _LONG_CHARS

    async def _run(self, function: Callable[..., Any], *args: Any, long: bool = False) -> Any:
        """Call a function on the thread that owns its tokenizer. Raises EpisodeFailed for whatever it raises."""

        def called() -> Any:
            try:
                return function(*args)
            except ConversationError as error:
                raise EpisodeFailed(f"chat template: {error}") from error
            except Exception as error:  # a tokenizer and a parser can raise anything on what an episode says
                raise EpisodeFailed(one_line(f"{type(error).__name__}: {error}")) from error

        return await asyncio.get_running_loop().run_in_executor(self._on(long).thread, called)

    def _on(self, long: bool) -> LongReader:
        """The reader of long texts or of others, with its thread."""
        return self.long if long and self.long is not None else LongReader(self.reader, self.tokenizing)


def _refused(code: str, why: str) -> Message:
    """The answer to a request that is refused."""
    return {"role": "assistant", "content": "", "refused": {"code": code, "message": why}}


@dataclass(frozen=True, eq=False)
class _Asked:
    """A conversation whose next turn is asked for."""

    conversation: Conversation
    observation: Observation
    tools: Sequence[Any] | None
    refusal: Message | None
    """The answer if the request is refused or counted and no turn is sampled."""
    segment: Segment
    """The row of the next turn."""
    added: Sequence[int]
    """Tokens that follow the row's last turn."""
    side: Played
    """The part of the player whose turn it is; the whole episode if the environment names no players."""

    @property
    def new_tokens(self) -> int:
        """Tokens that the next turn adds to the row before its own: the prompt, or what follows the turn before."""
        return len(self.added) + (0 if self.segment.response_ids else len(self.segment.prompt_ids))

    def begin(self) -> None:
        """Record the first prompt of the episode."""
        self.side.segments.append(self.segment)
        self.side.messages = list(self.conversation.messages)


@dataclass
class _OpenEpisode:
    """An episode under way."""

    played: Played
    prompts: Sequence[str]
    """Texts of the row's messages."""
    sample: SampleTurn
    started: float
    """Time of the clock, in seconds."""
    conversations: dict[tuple[str, str], _Asked] = field(default_factory=dict)
    """By player and name, with what was last asked of each."""
    branches: list[_Asked] = field(default_factory=list)
    """Sampled along with the next turn."""
    refusals: int = 0
    """Requests that were refused."""
    cut: bool = False
    """Whether the last turn was cut at its token limit."""
    begun: bool = False
    """Whether a worker holds, or held, the episode."""
    over: bool = False
    """Whether no further turn is sampled."""
    done: bool = False
    """Whether the environment has ended it."""

    def end(self, reason: str) -> None:
        self.played.finish_reason = reason
        self.over = True

    def fail(self, status: str) -> None:
        self.played.status = failed_status(self.played.sampled_turns, status, self.played.response)
