"""One episode against a scripted environment and a scripted engine: what is recorded, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from troupe.workers.agents.episodes import episode
from troupe.workers.agents.episodes.conversation import Added, Conversation, ConversationError
from troupe.workers.agents.episodes.episode import RESTARTS, EpisodeRunner
from troupe.workers.agents.episodes.turns import Played, SampledTurn, TurnLimits
from troupe.workers.contract.config import EpisodeConfig, StructuredConfig
from troupe.workers.contract.environments import (
    EnvironmentGone,
    EpisodeReply,
    Message,
    Observation,
    Row,
    failed,
    read_observation,
)

ROW = Row(({"role": "user", "content": "go"},))
USER: Message = {"role": "user", "content": "more"}


@dataclass
class Words:
    """A conversation whose tokens are made up: [1, 2] begins it, and every message that is added is [8, 9]."""

    messages: list[Message]
    fork_at: int = -1
    prompt_ids: list[int] = field(default_factory=lambda: [1, 2])
    added: int = 0

    def add_response(self, ids: Sequence[int], message: Message) -> None:
        self.prompt_ids = [*self.prompt_ids, *ids]

    def add_messages(self, messages: Sequence[Message]) -> Added:
        self.added += 1
        if any(message["content"] == "unrenderable" for message in messages):
            raise ConversationError("the template raised")
        if self.added == self.fork_at:
            self.prompt_ids = [1, 2, 7]
            return Added([], True)
        ids = [8, 9] * len(messages)
        self.prompt_ids = [*self.prompt_ids, *ids]
        return Added(ids, False)


@dataclass
class Reader:
    fork_at: int = -1

    def start(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Conversation:
        begun = Words(list(messages), self.fork_at)
        if messages[-1]["content"] == "long":
            begun.prompt_ids = [1] * 30
        if messages[-1]["content"] == "":
            begun.prompt_ids = []
        return cast(Conversation, begun)

    def start_raw(self, messages: Sequence[Message]) -> Conversation:
        raise AssertionError("no prompt is raw")

    def adopt(self, conversation: Conversation) -> None:
        raise AssertionError("no conversation is long")

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token}>" for token in ids]

    def read(self, ids: Sequence[int], tools: Sequence[Any] | None, *, cut: bool) -> tuple[Message, Message]:
        if tools:
            raise NotImplementedError("such a \ud83d tool")
        message = {"role": "assistant", "content": " ".join(map(str, ids))}
        return message, message


@dataclass
class Script:
    """An environment worker that answers what it was told, and records what it was asked."""

    replies: list[EpisodeReply | Exception]
    begins: list[EpisodeReply | Exception] = field(default_factory=lambda: [EpisodeReply(Observation(ROW.messages))])
    heard: list[Message] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        self.keys.append(episode)
        reply = self.begins[min(len(self.keys), len(self.begins)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return "environment-0", reply

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        self.heard.append(message)
        reply = self.replies[min(len(self.heard), len(self.replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def end(self, worker: str, episode: str) -> None:
        self.ended.append(episode)


def reply(*messages: Message, **fields: Any) -> EpisodeReply:
    return EpisodeReply(Observation(messages, **fields))


KEPT = (b"one.", b"two.", b"few.")


async def sampled(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
    number = limits.number
    ids = [10 * (number + 1) + place for place in range(min(3, limits.max_tokens))]
    spans = [{"version": number, "start": 0, "end": 1}, {"version": number + 1, "start": 1, "end": len(ids)}]
    return SampledTurn(ids, [-0.5] * len(ids), spans, "stop", KEPT[: len(ids)], cached_tokens=2)


def play(script: Script, sample: Any = sampled, fork_at: int = -1, longest: int = 100, **bounds: Any) -> Played:
    values: dict[str, Any] = {"episode_timeout_s": 5.0, "turn_timeout_s": 1.0} | bounds
    config = EpisodeConfig(**values)
    with ThreadPoolExecutor(1) as tokenizing:
        runner = EpisodeRunner(config, 3, longest, Reader(fork_at), tokenizing, lambda: script)
        return asyncio.run(runner.play("key", ROW, sample))


def test_sampled_and_added_tokens_alternate_and_only_sampled_ones_have_loss() -> None:
    played = play(Script([reply(USER, reward=0.25), reply(done=True, reward=1.0, info={"solved": 1.0})]))
    (segment,) = played.segments
    assert segment.prompt_ids == [1, 2]
    assert segment.response_ids == [10, 11, 12, 8, 9, 20, 21, 22]
    assert segment.loss_mask == [True] * 3 + [False] * 2 + [True] * 3
    assert segment.logprobs == [-0.5] * 3 + [0.0] * 2 + [-0.5] * 3
    assert segment.kept == [*KEPT, b"", b"", *KEPT]
    assert [(span["version"], span["start"], span["end"]) for span in segment.versions] == [
        (0, 0, 1),
        (1, 1, 3),
        (1, 5, 6),
        (2, 6, 8),
    ]
    assert [(turn["name"], turn["start"], turn["end"]) for turn in segment.turns] == [
        ("assistant", 0, 3),
        ("environment", 3, 5),
        ("assistant", 5, 8),
    ]
    assert played.rewards == [(3, 0.25, ""), (8, 1.0, "")]
    assert (played.status, played.finish_reason, played.response) == ("ok", "stop", "20 21 22")
    assert (played.prompt_tokens, played.info) == (2 + 7, {"solved": 1.0})
    assert [message["role"] for message in played.messages] == ["user", "assistant", "user", "assistant"]


def test_a_rewritten_history_begins_a_new_segment_with_its_own_prompt() -> None:
    played = play(Script([reply(USER), reply(USER, reward=0.5), reply(done=True, reward=1.0)]), fork_at=2)
    first, second = played.segments
    assert first.response_ids == [10, 11, 12, 8, 9, 20, 21, 22]
    assert (second.prompt_ids, second.response_ids) == ([1, 2, 7], [30, 31, 32])
    assert played.rewards == [(8, 0.5, ""), (11, 1.0, "")], "ends count through the responses of all segments"


def test_the_environment_gets_the_last_turn_when_turns_run_out() -> None:
    script = Script([reply(USER), reply(USER, reward=0.5)])
    played = play(script, max_turns=2)
    assert (played.finish_reason, len(played.turns), played.rewards) == ("max_turns", 2, [(8, 0.5, "")])
    assert played.segments[0].loss_mask[-1], "nothing follows the last sampled token"
    assert script.ended == ["key/0"], "the environment had not ended the episode"


@pytest.mark.parametrize(
    ("budget", "turns"),
    [
        ({"max_sampled_tokens": 6}, [3, 3]),
        ({"max_sampled_tokens": 7}, [3, 3, 1]),
        ({"max_total_tokens": 2 + 3 + 2 + 3}, [3, 3]),
        ({"max_total_tokens": 2 + 3 + 2 + 3 + 2}, [3, 3]),
        ({"max_total_tokens": 2 + 3 + 2 + 3 + 2 + 2}, [3, 3, 2]),
    ],
)
def test_a_budget_of_tokens_ends_an_episode_as_it_is(budget: dict[str, int], turns: list[int]) -> None:
    script = Script([reply(USER, reward=0.5)])
    played = play(script, **budget)
    (name,) = budget
    assert (played.status, played.finish_reason) == ("ok", name)
    assert [len(turn.ids) for turn in played.turns] == turns
    assert len(played.rewards) == len(turns), "the environment answers the last turn too"
    assert script.ended == ["key/0"]


def test_the_prompt_of_a_new_row_is_part_of_the_budget_of_all_tokens() -> None:
    spent = 2 + 3
    assert len(play(Script([reply(USER)]), fork_at=1, max_total_tokens=spent + 3 + 1).turns) == 2
    assert len(play(Script([reply(USER)]), fork_at=1, max_total_tokens=spent + 3).turns) == 1


def test_turns_that_are_sampled_together_share_what_is_left() -> None:
    beside = reply(USER, also=[Observation([USER], restart=True)])
    played = play(Script([beside]), max_sampled_tokens=8)
    assert (played.finish_reason, [len(turn.ids) for turn in played.turns]) == ("max_sampled_tokens", [3, 2, 2])


def test_a_turn_that_the_budget_has_cut_ends_the_episode_by_the_budget() -> None:
    async def cut(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        ids = [5] * limits.max_tokens
        return SampledTurn(ids, [-1.0] * len(ids), [], "length" if limits.max_tokens < 3 else "stop")

    played = play(Script([reply(USER, reward=0.5)]), cut, max_sampled_tokens=5)
    assert (played.finish_reason, [len(turn.ids) for turn in played.turns]) == ("max_sampled_tokens", [3, 2])
    assert len(played.rewards) == 2


def test_no_turn_begins_when_the_seconds_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)

    async def slow(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        clock.now += 3.0
        return await sampled(prompt_ids, limits)

    monkeypatch.setattr(episode, "time", SimpleNamespace(monotonic=lambda: clock.now))
    played = play(Script([reply(USER, reward=0.5)]), slow, max_seconds=8.0)
    assert (played.status, played.finish_reason, len(played.turns)) == ("ok", "max_seconds", 3)
    assert len(played.rewards) == 3


def test_an_episode_whose_budget_has_no_room_for_a_turn_fails() -> None:
    played = play(Script([reply(done=True)]), max_total_tokens=2)
    assert played.status == "environment: turn 0: max_total_tokens is used up before the first turn"


def test_a_turn_that_is_cut_ends_the_episode_or_not() -> None:
    async def cut(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        return SampledTurn([5], [-1.0], [{"version": 0, "start": 0, "end": 1}], "length")

    script = Script([reply(USER, reward=0.5), reply(done=True)])
    assert (play(script, cut).finish_reason, len(script.heard)) == ("length", 1)
    again = Script([reply(USER), reply(done=True)])
    played = play(again, cut, truncated_turns="continue")
    assert (played.finish_reason, len(again.heard)) == ("stop", 2)


def test_the_log_probs_of_a_turn_are_those_that_are_recorded_where_they_are_asked_for() -> None:
    asking = EpisodeReply(Observation([USER], logprobs=True, also=[Observation([USER], restart=True, logprobs=True)]))
    script = Script([asking, reply(done=True)])
    played = play(script)
    first, second = script.heard
    assert "logprobs" not in first
    assert second["logprobs"] == [["<20>", -0.5], ["<21>", -0.5], ["<22>", -0.5]]
    assert second["also"][0]["logprobs"] == [["<30>", -0.5], ["<31>", -0.5], ["<32>", -0.5]]
    assert all(turn.logprobs == [-0.5] * 3 for turn in played.turns)


def test_an_episode_ends_where_the_model_has_no_more_room() -> None:
    played = play(Script([reply(USER)]), longest=12)  # 2 + 3 + 2 + 3 + 2 = 12
    assert (played.finish_reason, len(played.turns)) == ("length", 2)
    assert played.segments[0].tokens == 10
    short = play(Script([reply(USER)]), longest=8)
    assert [len(turn.ids) for turn in short.turns] == [3, 1], "the last turn gets the room that is left"


def test_a_prompt_without_room_fails_the_sample() -> None:
    played = play(Script([]), longest=2)
    assert played.status == "environment: turn 0: the first prompt has 2 tokens, and max_model_len is 2"


def test_a_failure_says_turn_and_last_message() -> None:
    played = play(Script([reply(USER), failed("step: error: KeyError: 'x' (games.py:7)")]))
    expected = "environment: turn 2: step: error: KeyError: 'x' (games.py:7); the last turn: '20 21 22'"
    assert played.status == expected
    assert len(played.turns) == 2, "what was sampled is recorded"


def test_what_the_template_refuses_fails_the_sample() -> None:
    played = play(Script([reply({"role": "user", "content": "unrenderable"})]))
    assert played.status.startswith("environment: turn 1: chat template: the template raised")


def test_what_the_tokenizer_or_the_parser_raises_fails_the_sample() -> None:
    begins: list[EpisodeReply | Exception] = [reply(USER, tools=[{"function": {"name": "f"}}])]
    played = play(Script([], begins))
    assert played.status == "environment: turn 1: NotImplementedError: such a tool; the last turn: ''"


def test_a_prompt_without_tokens_fails_the_sample() -> None:
    empty = reply({"role": "user", "content": ""}, restart=True)
    assert play(Script([], [empty])).status == "environment: turn 0: the prompt is empty"
    assert play(Script([empty])).status.startswith("environment: turn 1: the prompt is empty")
    beside = reply(USER, also=[empty.observation])
    assert play(Script([beside])).status.startswith("environment: turn 1: the prompt is empty")


def test_a_long_observation_is_cut() -> None:
    played = play(Script([reply(USER | {"content": "x" * 50}), reply(done=True)]), max_observation_chars=10)
    assert played.cut_observations == 1
    assert played.messages[2]["content"] == "x" * 10 + "\n[... 40 characters cut]"


def test_the_prompt_of_the_data_is_no_observation() -> None:
    question = "x" * 50 + "?"
    begins: list[EpisodeReply | Exception] = [
        reply(
            {"role": "user", "content": question}, {"role": "user", "content": f"Task: {question}\n\n" + "seen " * 20}
        )
    ]
    with ThreadPoolExecutor(1) as tokenizing:
        config = EpisodeConfig(max_observation_chars=20, turn_timeout_s=1.0, episode_timeout_s=5.0)
        link = Script([reply(done=True)], begins)
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: link)
        played = asyncio.run(runner.play("key", Row(({"role": "user", "content": question},)), sampled))
    assert played.messages[0]["content"] == question
    assert played.messages[1]["content"] == f"Task: {question}\n\nseen seen se\n[... 88 characters cut]"
    assert played.cut_observations == 1


def test_an_episode_that_takes_too_long_fails() -> None:
    async def slow(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        await asyncio.sleep(60)
        raise AssertionError

    script = Script([])
    played = play(script, slow, episode_timeout_s=0.2)
    assert played.status == "environment: turn 0: the episode is not done after 0.2 s"
    assert script.ended == ["key/0"]


def test_an_episode_starts_again_when_its_worker_dies() -> None:
    played = play(Script([reply(USER), EnvironmentGone("environment-0 has died"), reply(done=True, reward=1.0)]))
    assert (played.status, played.restarts, len(played.turns), played.rewards) == ("ok", 1, 1, [(3, 1.0, "")])


def test_an_episode_waits_for_a_worker_and_does_not_count_that() -> None:
    nobody = EnvironmentGone("no environment worker is running")
    script = Script([reply(done=True)], [nobody, nobody, reply(*ROW.messages)])
    assert (play(script).restarts, len(script.keys)) == (0, 3)


def test_workers_that_keep_dying_fail_the_sample() -> None:
    script = Script([EnvironmentGone("environment-0 has died")])
    played = play(script)
    assert played.status.startswith("environment: turn 1: it was lost: environment-0 has died")
    assert len(script.keys) == RESTARTS + 1 == len(set(script.keys)), "every start has a separate key"


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ({"done": True}, "start: it is done before the policy's first turn, which leaves nothing to train"),
        (
            {"done": True, "reward": 1.0},
            "start: it is done before the policy's first turn, which leaves nothing to train",
        ),
        ({"reward": 0.5}, "start: the reward 0.5 is for no turn: step gives rewards"),
    ],
)
def test_a_start_that_leaves_no_turn_fails_the_sample_at_once(first: dict[str, Any], status: str) -> None:
    script = Script([reply(done=True)], begins=[reply(USER, **first)])
    played = play(script)
    assert played.status == f"environment: turn 0: {status}"
    assert (script.heard, script.keys, played.restarts) == ([], ["key/0"], 0)
    assert script.ended == ([] if "done" in first else ["key/0"])


def test_the_info_of_the_first_observation_counts() -> None:
    script = Script([reply(done=True, info={"b": 2.0})], begins=[reply(USER, info={"a": 1.0, "b": 1.0}, reward=0.0)])
    assert play(script).info == {"a": 1.0, "b": 2.0}


def test_an_error_of_the_engine_is_raised_and_closes_the_episode() -> None:
    async def broken(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        raise RuntimeError("the engine died")

    script = Script([])
    with pytest.raises(RuntimeError, match="the engine died"):
        play(script, broken)
    assert script.ended == ["key/0"]


def test_a_conversation_of_its_own_begins_a_row_with_its_own_limits() -> None:
    asked: list[tuple[int, tuple[str, ...]]] = []

    async def noted(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        asked.append((limits.max_tokens, limits.stop))
        return await sampled(prompt_ids, limits)

    branch = reply({"role": "user", "content": "another question"}, restart=True, max_tokens=2, stop=("END",))
    played = play(Script([reply(USER), branch, reply(done=True, reward=1.0)]), noted)
    assert [segment.response_ids for segment in played.segments] == [[10, 11, 12, 8, 9, 20, 21, 22], [30, 31]]
    assert asked == [(3, ()), (3, ()), (2, ("END",))]
    assert played.rewards == [(10, 1.0, "")]


def test_conversations_beside_a_turn_are_sampled_with_it_and_are_rows_before_it() -> None:
    running: list[int] = []
    together: list[int] = []

    async def noted(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        running.append(limits.number)
        await asyncio.sleep(0)
        together.append(len(running))
        await asyncio.sleep(0)
        running.remove(limits.number)
        return await sampled(prompt_ids, limits)

    left, right = ({"role": "user", "content": word} for word in ("left", "right"))
    also = [Observation([left]), Observation([right], max_tokens=2)]
    script = Script([reply(USER, reward=0.5, also=also), reply(done=True, reward=1.0)])
    played = play(script, noted)
    assert together == [1, 3, 3, 3], "the turn and both conversations are sampled at the same time"
    assert [segment.response_ids for segment in played.segments] == [
        [30, 31, 32],
        [40, 41],
        [10, 11, 12, 8, 9, 20, 21, 22],
    ]
    assert played.rewards == [(8, 0.5, ""), (13, 1.0, "")], "the first turn's stays at its token, behind the new rows"
    answers = [message["content"] for message in script.heard[1]["also"]]
    assert (answers, script.heard[1]["content"]) == (["30 31 32", "40 41"], "20 21 22")
    assert played.prompt_tokens == 2 + 7 + 2 * 2
    assert [message["content"] for message in played.messages[-5:]] == [
        "left",
        "30 31 32",
        "right",
        "40 41",
        "20 21 22",
    ]


def test_conversations_that_alternate_are_continued_by_their_names() -> None:
    """Each has one row with its own tokens; the rows are in the order of their last turns."""

    def turn(name: str, **fields: Any) -> EpisodeReply:
        return reply(USER, conversation=name, **fields)

    replies = [turn("work"), turn("plan", reward=0.5), turn("work", reward=0.25), reply(done=True, reward=1.0)]
    played = play(Script(list(replies), begins=[turn("plan")]))
    assert [segment.response_ids for segment in played.segments] == [
        [10, 11, 12, 8, 9, 30, 31, 32],
        [20, 21, 22, 8, 9, 40, 41, 42],
    ]
    assert played.rewards == [(8, 0.25, ""), (11, 0.5, ""), (16, 1.0, "")], "each at the turn that it is for"
    assert played.prompt_tokens == 2 + 2 + 7 + 7


def test_conversations_at_the_same_time_are_continued_by_their_names() -> None:
    one, other = (Observation([USER], conversation=name) for name in ("one", "other"))
    both = [EpisodeReply(replace(one, also=[other])) for _ in range(2)]
    played = play(Script([both[1], reply(done=True)], begins=[both[0]]))
    assert [segment.response_ids for segment in played.segments] == [
        [20, 21, 22, 8, 9, 40, 41, 42],
        [10, 11, 12, 8, 9, 30, 31, 32],
    ]
    again = play(Script([both[1], reply(done=True)], begins=[both[0]]), fork_at=1)
    assert [segment.prompt_ids for segment in again.segments] == [[1, 2], [1, 2], [1, 2, 7], [1, 2, 7]]


def test_two_turns_of_one_conversation_at_the_same_time_are_refused() -> None:
    asked = {"messages": [USER], "conversation": "a"}
    with pytest.raises(ValueError, match="also: two turns of one conversation at the same time: a, a"):
        read_observation(asked | {"also": [asked]})
    with pytest.raises(TypeError, match=r"also\.0\.conversation: expected a name, got int"):
        read_observation({"messages": [USER], "also": [asked | {"conversation": 5}]})
    (unnamed,) = read_observation({"messages": [USER], "also": [{"messages": [USER]}]}).also
    assert unnamed.restart


def test_conversations_beyond_the_last_turn_are_not_sampled() -> None:
    also = [Observation([USER]) for _ in range(5)]
    script = Script([reply(done=True)], begins=[reply(*ROW.messages, also=also)])
    played = play(script, max_turns=3)
    assert (len(played.turns), len(played.segments), len(script.heard[0]["also"])) == (3, 3, 2)


def test_a_conversation_without_room_ends_the_episode() -> None:
    long = Observation([{"role": "user", "content": "long"}])
    played = play(Script([reply(USER, also=[long])]), longest=30)
    assert (played.finish_reason, len(played.turns)) == ("length", 1)


LONG: Message = {"role": "user", "content": "long"}


def test_a_request_without_room_is_refused_and_may_be_shortened() -> None:
    asked = reply(LONG, restart=True, refusable=True)
    short = reply(USER, restart=True, refusable=True)
    script = Script([short, asked, short, reply(done=True, reward=1.0)], begins=[asked])
    played = play(script, longest=30)
    codes = [message.get("refused", {}).get("code") for message in script.heard]
    assert codes == ["context_length_exceeded", None, "context_length_exceeded", None]
    assert "maximum context length is 30 tokens" in script.heard[0]["refused"]["message"]
    assert [(segment.prompt_ids, len(segment.response_ids)) for segment in played.segments] == [
        ([1, 2], 3),
        ([1, 2], 3),
    ]
    assert (played.status, played.finish_reason, played.rewards) == ("ok", "stop", [(6, 1.0, "")])
    assert [message["content"] for message in played.messages] == ["more", "10 11 12", "more", "20 21 22"]


def test_one_of_the_requests_at_the_same_time_is_refused() -> None:
    also = [Observation([LONG], refusable=True), Observation([USER], refusable=True)]
    script = Script([reply(done=True)], begins=[reply(USER, refusable=True, also=also)])
    played = play(script, longest=30)
    long, short = script.heard[0]["also"]
    assert ("refused" in long, "refused" in short, len(played.segments)) == (True, False, 2)
    asked = reply(LONG, refusable=True, also=[Observation([USER], refusable=True)])
    script = Script([reply(USER, restart=True, refusable=True), reply(done=True)], begins=[asked])
    played = play(script, longest=30)
    assert ("refused" in script.heard[0], len(played.segments), played.status) == (True, 2, "ok")


def test_an_agent_that_never_shortens_its_request_ends() -> None:
    script = Script([reply(LONG, restart=True, refusable=True)], begins=[reply(USER, refusable=True)])
    played = play(script, longest=30, max_turns=5)
    assert (played.status, played.finish_reason, len(played.turns)) == ("ok", "length", 1)
    assert len(script.heard) == 5
    script = Script([reply(done=True, reward=1.0)], begins=[reply(LONG, refusable=True)])
    assert play(script, longest=30).status == "environment: turn 0: it ended before the policy's first turn"


def test_more_requests_than_turns_are_left_end_the_episode_at_once() -> None:
    also = [Observation([USER], refusable=True) for _ in range(5)]
    script = Script([reply(done=True)], begins=[reply(*ROW.messages, also=also, refusable=True)])
    played = play(script, max_turns=3)
    assert (played.status, played.finish_reason, len(played.segments)) == ("ok", "max_turns", 3)
    assert (script.heard, script.ended) == ([], ["key/0"]), "some of the requests could not be answered"


def test_a_turn_has_the_form_that_is_asked_for_if_the_loss_accounts_for_it() -> None:
    forms: list[Any] = []

    async def noted(prompt_ids: Sequence[int], limits: TurnLimits) -> SampledTurn:
        forms.append(limits.structured)
        return await sampled(prompt_ids, limits)

    asked = reply(USER, structured={"regex": "yes|no"}, restart=True)
    assert play(Script([asked, reply(done=True)]), noted).status == "ok"
    assert forms == [None, StructuredConfig(regex="yes|no")]
    with ThreadPoolExecutor(1) as tokenizing:
        config = EpisodeConfig(turn_timeout_s=1.0, episode_timeout_s=5.0)
        script = Script([asked])
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: script, lambda form: "the loss does not")
        played = asyncio.run(runner.play("key", ROW, noted))
        assert played.status.startswith("environment: turn 1: structured: the loss does not")
        refusable = reply(USER, structured={"regex": "yes|no"}, restart=True, refusable=True)
        script = Script([refusable, reply(USER, restart=True), reply(done=True)])
        assert asyncio.run(runner.play("key", ROW, noted)).status == "ok"
        assert script.heard[1]["refused"]["code"] == "unsupported_form"
    assert forms == [None, StructuredConfig(regex="yes|no"), None, None, None]


def test_the_content_of_a_message_is_text_parts_of_it_or_nothing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    read = read_observation({"messages": [{"role": "user", "content": parts}, call, {"role": "user"}]})
    assert [message["content"] for message in read.messages] == ["ab", "", ""]
    for content, why in [
        (5, "messages.0.content: expected text or a list of parts with a type, got int"),
        ([5], "messages.0.content: expected text or a list of parts with a type, got list"),
        ([{"type": "image_url"}], "messages.0.content: parts of type image_url are not supported, only text"),
        ([{"type": "text", "text": None}], "messages.0.content: expected text in each part"),
    ]:
        with pytest.raises((TypeError, ValueError), match=why):
            read_observation({"messages": [{"role": "user", "content": content}]})


def test_notes_of_several_kinds_are_all_kept() -> None:
    notes = [reply(USER, note=note) for note in ("a: 1", "a: 2", "b: 1")]
    assert play(Script([*notes[1:], reply(done=True)], begins=[notes[0]])).notes == {"a": "a: 1", "b": "b: 1"}


@pytest.mark.parametrize("form", [5, {}, {"regex": ""}, {"regex": "a", "choice": ["a"]}, {"json": {}}])
def test_a_form_of_another_shape_is_no_observation(form: Any) -> None:
    with pytest.raises(ValueError, match="structured: "):
        read_observation({"structured": form})
