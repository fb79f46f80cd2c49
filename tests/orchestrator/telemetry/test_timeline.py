"""The log of calls to workers: what is open, what has ended, and how."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from tests.clock import on_virtual_time
from troupe.orchestrator.cluster.ray_cluster import ActorWorker
from troupe.orchestrator.errors import WorkerTimeout
from troupe.orchestrator.telemetry.metrics import PeakMemory
from troupe.orchestrator.telemetry.timeline import CallLog, OpenCall, Span
from troupe.workers.contract.messages import GroupRequest, RewardSummary, ScoredGroups
from troupe.workers.contract.roles import Reward, RolloutEngine


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_call_is_open_until_it_ends_and_then_a_span() -> None:
    clock = Clock()
    log = CallLog(clock)
    clock.now = 10.0
    first = log.begin("rollout-0", "generate", 60.0, "p7")
    second = log.begin("policy-0", "update", 30.0)
    assert log.open_calls() == [
        OpenCall("rollout-0", "generate", 10.0, 60.0, "p7"),
        OpenCall("policy-0", "update", 10.0, 30.0, ""),
    ]
    clock.now = 14.0
    log.end(second)
    assert [call.worker for call in log.open_calls()] == ["rollout-0"]
    log.end(first, "WorkerDied")
    assert log.open_calls() == []
    assert log.drain() == [
        Span("policy-0", "update", 10.0, 14.0, "ok", ""),
        Span("rollout-0", "generate", 10.0, 14.0, "WorkerDied", "p7"),
    ]
    assert log.drain() == []


def test_open_calls_may_be_read_from_another_thread() -> None:
    log, ended = CallLog(), threading.Event()
    for _ in range(2000):
        log.begin("rollout-0", "generate", 60.0)

    def call() -> None:
        while not ended.is_set():
            log.end(log.begin("reward-0", "score", 1.0))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    calling = threading.Thread(target=call)
    calling.start()
    try:
        for _ in range(100):
            assert len(log.open_calls()) in (2000, 2001)
    finally:
        ended.set()
        calling.join()
        sys.setswitchinterval(interval)


def test_what_the_result_says_about_a_call_replaces_what_was_known_before() -> None:
    log = CallLog(Clock())
    log.end(log.begin("reward-0", "score", 1.0), detail="p3")
    log.end(log.begin("rollout-0", "generate", 1.0, "p4"))
    assert [span.detail for span in log.drain()] == ["p3", "p4"]


def test_only_failed_probes_are_kept() -> None:
    log = CallLog(Clock())
    log.end(log.begin("rollout-0", "health", 1.0))
    log.end(log.begin("rollout-1", "health", 1.0), "WorkerTimeout")
    assert [(span.worker, span.status) for span in log.drain()] == [("rollout-1", "WorkerTimeout")]


def test_a_recorded_block_that_raises_has_the_class_of_its_error() -> None:
    log = CallLog(Clock())
    with pytest.raises(KeyError), log.during("driver-0", "prepare", 0.0):
        assert [call.method for call in log.open_calls()] == ["prepare"]
        raise KeyError
    assert [span.status for span in log.drain()] == ["KeyError"]


class _Method:
    """A method of a Ray actor, as far as `ActorWorker` uses it: an awaitable instead of a reference."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: object) -> Any:
        return self._answer()


class _Actor:
    def __init__(self, **answers: Any) -> None:
        for name, answer in answers.items():
            setattr(self, name, _Method(answer))


async def called(log: CallLog) -> None:
    """Wait until a call has begun, and no longer."""
    while not log.open_calls():
        await asyncio.sleep(0)


def test_a_worker_reports_every_call_with_its_subject_and_how_it_ended() -> None:
    async def never() -> None:
        await asyncio.sleep(60)

    async def scored() -> ScoredGroups:
        return ScoredGroups(tuple(RewardSummary(uid, 0, ("ok",), (1.0,), {}) for uid in ("p1", "p2")))

    async def run() -> list[Span]:
        log = CallLog()
        engine: ActorWorker[RolloutEngine] = ActorWorker("rollout-0", _Actor(generate=never), PeakMemory(), log)
        reward: ActorWorker[Reward] = ActorWorker("reward-1", _Actor(score_groups=scored), PeakMemory(), log)
        request = GroupRequest("p1", 0, 0, 1, 0)
        generating = asyncio.ensure_future(engine.call(RolloutEngine.generate, 0.05, request, None))
        await called(log)
        (open_,) = log.open_calls()
        assert open_[:2] == ("rollout-0", "generate") and open_.timeout_s == 0.05 and open_.detail == "p1"
        with pytest.raises(WorkerTimeout):
            await generating
        await reward.call(Reward.score_groups, 1.0, [])
        cancelled = asyncio.ensure_future(engine.call(RolloutEngine.generate, 9.0, request, None))
        await called(log)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert log.open_calls() == []
        return log.drain()

    spans = on_virtual_time(run())
    assert [(span.worker, span.method, span.status, span.detail) for span in spans] == [
        ("rollout-0", "generate", "WorkerTimeout", "p1"),
        ("reward-1", "score_groups", "ok", "p1 p2"),
        ("rollout-0", "generate", "CancelledError", "p1"),
    ]
    assert all(span.start <= span.end for span in spans)
