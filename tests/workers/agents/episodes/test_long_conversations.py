"""One episode with many messages, with real tokenizers: others do not wait for it, and its tokens are the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

from tests.workers.agents.episodes.test_conversation import tokenizer_of
from tests.workers.agents.episodes.test_episode import Script, reply
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.episode import EpisodeRunner, LongReader, SampleTurn
from troupe.workers.agents.episodes.turns import Played, SampledTurn, TurnLimits
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import Message, Row

USER: Message = {"role": "user", "content": "hello"}
MANY = [{"role": "user", "content": "some words and 12 more"} for _ in range(20_000)]


async def sampled(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
    await asyncio.sleep(0)
    return SampledTurn([40 + limits.number], [-0.5], [{"version": 0, "start": 0, "end": 1}], "stop")


def test_other_episodes_do_not_wait_for_one_with_many_messages() -> None:
    """The long one grows in its second turn, where it moves to the other tokenizer."""
    tokenizer = tokenizer_of("llama3")
    config, ended = EpisodeConfig(max_turns=3, max_observation_chars=20), list[str]()

    async def play(name: str, added: Sequence[Message], long: LongReader | None) -> Played:
        script = Script([reply(*added), reply(USER), reply(done=True)], [reply(USER)])
        runner = EpisodeRunner(config, 4, 10**9, TurnReader(tokenizer), short, lambda: script, long=long)
        played = await runner.play(name, Row((USER,)), sampled)
        ended.append(name)
        return played

    async def both() -> tuple[Played, Played]:
        long_one = asyncio.create_task(play("long", MANY, reader))
        await asyncio.sleep(0.1)
        other = await play("short", [USER], reader)
        return await long_one, other

    with ThreadPoolExecutor(1) as short, ThreadPoolExecutor(1) as thread:
        reader = LongReader(TurnReader(deepcopy(tokenizer)), thread)
        long_one, other = asyncio.run(both())
        alone = asyncio.run(play("alone", MANY, None))
    assert (long_one.status, other.status) == ("ok", "ok")
    assert ended == ["short", "long", "alone"]
    assert long_one.segments == alone.segments and len(alone.segments[0].response_ids) > 20_000


class SlowReader(TurnReader):
    """Takes until a short turn was read for a long one."""

    read_other = threading.Event()

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None, *, cut: bool) -> tuple[Message, Message]:
        if len(ids) < 100:
            self.read_other.set()
        assert self.read_other.wait(60)
        return super().read(ids, tools, cut=cut)


def test_other_episodes_do_not_wait_for_the_reading_of_a_long_turn() -> None:
    """A parser can take seconds for its calls."""
    tokenizer = tokenizer_of("llama3")

    def sampling(tokens: int) -> SampleTurn:
        async def sample(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
            return SampledTurn([40] * tokens, [-0.5] * tokens, [{"version": 0, "start": 0, "end": tokens}], "stop")

        return sample

    async def play(name: str, tokens: int) -> Played:
        script = Script([reply(done=True)], [reply(USER)])
        runner = EpisodeRunner(EpisodeConfig(), 1000, 10**9, SlowReader(tokenizer), short, lambda: script, long=reader)
        return await runner.play(name, Row((USER,)), sampling(tokens))

    async def both() -> list[Played]:
        long_one = asyncio.create_task(play("long", 1000))
        await asyncio.sleep(0.1)
        return [await play("short", 10), await long_one]

    with ThreadPoolExecutor(1) as short, ThreadPoolExecutor(1) as thread:
        reader = LongReader(SlowReader(deepcopy(tokenizer)), thread)
        assert [(played.status, len(played.turns[0].ids)) for played in asyncio.run(both())] == [
            ("ok", 10),
            ("ok", 1000),
        ]


def test_calls_and_tools_count_as_length() -> None:
    call = {"function": {"name": "f", "arguments": {"text": "x" * 200_000}}}
    said: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    with ThreadPoolExecutor(1) as thread:
        reader = TurnReader(tokenizer_of("llama3"))
        runner = EpisodeRunner(EpisodeConfig(), 4, 10**9, reader, thread, lambda: Script([], [reply(USER)]))
    assert runner._is_long([USER, said]) and runner._is_long([USER], [call])
    assert not runner._is_long([USER], [])
