"""The environment user_simulator: who speaks when, what each side sees, how a conversation ends, and how it fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
from aiohttp import web

from tests.workers.agents.environments.test_shipped import say, settled, step
from tests.workers.agents.episodes.test_episode import Reader, sampled
from tests.workers.agents.judges.judge_endpoint import Endpoint, endpoint
from troupe.workers.agents.environments.base import Environment
from troupe.workers.agents.environments.child import EpisodeHost
from troupe.workers.agents.environments.user_simulator import GREETING, UserSimulator
from troupe.workers.agents.episodes.episode import EpisodeRunner
from troupe.workers.agents.episodes.turns import Played
from troupe.workers.contract.config import EpisodeConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Observation, Row
from troupe.workers.contract.judges import JudgeAnswer

SYSTEM = {"role": "system", "content": "You sell shoes."}
ROW = Row((SYSTEM, {"role": "user", "content": "You want red shoes."}), "42")
ADDED = {"name": "tools", "args": {"tools": ["calculator"], "function": "last_number"}}
ASKED = {"name": "calculator", "arguments": '{"expression": "2+3"}'}


def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def simulator(served: Endpoint, **args: Any) -> UserSimulator:
    return UserSimulator(endpoint={"url": served.url, "model": "user", "retries": 0}, **args)


def test_the_user_speaks_first_about_what_the_policy_does_not_see() -> None:
    said = ["<think>Red.</think>Shoes!", "Red ones.", "Thanks. ###STOP###"]
    with endpoint(lambda number, body: said[number - 1]) as served:
        user = simulator(served)
        first = settled(user.start(ROW))
        assert texts(first.messages) == [("system", "You sell shoes."), ("user", "Shoes!")]
        assert texts(step(user, say("<think>Hm.</think>Which colour?")).messages) == [("user", "Red ones.")]
        end = step(user, say("Here they are."))
    assert (end.done, end.reward, end.info) == (True, None, {"user_turns": 2.0})
    instructions, *talk = texts(served.bodies[-1]["messages"])
    assert instructions[0] == "system" and "You want red shoes." in instructions[1] and "###STOP###" in instructions[1]
    assert talk == [
        *[("user", GREETING), ("assistant", said[0]), ("user", "Which colour?"), ("assistant", "Red ones.")],
        ("user", "Here they are."),
    ]


def test_the_policy_answers_first_where_the_row_has_the_users_message() -> None:
    row = Row((SYSTEM, {"role": "user", "content": "Hi!"}), metadata={"task": "Buy shoes.", "mood": "angry"})
    with endpoint(lambda number, body: "Shoes.") as served:
        user = simulator(served, scenario="task", instructions="{scenario} You are {mood}. {stop}", turns=1, stop="END")
        assert texts(settled(user.start(row)).messages) == texts(row.messages) and not served.bodies
        assert texts(step(user, say("Yes?")).messages) == [("user", "Shoes.")]
        assert step(user, say("Here.")).done, "the answer to the user's last message ends it"
    assert texts(served.bodies[0]["messages"]) == [
        *[("system", "Buy shoes. You are angry. END"), ("user", GREETING), ("assistant", "Hi!"), ("user", "Yes?")]
    ]


def test_a_turn_goes_to_the_inner_environment_first_and_its_last_answer_counts() -> None:
    row = Row((SYSTEM, {"role": "user", "content": "You want 2+3."}), answer="5")
    with endpoint(lambda number, body: ["What is 2+3?", "Are you sure?", "###STOP###"][number - 1]) as served:
        user = simulator(served, environment=ADDED)
        first = settled(user.start(row))
        assert [tool["function"]["name"] for tool in first.tools or ()] == ["calculator"]
        (result,) = step(user, say("", ("calculator", ASKED["arguments"]))).messages
        assert (result["role"], result["content"], len(served.bodies)) == ("tool", "5", 1)
        assert step(user, say("6")).reward is None, "the user went on"
        end = step(user, say("5"))
        settled(user.close())
    assert (end.done, end.reward, end.info["tool_calls"], end.info["user_turns"]) == (True, 1.0, 1.0, 2.0)


Answer = Callable[[int, dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (lambda number, body: web.Response(status=500, text="down"), "the user's model: InternalServerError"),
        (lambda number, body: "", "the user's model: an empty answer"),
        (lambda number, body: "<think>Hm", "the user says nothing"),
        (lambda number, body: "###STOP###", "the user ends the conversation before it begins"),
        (
            lambda number, body: web.Response(text="<html>"),
            "the user's model: the endpoint's answer is not JSON (<html>)",
        ),
        (lambda number, body: None, "the user's model: timeout after 0.5 s"),
    ],
)
def test_a_user_that_fails_is_a_failed_episode(answer: Answer, status: str) -> None:
    with endpoint(answer) as served:
        host = EpisodeHost(lambda: simulator(served, timeout_s=0.5 if "timeout" in status else 30.0))
        reply = json.loads(host.answer({"op": "start", "row": asdict(ROW)}))
    assert status in reply["failure"]


class Scored(Environment):
    """Scores the state after each turn."""

    def start(self, row: Row) -> Observation:
        return Observation(row.messages)

    def step(self, message: Message) -> Observation:
        return Observation(reward=float("42" in message["content"]), done=True)


class Direct:
    """An environment worker with one episode."""

    def __init__(self, environment: UserSimulator) -> None:
        self.environment = environment

    async def begin(self, episode: str, row: Row, timeout_s: float) -> tuple[str, EpisodeReply]:
        return "", EpisodeReply(await self.environment.start(row))

    async def step(self, worker: str, episode: str, message: Message, timeout_s: float) -> EpisodeReply:
        return EpisodeReply(await self.environment.step(message))

    def end(self, worker: str, episode: str) -> None:
        pass


def play(said: Sequence[str], heard: list[list[tuple[str, str]]], failure: str = "", **args: Any) -> Played:
    async def opponent(messages: list[Message], number: int) -> JudgeAnswer:
        heard.append(texts(messages))
        return JudgeAnswer(said[min(len(heard), len(said)) - 1], failure=failure)

    config = EpisodeConfig(players={"assistant": "policy", "user": "judge"})
    with ThreadPoolExecutor(1) as tokenizing:
        link = Direct(UserSimulator(**args))
        runner = EpisodeRunner(config, 3, 100, Reader(), tokenizing, lambda: link, opponent=opponent)
        return asyncio.run(runner.play("key", ROW, sampled))


def test_the_judge_plays_the_user_and_none_of_its_tokens_are_trained() -> None:
    heard: list[list[tuple[str, str]]] = []
    inner = {"name": f"{__name__}:Scored"}
    played = play(["Shoes!", "Red ones.", "###STOP###"], heard, environment=inner)
    assert (played.status, played.finish_reason) == ("ok", "stop")
    policy, user = played.sample("assistant"), played.sample("user")
    assert texts(policy.messages) == [
        *[("system", "You sell shoes."), ("user", "Shoes!"), ("assistant", "20 21 22")],
        *[("user", "Red ones."), ("assistant", "40 41 42")],
    ]
    assert policy.segments[0].loss_mask.count(True) == 6 and not user.sampled_tokens
    assert heard[1][-2:] == [("assistant", "Shoes!"), ("user", "20 21 22")]
    assert len(heard[2]) == 6 and heard[2][:2] == heard[0], "its whole conversation, each message once"
    assert (policy.rewards, user.rewards) == ([(8, 1.0, "")], []), "of its last answer, once"


def test_a_judge_that_does_not_answer_fails_the_episode() -> None:
    assert "user: judge-0 did not answer" in play([""], [], failure="judge-0 did not answer in 5 s").status


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"turns": 0}, "turns must be at least 1, got 0"),
        ({"stop": ""}, "stop is empty"),
        ({"instructions": "{a.b}"}, "has no field {a.b}"),
        ({"environment": {"name": "nothing"}}, "nothing"),
        ({"environment": {"name": "retry"}}, "retry is not asked again once it is done"),
        ({"endpoint": {"url": "http://localhost/v1"}}, "endpoint.model: Field required"),
        (
            {"endpoint": {"url": "http://h/v1", "model": "m", "tokens_per_minute": 5}},
            "endpoint.tokens_per_minute: has no",
        ),
    ],
)
def test_arguments_without_effect_are_refused(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("{", "\\{")):
        UserSimulator(**args)


@pytest.mark.parametrize("args", [{"scenario": "task"}, {"instructions": "{scenario} {mood}"}])
def test_a_column_that_the_row_lacks_fails_the_episode(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the row has no column {'task' if 'scenario' in args else 'mood'}"):
        settled(UserSimulator(**args).start(ROW))


def test_an_inner_environment_of_several_players_is_refused() -> None:
    user = UserSimulator(environment={"name": "troupe.deploy.examples.games:KuhnPoker", "args": {}})
    settled(user.start(ROW))
    with pytest.raises(ValueError, match="the inner environment has players"):
        step(user, say("Hello!"))
