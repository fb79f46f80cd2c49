"""Tools whose calls are answered in a later turn."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.agents.environments.started import started
from troupe.workers.agents.environments.background import BackgroundCalls
from troupe.workers.agents.environments.base import EnvironmentArgumentsError, load
from troupe.workers.agents.environments.functions import ToolCallError
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import EpisodeReply, Message, Row
from troupe.workers.environment import EnvironmentWorker

ROW = Row(({"role": "user", "content": "Do it."},))
LATER, IN_A_THREAD = (f"{__name__}:{name}" for name in ("later", "in_a_thread"))


async def later(gate: str) -> str:
    """Answer once there is a file."""
    try:
        while not Path(gate).exists():
            await asyncio.sleep(0.01)
        Path(f"{gate}.seen").touch()
        return f"{gate[-1]} is open"
    finally:
        Path(f"{gate}.over").touch()


def in_a_thread(gate: str) -> str:
    """Answer once there is a file."""
    while not Path(gate).exists():
        time.sleep(0.01)
    Path(f"{gate}.seen").touch()
    return f"{os.getpid()}"


def turn(*calls: tuple[str, dict[str, Any]], text: str = "") -> Message:
    made = [
        {"id": f"c{n}", "function": {"name": name, "arguments": json.dumps(given)}}
        for n, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def play(test: Callable[[EnvironmentWorker], Awaitable[None]], **args: Any) -> None:
    """Run a test on a worker with tools, and check that no process is left."""
    config = EnvironmentConfig(name="tools", args=args, turn_timeout_s=60.0, episodes=1)

    async def run() -> None:
        async with asyncio.timeout(120), started(config) as worker:
            await test(worker)

    asyncio.run(run())


async def until(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


def texts(reply: EpisodeReply) -> list[str]:
    assert reply.status == "ok" and not reply.observation.done, reply
    return [message["content"] for message in reply.observation.messages]


@pytest.mark.parametrize("tool", [LATER, IN_A_THREAD])
def test_a_call_goes_on_while_the_policy_samples_and_is_answered_with_the_next_result(
    tool: str, tmp_path: Path
) -> None:
    name, gate = tool.rpartition(":")[2], tmp_path / "a"

    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        first = await worker.step("a", turn((name, {"gate": str(gate)}), ("calculator", {"expression": "1+1"})))
        assert texts(first) == [f"call 1 of {name} has started. Its answer comes in a later message.", "2"]
        assert first.observation.info["open_tool_calls"] == 1.0
        gate.touch()
        await until(tmp_path / "a.seen")  # no request is under way
        again = turn(("calculator", {"expression": "6*7"}))
        while (second := await worker.step("a", again)).observation.info["open_tool_calls"]:
            assert texts(second) == ["42"]
        (text,) = texts(second)
        assert text.startswith(f"42\n\n[call 1 of {name} is done]\n")
        assert [message["role"] for message in second.observation.messages] == ["tool"]
        last = await worker.step("a", turn(text="done"))
        assert last.observation.done and last.observation.info["open_tool_calls"] == 0.0

    play(test, tools=["calculator", tool], background={name: 50})


def test_a_turn_without_a_call_waits_for_the_next_answer(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"

    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        begun = await worker.step(
            "a", turn(("later", {"gate": str(one)}), ("later", {"gate": str(two)}), ("later", {}))
        )
        *started, wrong = texts(begun)
        assert [text.partition(" has")[0] for text in started] == ["call 1 of later", "call 2 of later"]
        assert wrong.startswith("call 3 of later has started")
        waiting = asyncio.create_task(worker.step("a", turn(text="I wait.")))
        (answer,) = texts(await waiting)
        assert answer.startswith("[call 3 of later is done]\nerror: gate: ")
        waiting = asyncio.create_task(worker.step("a", turn(text="I wait.")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        two.touch()
        reply = await waiting
        assert texts(reply) == ["[call 2 of later is done]\n2 is open"]
        assert [message["role"] for message in reply.observation.messages] == ["user"]
        assert reply.observation.info == {"tool_calls": 3.0, "failed_tool_calls": 1.0, "open_tool_calls": 1.0}
        one.touch()
        assert texts(await worker.step("a", turn(text="I wait."))) == ["[call 1 of later is done]\n1 is open"]
        assert (await worker.step("a", turn(text="done"))).observation.done

    play(test, tools=[LATER], background={"later": 50})


@pytest.mark.parametrize("tool", [LATER, IN_A_THREAD])
def test_an_episode_that_ends_before_its_calls_ends_them(tool: str, tmp_path: Path) -> None:
    name = tool.rpartition(":")[2]

    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        await worker.step("a", turn((name, {"gate": str(tmp_path / "a")})))
        process = psutil.Process(worker._taken["a"].pid)
        await worker.end("a")
        assert (await worker.begin("b", ROW)).status == "ok"
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        assert (tmp_path / "a.over").exists() == (tool == LATER), "a coroutine may clean up"

    play(test, tools=[tool], background={name: 50})


def test_a_call_that_takes_too_long_is_an_error_and_its_thread_ends_with_the_episode(tmp_path: Path) -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        pid = worker._taken["a"].pid
        await worker.step("a", turn(("in_a_thread", {"gate": str(tmp_path / "a")})))
        late = await worker.step("a", turn(text="I wait."))
        assert texts(late) == ["[call 1 of in_a_thread is done]\nerror: not done after 0.1 s"]
        assert late.observation.info["failed_tool_calls"] == 1.0
        assert (await worker.step("a", turn(text="done"))).observation.done
        assert (await worker.begin("b", ROW)).status == "ok"
        assert worker._taken["b"].pid != pid

    play(test, tools=[IN_A_THREAD], background={"in_a_thread": 0.1})


def test_more_calls_than_slots_wait_and_their_time_begins_with_the_slot() -> None:
    async def test() -> None:
        calls, gates = BackgroundCalls(1), [asyncio.Event(), asyncio.Event()]
        begun = list[int]()

        async def call(number: int) -> str:
            begun.append(number)
            await gates[number].wait()
            return str(number)

        for number in range(2):
            calls.begin("f", call(number), 60.0)
        await asyncio.sleep(0)
        assert begun == [0]
        gates[0].set()
        await calls.wait()
        assert calls.answers() == (["[call 1 of f is done]\n0"], 0) and len(calls) == 1
        gates[1].set()
        await calls.wait()
        assert (begun, calls.answers()) == ([0, 1], (["[call 2 of f is done]\n1"], 0))
        await calls.close()

    asyncio.run(test())


def test_errors_of_calls_are_answers_and_failures_are_raised() -> None:
    async def fails(error: Exception) -> str:
        raise error

    async def test() -> None:
        calls = BackgroundCalls(2)
        calls.begin("f", fails(ToolCallError("no such file")), 60.0)
        await calls.wait()
        assert calls.answers() == (["[call 1 of f is done]\nerror: no such file"], 1)
        calls.begin("f", fails(RuntimeError("the server has ended")), 60.0)
        await calls.wait()
        with pytest.raises(RuntimeError, match="the server has ended"):
            calls.answers()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("background", "message"),
    [
        ({"lateer": 5}, "background: no tool 'lateer'; there are: later"),
        (["later"], "background: expected names of tools and the seconds that a call may take, such as"),
        ({"later": 0}, "background: expected names of tools"),
        ({"later": True}, "background: expected names of tools"),
        ({"later": "5"}, "background: expected names of tools"),
    ],
)
def test_wrong_settings_are_refused(background: Any, message: str) -> None:
    with pytest.raises(EnvironmentArgumentsError, match=message):
        load("tools", {"tools": [LATER], "background": background})
