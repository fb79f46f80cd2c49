"""The environment worker: episodes, faults and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import psutil
import pytest

from tests.workers.agents.environments.started import bound, started
from troupe.workers import environment
from troupe.workers.contract.config import EnvironmentConfig
from troupe.workers.contract.environments import EnvironmentGone, Row
from troupe.workers.contract.messages import WorkerGone
from troupe.workers.environment import EnvironmentWorker

HERE = "tests.workers.agents.environments.misbehaving"
ROW = Row(({"role": "user", "content": "hello"},), "5", {"level": 2}, seed=11)
SAY: dict[str, Any] = {"role": "assistant", "content": "hi"}


def play(test: Callable[[EnvironmentWorker], Awaitable[None]], name: str = f"{HERE}:Echo", **settings: Any) -> None:
    """Run a test on a started worker, and check that no process of it is left."""
    values = {"turn_timeout_s": 60.0, "episodes": 2, "memory_limit_mib": 512} | settings
    config = EnvironmentConfig(name=name, **values)

    async def run() -> None:
        async with started(config) as worker:
            await test(worker)

    asyncio.run(run())


def test_an_episode_ends_with_its_reward() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        first = await worker.begin("a", ROW)
        assert (first.status, list(first.observation.messages)) == ("ok", [{"role": "user", "content": "hello"}])
        second = await worker.step("a", SAY)
        assert second.observation.reward == 0.25 and not second.observation.done
        await worker.step("a", SAY)
        last = await worker.step("a", SAY)
        assert last.observation.done and last.observation.reward == 1.0
        with pytest.raises(EnvironmentGone, match="no episode a"):
            await worker.step("a", SAY)

    play(test)
    play(test, f"{HERE}:AsyncEcho")


def test_a_process_serves_one_episode_after_another() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        pids = set()
        for number in range(5):
            await worker.begin(str(number), ROW)
            pids.add((await worker.step(str(number), SAY)).observation.info["pid"])
        assert len(pids) == 1

    play(test, args={"turns": 1}, episodes=1)


def test_an_episode_waits_for_a_free_place() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        await worker.begin("b", ROW)
        third = asyncio.create_task(worker.begin("c", ROW))
        await asyncio.sleep(0.2)
        assert not third.done()
        await worker.end("a")
        assert (await third).status == "ok"

    play(test)


def test_the_episodes_of_a_lost_engine_give_their_seats_back() -> None:
    """Those that wait for a process do not take one; those of another engine stay."""

    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("rollout-1/p0/0", ROW)
        await worker.begin("rollout-10/p0/0", ROW)
        waiting = asyncio.create_task(worker.begin("rollout-1/p0/1", ROW))
        await asyncio.sleep(0.1)
        assert await worker.end_all("rollout-1") == 2
        with pytest.raises(EnvironmentGone, match="closed before it began"):
            await waiting
        async with asyncio.timeout(60):
            assert (await worker.begin("rollout-1/p1/0", ROW)).status == "ok"
        assert (await worker.step("rollout-10/p0/0", SAY)).status == "ok"
        with pytest.raises(EnvironmentGone):
            await worker.step("rollout-1/p0/0", SAY)

    play(test)


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_episode_that_ends_during_a_turn_leaves_its_process_whole_or_none(cancelled: bool) -> None:
    """The reply to the turn is not taken for that to a later request, nor is a killed process used again."""

    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("rollout-1/a", ROW)
        turn = asyncio.create_task(worker.step("rollout-1/a", SAY))
        await asyncio.sleep(0)  # it has asked
        assert await worker.end_all("rollout-1") == 1
        if cancelled:
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
        else:
            assert (await turn).status == "ok"
        for number in range(3):
            assert (await worker.begin(f"rollout-2/{number}", ROW)).status == "ok"
            assert (await worker.step(f"rollout-2/{number}", SAY)).status == "ok"
            await worker.end(f"rollout-2/{number}")

    play(test, episodes=1)


def test_a_process_that_was_killed_while_it_was_free_is_not_used() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        await worker.end("a")
        while not worker._free:
            await asyncio.sleep(0.01)
        worker._free[0].kill()
        assert (await worker.begin("b", ROW)).status == "ok"

    play(test, episodes=1)


FAULTS = {
    "raises": "step: error: KeyError: 'treasure' (misbehaving.py:",
    "hangs": "step: timeout after 1 s",
    "spins": "step: timeout after 1 s",
    "exits": "step: its process died: the arena | is full",
    "leaves": "step: error: SystemExit: 3",
    "crashes": "step: its process died",
    "eats": "step: out of memory (limit 512 MiB)",
    "child": "step: timeout after 1 s",
    "nothing": "step: error: TypeError: expected an Observation, got NoneType",
    "number": "step: error: TypeError: expected an Observation, got int",
    "role": "step: error: TypeError: messages.0: expected a message with a role",
    "content": "step: error: TypeError: messages.0.content: expected text or a list of parts with a type, got int",
    "set": "step: error: TypeError: Object of type set is not JSON serializable",
    "stop": "step: error: ValueError: stop: a text is empty",
    "stops": "step: error: TypeError: stop: expected a list of texts, got [5]",
    "tools": "step: error: TypeError: tools: expected a list of JSON schemas, got str",
    "tool": "step: error: TypeError: tools.0: expected the JSON schema of a function, got str",
    "custom tool": "step: error: ValueError: tools.0.type: expected function, got 'custom'",
    "flat tool": "step: error: TypeError: tools.0.function: expected an object with a name",
    "tool without name": "step: error: TypeError: tools.0.function: expected an object with a name",
    "tool with a list": "step: error: TypeError: tools.0.function.parameters: expected a JSON schema",
    "tool with a number": "step: error: TypeError: tools.0.function.description: expected text",
    "nan": "step: error: ValueError: reward: not a finite number",
    "long": "step: error: ",
}


def test_half_a_character_keeps_its_escape() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        observation = (await worker.begin("a", ROW)).observation
        text = json.dumps(asdict(observation), ensure_ascii=False)
        text.encode()
        first, _, third = observation.messages
        assert first == {"role": r"\ud83d", "content": r"no \ud83d", "name": r"\ud83d"}
        assert third["content"] == r"\udc00 yes"
        assert observation.stop == (r"\ud83d",) and observation.info == {r"\ud83d": 1.0}
        (await worker.step("a", SAY)).status.encode()

    play(test, f"{HERE}:HalfCharacters")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_status_and_costs_nobody_else(fault: str) -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        await worker.begin("b", ROW)
        assert (await worker.step("a", SAY)).status == "ok"
        bound(worker, turn_timeout_s=1.0 if "timeout" in FAULTS[fault] else 60.0)
        failing = asyncio.create_task(worker.step("a", SAY))
        await asyncio.sleep(0)  # it has its bound
        bound(worker, turn_timeout_s=60.0)
        other, failed = await worker.step("b", SAY), await failing
        assert failed.status.startswith(FAULTS[fault]) and failed.observation.done
        assert other.status == "ok"
        assert (await worker.begin("c", ROW)).status == "ok", "the place of the failed episode is free"
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "3600.25"]]

    play(test, f"{HERE}:Faulty", args={"fault": fault})


def test_a_turn_behind_one_that_timed_out_says_that_the_process_was_killed() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        assert (await worker.step("a", SAY)).status == "ok"
        bound(worker, turn_timeout_s=1.0)
        first = asyncio.create_task(worker.step("a", SAY))
        await asyncio.sleep(0)  # it has its bound
        bound(worker, turn_timeout_s=60.0)
        second = await worker.step("a", SAY)
        assert (await first).status.startswith("step: timeout after 1 s")
        assert second.status == "step: its process was killed" and second.observation.done

    play(test, f"{HERE}:Faulty", args={"fault": "hangs"})


def test_a_failed_start_is_a_status() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        reply = await worker.begin("a", ROW)
        assert reply.status.startswith("start: error: RuntimeError: no start today")

    play(test, f"{HERE}:Faulty", args={"fault": "start"})


def test_a_close_that_hangs_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_CLOSE_TIMEOUT_S", 0.3)

    async def test(worker: EnvironmentWorker) -> None:
        for number in range(3):
            await worker.begin(str(number), ROW)
            await worker.end(str(number))
        assert (await worker.begin("last", ROW)).status == "ok"

    play(test, f"{HERE}:Faulty", args={"fault": "close"}, episodes=1)


def test_an_abandoned_episode_ends() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        await worker.begin("a", ROW)
        bound(worker, episode_timeout_s=60.0)
        assert (await worker.begin("b", ROW)).status == "ok"
        assert (await worker.health()).in_flight == 1

    play(test, episodes=1, episode_timeout_s=0.3)


def test_a_worker_whose_loading_process_died_says_so() -> None:
    async def test(worker: EnvironmentWorker) -> None:
        watching = asyncio.create_task(worker.watch(30.0))
        await worker.begin("a", ROW)
        pid = worker._processes.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await watching is False
        with pytest.raises(WorkerGone, match="the process that loaded the environment has died"):
            await worker.health()
        with pytest.raises(EnvironmentGone):
            await worker.begin("b", ROW)

    play(test)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("gues_number", {}, "did you mean 'guess_number'"),
        ("no.such.module:Game", {}, "cannot import no.such.module"),
        (f"{HERE}:FAULTS", {}, "not a class"),
        (f"{HERE}:Nobody", {}, "has no 'Nobody'"),
        ("guess_number", {"low": 5, "high": 1}, "low must not be above high"),
        ("guess_number", {"floor": 5}, "unexpected keyword argument 'floor'"),
        ("builtins:dict", {}, "has no method start, step, close"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_at_start(name: str, args: dict[str, Any], message: str) -> None:
    worker = EnvironmentWorker(EnvironmentConfig(name=name, args=args), "environment-0")
    with pytest.raises(ValueError, match=message):
        asyncio.run(worker.start())
