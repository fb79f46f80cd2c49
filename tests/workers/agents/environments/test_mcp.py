"""Tools of real MCP servers, in the processes of episodes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.processes import descendants
from tests.workers.agents.environments.started import bound, started
from troupe.workers.agents.environments.base import EnvironmentArgumentsError, load
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Row
from troupe.workers.environment import EnvironmentWorker

SERVER = [sys.executable, "-m", "tests.workers.agents.environments.mcp_server"]
ROW = Row(({"role": "user", "content": "Say it."},), "HI HI")


def call(*calls: tuple[str, dict[str, Any]]) -> Message:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def results(reply: EpisodeReply) -> list[str]:
    assert reply.status == "ok", reply.status
    return [message["content"] for message in reply.observation.messages]


def play(test: Callable[[EnvironmentWorker], Awaitable[None]], env: tuple[str, ...] = (), **args: Any) -> None:
    """Run a test on a worker with the server's tools, and check that no process is left."""
    values = {"servers": [{"command": SERVER}]} | args
    config = EnvironmentConfig(
        name="tools", args=values, env=env, turn_timeout_s=60.0, episodes=1, memory_limit_mib=2048
    )

    async def run() -> None:
        async with started(config) as worker:
            await test(worker)

    asyncio.run(run())


def servers() -> list[psutil.Process]:
    """The servers that run."""
    return descendants(title=SERVER[-1])


def test_a_servers_tools_are_offered_and_called() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        first = await worker.begin("a", ROW)
        assert first.status == "ok", first.status
        schemas: Any = first.observation.tools
        offered = {tool["function"]["name"]: tool["function"] for tool in schemas}
        assert set(offered) == {"calculator", "shout", "remember", "variable", "fail", "leave", "hang"}
        assert offered["shout"]["parameters"]["properties"]["times"]["type"] == "integer"
        assert offered["shout"]["parameters"]["required"] == ["text"]
        assert offered["shout"]["description"].startswith("Say it loudly.")
        answered = await worker.step(
            "a", call(("shout", {"text": "hi", "times": 2}), ("calculator", {"expression": "6*7"}))
        )
        assert results(answered) == ["HI HI", "42"]
        wrong = await worker.step(
            "a",
            call(
                ("shout", {}), ("fail", {"why": "no reason"}), ("whisper", {"text": "hi"}), ("remember", {"word": "a"})
            ),
        )
        missing, failed, unknown, fine = results(wrong)
        assert missing.startswith("error: ") and "text" in missing
        assert failed.startswith("error: ") and "no reason" in failed
        assert unknown.startswith("error: there is no tool 'whisper'; there are: calculator, ")
        assert fine == "a"
        last = await worker.step("a", {"role": "assistant", "content": "HI HI"})
        assert last.observation.done and last.observation.reward == 1.0
        assert last.observation.info == {"tool_calls": 6.0, "failed_tool_calls": 3.0}

    play(test, tools=["calculator"], function="exact_match")


@pytest.mark.long
def test_every_episode_has_a_server_of_its_own() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        for episode in ("a", "b"):
            await worker.begin(episode, ROW)
            assert results(await worker.step(episode, call(("remember", {"word": episode})))) == [episode]
            last = await worker.step(episode, {"role": "assistant", "content": "done"})
            assert last.status == "ok" and last.observation.done
        await worker.begin("c", ROW)  # the process is free: the episode before has been closed
        assert len(servers()) == 1

    play(test)


@pytest.mark.long
def test_a_server_that_is_reused_serves_the_next_episode() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        for episode, said in (("a", "a"), ("b", "a\nb")):
            await worker.begin(episode, ROW)
            assert results(await worker.step(episode, call(("remember", {"word": episode})))) == [said]
            await worker.step(episode, {"role": "assistant", "content": "done"})
        await worker.begin("c", ROW)
        (server,) = servers()
        server.kill()
        server.wait(5)
        lost = await worker.step("c", call(("remember", {"word": "c"})))
        assert "the MCP server" in lost.status and "has ended" in lost.status
        again = await worker.begin("d", ROW)
        assert again.status == "ok"
        assert results(await worker.step("d", call(("remember", {"word": "d"})))) == ["d"]

    play(test, servers=[{"command": SERVER, "tools": ["remember"], "reuse": True}])


def test_only_named_tools_and_variables_reach_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "open")
    monkeypatch.setenv("OTHER_KEY", "secret")

    async def test(worker: EnvironmentWorker) -> None:
        first = await worker.begin("a", ROW)
        schemas: Any = first.observation.tools
        assert [tool["function"]["name"] for tool in schemas] == ["variable"]
        asked = call(("variable", {"name": "SERVER_KEY"}), ("variable", {"name": "OTHER_KEY"}))
        assert results(await worker.step("a", asked)) == ["open", "(not set)"]

    server = {"command": SERVER, "tools": ["variable"], "environment_variables": ["SERVER_KEY"]}
    play(test, env=("SERVER_KEY",), servers=[server])


def test_a_secret_that_a_server_would_not_get_is_named() -> None:
    server = {"command": SERVER, "environment_variables": ["SERVER_KEY"]}
    with pytest.raises(EnvironmentArgumentsError, match="SERVER_KEY is not set, or the environment may not read it"):
        load("tools", {"servers": [server]})


