"""Conversations that become long: what is left out, what the policy writes about it, and which tokens are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.tokenizers import new_tokenizer
from tests.workers.agents.episodes.test_episode import Script, reply
from troupe.workers.agents.episodes import conversation
from troupe.workers.agents.episodes.conversation import TurnReader
from troupe.workers.agents.episodes.episode import EpisodeRunner
from troupe.workers.agents.episodes.turns import Played, SampledTurn, TurnLimits
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import EpisodeReply, Observation, Row

SMOLLM2 = ROOT / ".cache" / "models" / "smollm2-135m-instruct"
BEGINNING = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "find it"})
BEGUN = EpisodeReply(Observation(BEGINNING))
ASK = "Summarize."


class Engine:
    """Samples turns of six words, and keeps every prompt with the turn behind it."""

    def __init__(self, tokenizer: Any, words: int = 6) -> None:
        self.tokenizer, self.words = tokenizer, words
        self.prompts: list[list[int]] = []
        self.turns: list[list[int]] = []

    async def __call__(self, prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        text = f"turn {limits.number}" + " word" * self.words + "<|im_end|>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: limits.max_tokens]
        self.prompts.append(list(prompt_ids))
        self.turns.append(ids)
        return SampledTurn(ids, [-0.5] * len(ids), [{"version": 0, "start": 0, "end": len(ids)}], "stop")

    def shown(self, number: int) -> str:
        return self.tokenizer.decode(self.prompts[number])


def answers(count: int, role: str = "user", words: int = 6) -> list[EpisodeReply | Exception]:
    told = [reply({"role": role, "content": f"answer {n}" + " fact" * words}, reward=n / 8) for n in range(count)]
    return [*told, reply(done=True, reward=1.0)]


def play(
    engine: Engine,
    replies: Sequence[EpisodeReply | Exception],
    longest: int = 200,
    begun: EpisodeReply = BEGUN,
    **bounds: Any,
) -> Played:
    config = EpisodeConfig(**({"max_turns": 20, "episode_timeout_s": 60.0} | bounds))
    script = Script(list(replies), [begun])
    with ThreadPoolExecutor(1) as tokenizing:
        runner = EpisodeRunner(config, 64, longest, TurnReader(engine.tokenizer), tokenizing, lambda: script)
        return asyncio.run(runner.play("key", Row(BEGINNING), engine))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not SMOLLM2.is_dir():
        pytest.skip("needs SmolLM2: make models")
    return new_tokenizer(SMOLLM2)


def assert_exact(played: Played, engine: Engine) -> None:
    """Every turn is in a row behind exactly the tokens that the engine had, and has loss there and nowhere else."""
    trained = 0
    for row in played.segments:
        tokens = row.prompt_ids + row.response_ids
        for prompt, turn in zip(engine.prompts, engine.turns, strict=True):
            if tokens[: len(prompt) + len(turn)] == prompt + turn:
                start = len(prompt) - len(row.prompt_ids)
                assert all(row.loss_mask[start : start + len(turn)])
                trained += len(turn)
    assert trained == sum(map(len, engine.turns)) == sum(sum(row.loss_mask) for row in played.segments)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("summary", [None, ASK])
def test_a_long_conversation_continues_as_a_new_row_with_exact_tokens(
    tokenizer: Any, summary: str | None, role: str
) -> None:
    engine = Engine(tokenizer)
    how = {"at": 0.5, "keep_turns": 1, "summary": summary}
    played = play(engine, answers(8, role), compaction=how)
    assert (played.status, played.finish_reason) == ("ok", "stop")
    assert played.compactions == len(played.segments) - 1 >= 2
    assert max(map(len, engine.prompts)) < 200
    assert_exact(played, engine)
    assert len(engine.turns) == 9 + (played.compactions if summary else 0), "nine for the environment"
    for row in played.segments[1:]:
        shown = tokenizer.decode(row.prompt_ids)
        assert shown.count("be brief") == shown.count("find it") == 1
        left = "[Summary of the earlier turns]\nturn " if summary else "[Earlier turns are left out.]"
        assert shown.count(left) == 1, "a summary replaces the one before"
        assert shown.count("<|im_start|>assistant\nturn ") == 1, "the last turn alone"
    ends = [end for end, *_ in played.rewards]
    assert ends == sorted(ends) and len(ends) == 9, "rewards stay with the environment's turns"


def test_the_summary_is_asked_for_below_what_it_is_about_and_the_environment_does_not_see_it(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    script = answers(3)
    played = play(engine, script, compaction={"at": 0.3, "keep_turns": 1, "summary": ASK})
    asked = next(number for number in range(len(engine.prompts)) if ASK in engine.shown(number))
    assert engine.shown(asked).endswith(f"answer 2{' fact' * 6}\n\n{ASK}<|im_end|>\n<|im_start|>assistant\n")
    written = tokenizer.decode(engine.turns[asked]).removesuffix("<|im_end|>")
    assert f"find it\n\n[Summary of the earlier turns]\n{written}<|im_end|>" in engine.shown(asked + 1)
    assert f"answer 2{' fact' * 6}<|im_end|>\n<|im_start|>assistant\n" in engine.shown(asked + 1)
    assert played.segments[0].response_ids[-len(engine.turns[asked]) :] == engine.turns[asked], "trained as a turn"
    assert played.response == tokenizer.decode(engine.turns[-1]).removesuffix("<|im_end|>")


def test_an_answer_that_has_no_room_takes_that_of_older_turns(tokenizer: Any) -> None:
    long = [*answers(4)[:-1], reply({"role": "user", "content": "end" + " fact" * 70}), reply(done=True)]
    whole = Engine(tokenizer)
    assert play(whole, list(long), longest=190).finish_reason == "length"
    engine = Engine(tokenizer)
    played = play(engine, list(long), longest=190, compaction={"at": 0.95, "keep_turns": 1, "summary": ASK})
    assert (played.finish_reason, played.compactions) == ("stop", 1)
    assert "[Earlier turns are left out.]" in engine.shown(-1), "there was no room for a summary either"
    assert not any(ASK in engine.shown(number) for number in range(len(engine.prompts)))
    assert_exact(played, engine)


def test_a_summary_leaves_a_turn_and_tokens_for_what_follows(tokenizer: Any) -> None:
    how = {"at": 0.1, "keep_turns": 1, "summary": ASK}
    engine = Engine(tokenizer)
    played = play(engine, answers(8), compaction=how, max_turns=3)
    assert (played.finish_reason, len(engine.turns)) == ("max_turns", 3)
    assert not any(ASK in engine.shown(number) for number in range(3)), "it would have been the last turn"
    assert played.compactions == 1
    engine = Engine(tokenizer)
    spent = 2 * len(tokenizer("turn 0 word word word word word word<|im_end|>")["input_ids"])
    played = play(engine, answers(8), compaction=how, max_sampled_tokens=spent + 3)
    assert (played.finish_reason, len(engine.turns[-1])) == ("max_sampled_tokens", 3)
    assert ASK in engine.shown(-1)
    assert_exact(played, engine)


def test_the_response_of_a_player_is_its_last_turn_and_no_summary(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    how = {"at": 0.1, "keep_turns": 1, "summary": ASK}
    told = [reply({"role": "user", "content": f"answer {n}"}, player="one") for n in range(4)]
    begun = EpisodeReply(Observation(BEGINNING, player="one"))
    played = play(engine, told, begun=begun, compaction=how, players={"one": "policy"}, max_sampled_tokens=25)
    assert ASK in engine.shown(-1)
    assert played.sample("one").response == tokenizer.decode(engine.turns[-2]).removesuffix("<|im_end|>")


def test_a_turn_tokenizes_what_is_new_alone_however_long_the_conversation_is(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred turns of 320 tokens: the characters that are tokenized for one do not depend on those before it."""
    tokenized: list[int] = []
    original = conversation.text_ids

    def counted(tokenizer: Any, text: str) -> list[int]:
        tokenized.append(len(text))
        return original(tokenizer, text)

    monkeypatch.setattr(conversation, "text_ids", counted)
    engine = Engine(tokenizer, words=60)
    replies = [reply({"role": "user", "content": "fact" + " fact" * 250})] * 99
    played = play(engine, [*replies, reply(done=True)], longest=40_000, max_turns=100)
    (row,) = played.segments
    assert (len(played.turns), played.finish_reason) == (100, "stop")
    assert row.tokens > 28_000
    assert len(tokenized) == 99 and len(set(tokenized)) == 1
    assert played.tokens == len(engine.prompts[-1]) + len(engine.turns[-1])
