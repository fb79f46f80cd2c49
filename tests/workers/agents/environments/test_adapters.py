"""Environments of other libraries, against the real packages where they are installed."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from troupe.workers.agents.environments.base import EnvironmentArgumentsError, load
from troupe.workers.agents.environments.openenv import OpenEnv
from troupe.workers.agents.environments.processes import EnvironmentProcesses
from troupe.workers.agents.environments.tools import MALFORMED
from troupe.workers.contract.environments import EpisodeReply, Message, Observation, Row

HERE = "tests.workers.agents.environments"
ROW = Row(({"role": "user", "content": "2+3?"},), "5", {}, seed=11)


@dataclass
class Played:
    last: EpisodeReply
    asked: list[Observation] = field(default_factory=list)

    @property
    def texts(self) -> list[list[str]]:
        return [[message["content"] for message in observation.messages] for observation in self.asked]


def play(name: str, args: dict[str, Any], turns: Sequence[str | Message], row: Row = ROW) -> Played:
    """Plays an episode with these turns in a separate process."""

    async def run() -> Played:
        processes = EnvironmentProcesses(name, args, 1024)
        await processes.start()
        try:
            process = await processes.fork()
            played = Played(await process.start(row, 20.0))
            for turn in turns:
                if played.last.observation.done:
                    break
                played.asked.append(played.last.observation)
                message = {"role": "assistant", **({"content": turn} if isinstance(turn, str) else turn)}
                played.last = await process.step(message, 10.0)
            if process.alive:
                await process.end(10.0)
            return played
        finally:
            processes.close()

    return asyncio.run(run())


def calls(*made: tuple[str, str]) -> Message:
    functions = [{"name": name, "arguments": arguments} for name, arguments in made]
    listed = [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"content": "", "tool_calls": listed}


@pytest.fixture
def openenv() -> Any:
    pytest.importorskip("openenv.core.generic_client")
    return importlib.import_module(f"{HERE}.openenv_server")


@pytest.fixture
def echo(openenv: Any) -> Iterator[str]:
    with openenv.serving(openenv.Echo, openenv.Say, openenv.Heard) as url:
        yield url


def test_turns_are_actions_of_an_openenv_server(echo: str, openenv: Any) -> None:
    played = play("openenv", {"url": echo, "action": "message", "observation": "echo"}, ["one", "three"])
    assert played.texts == [["2+3?\n\nready 11"], ["one"]]
    assert played.asked[1].reward == 3.0
    last = played.last.observation
    assert (played.last.status, last.reward, last.done) == ("ok", 5.0, True)
    assert [message["content"] for message in last.messages] == ["three"]
    deadline = time.monotonic() + 10
    while openenv.Echo.sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    assert openenv.Echo.sessions == 0, "the session is closed"


def test_a_turn_that_was_cut_is_no_action(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    client = types.SimpleNamespace(step=sent.append)
    module = types.SimpleNamespace(GenericEnvClient=lambda **_: client)
    for name in ("openenv", "openenv.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", module)
    environment = OpenEnv("http://127.0.0.1:9", action="message")
    cut = {"role": "assistant", "content": "rm -rf ./build", "finish_reason": "length"}
    observed = asyncio.run(environment.step(cut))
    assert not sent and not observed.done and "cut at its token limit" in observed.messages[0]["content"]


def test_arguments_of_the_reset_come_from_the_spec_and_the_row(echo: str) -> None:
    args = {"url": echo, "reset": {"seed": 3, "turns": 1}, "columns": ["word"]}
    played = play("openenv", args, ['```json\n{"message": "a"}\n```'], Row((), "", {"word": "hi"}, seed=11))
    assert played.texts == [['{"echo": "hi 3", "left": 1}']]
    assert (played.last.status, played.last.observation.reward) == ("ok", 1.0)
    assert "the row has no column word" in play("openenv", args, ()).last.status


def test_a_turn_that_is_no_action_can_be_tried_again(echo: str) -> None:
    turns = ["hello", "[]", '{"text": "a"}', '{"message": "a"}', '{"message": "b"}']
    played = play("openenv", {"url": echo}, turns)
    answers = [texts[0] for texts in played.texts[1:4]]
    assert answers[0].startswith("error: not JSON") and answers[1:] == [
        "error: not a JSON object, but list",
        "error: not a valid action",
    ]
    assert (played.last.status, played.last.observation.done) == ("ok", True)


def test_an_error_of_an_openenv_server_is_a_status(echo: str) -> None:
    args = {"url": echo, "action": "message"}
    assert "the echo is gone" in play("openenv", args, ["break"]).last.status
    assert "it has: echo, left" in play("openenv", {**args, "observation": "text"}, ()).last.status
    nowhere = play("openenv", {"url": "http://127.0.0.1:9"}, ()).last
    assert nowhere.status.startswith("start: error: ConnectionError: Failed to connect to ws://127.0.0.1:9/ws")


def test_tools_of_an_openenv_server_are_offered_and_called(openenv: Any) -> None:
    with openenv.serving(openenv.Adder, openenv.server.CallToolAction, openenv.server.CallToolObservation) as url:
        made = calls(("add", '{"a": 2, "b": 3}'), ("add", "{broken"), ("search", "{}"))
        played = play("openenv", {"url": url, "tools": True}, [made, "<tool_call>{", "5"])
    assert played.last.status == "ok", played.last.status
    tools = played.asked[0].tools
    assert tools is not None and tools[0]["function"]["name"] == "add"
    assert tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    results = played.asked[1].messages
    assert [message["tool_call_id"] for message in results] == ["c0", "c1", "c2"]
    assert results[0]["content"] == "5"
    assert all(message["content"].startswith("error: ") for message in results[1:])
    assert played.texts[2] == [MALFORMED]
    assert played.last.observation.done


@pytest.mark.parametrize(
    ("name", "module", "args", "message"),
    [
        ("verifiers", "verifiers", {"taskset": "gsm8k"}, "the environment verifiers needs the package verifiers"),
        ("openenv", "openenv.core.generic_client", {"url": "http://a"}, "needs the package openenv-core: pip install"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, args: dict[str, Any], message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentArgumentsError, match=message):
        load(name, args)