@pytest.mark.long
@pytest.mark.parametrize(
    ("tool", "status"),
    [("leave", "has ended: the disk is full"), ("hang", "step: timeout after 2 s")],
    ids=["leaves", "hangs"],
)
def test_a_server_that_is_lost_fails_its_episode_alone(tool: str, status: str) -> None:
    config = EnvironmentConfig(
        name="tools", args={"servers": [{"command": SERVER}]}, turn_timeout_s=60.0, episodes=1, memory_limit_mib=2048
    )

    async def run() -> None:
        async with started(config) as worker:
            assert (await worker.begin("a", ROW)).status == "ok"
            bound(worker, turn_timeout_s=2.0 if tool == "hang" else 60.0)
            lost = await worker.step("a", call((tool, {})))
            bound(worker, turn_timeout_s=60.0)
            assert lost.observation.done and status in lost.status, lost.status
            assert (await worker.begin("b", ROW)).status == "ok"
            assert results(await worker.step("b", call(("remember", {"word": "b"})))) == ["b"]

    asyncio.run(run())


@pytest.mark.long
def test_a_server_is_called_in_the_background_and_its_end_fails_the_turn_that_waits() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        begun = await worker.step("a", call(("shout", {"text": "hi"})))
        assert results(begun) == ["call 1 of shout has started. Its answer comes in a later message."]
        waits = {"role": "assistant", "content": "I wait."}
        assert results(await worker.step("a", waits)) == ["[call 1 of shout is done]\nHI"]
        assert results(await worker.step("a", call(("leave", {})))) == [
            "call 2 of leave has started. Its answer comes in a later message."
        ]
        lost = await worker.step("a", waits)
        assert lost.observation.done and "has ended: the disk is full" in lost.status, lost.status

    play(test, background={"shout": 50, "leave": 50})


@pytest.mark.long
@pytest.mark.parametrize(
    ("servers", "status"),
    [
        ([{"command": [*SERVER, "--broken"]}], ": this server does not start"),
        ([{"command": ["true"]}], "the MCP server true does not answer"),
        ([{"url": "http://127.0.0.1:9/mcp"}], "the MCP server http://127.0.0.1:9/mcp does not answer: "),
        ([{"command": SERVER, "tools": ["whisper"]}], "has no tool whisper; it has: shout, remember"),
        ([{"command": SERVER, "tools": ["shout"]}, {"command": SERVER}], "two tools have the name shout"),
        ([{"command": SERVER, "tools": ["shout"]}], "background: no tool 'whisper'; there are: shout"),
    ],
    ids=["broken", "no server", "nobody listens", "no tool", "twice", "no tool in the background"],
)
def test_a_server_that_cannot_be_used_is_a_status(servers: list[dict[str, Any]], status: str) -> None:
    async def test(worker: EnvironmentWorker) -> None:
        reply = await worker.begin("a", ROW)
        assert reply.observation.done and status in reply.status, reply.status

    play(test, servers=servers, background={"whisper": 5} if "background" in status else None)


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([{"command": []}], "servers: command: List should have at least 1 item"),
        ([{"command": ["no-such-program"]}], "servers: command: no program no-such-program is on the PATH"),
        ([{"comand": ["true"]}], "servers: comand: Extra inputs are not permitted"),
        ([{}], "servers: set command or url"),
        ([{"command": ["true"], "url": "http://127.0.0.1:1/mcp"}], "servers: set command or url"),
        ([{"url": "http://me:secret@127.0.0.1:1/mcp"}], "servers: url: holds credentials, and a spec holds none"),
        ([{"url": "http://127.0.0.1:1/mcp", "key_variable": "NO_KEY"}], "servers: key_variable: NO_KEY is not set"),
        ([], "no tools are given: set tools or servers"),
    ],
)
def test_wrong_settings_are_refused_at_start(servers: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(EnvironmentArgumentsError, match=message):
        load("tools", {"servers": servers})


@pytest.fixture
def remote() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server behind a URL, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*SERVER, "--http", str(port)])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def test_a_server_behind_a_url_is_called_by_several_episodes(remote: tuple[str, subprocess.Popen[bytes]]) -> None:
    async def test(worker: EnvironmentWorker) -> None:
        first = await worker.begin("a", ROW)
        assert [tool["function"]["name"] for tool in first.observation.tools or ()] == ["shout", "remember", "fail"]
        assert results(await worker.step("a", call(("shout", {"text": "hi"})))) == ["HI"]
        assert results(await worker.step("a", call(("fail", {"why": "no"})))) == [
            "error: Error executing tool fail: no"
        ]
        assert results(await worker.step("a", call(("shout", {"text": "\ud83d"})))) == [r"\UD83D"]
        await worker.end("a")
        assert (await worker.begin("b", ROW)).status == "ok"
        assert results(await worker.step("b", call(("remember", {"word": "b"})))) == ["b"]

    play(test, servers=[{"url": remote[0], "tools": ["remember", "fail", "shout"]}])


def test_a_server_behind_a_url_that_ends_fails_the_episode(remote: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = remote

    async def test(worker: EnvironmentWorker) -> None:
        assert (await worker.begin("a", ROW)).status == "ok"
        process.kill()
        process.wait()
        lost = await worker.step("a", call(("shout", {"text": "hi"})))
        assert lost.observation.done and url in lost.status, lost

    play(test, servers=[{"url": url, "tools": ["shout"]}])
