"""An engine that stays slow is named, and no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes import FakeEngine, FakeTable, LocalWorker
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.rollouts.scoring import ScoredGroup
from troupe.orchestrator.rollouts.slow_engines import SlowEngines, seconds_per_token, slowest
from troupe.orchestrator.telemetry.event_log import EVENTS, EventLog
from troupe.workers.contract.messages import GroupSummary, RewardSummary, SampleSummary

TABLE = FakeTable("rollouts", ())
SCORED = RewardSummary("e0-r0", 0, ("ok",), (1.0,), {})


def summary(engine: str, seconds: float, *tokens: int) -> GroupSummary:
    """A group whose responses have these lengths."""
    samples = tuple(SampleSummary(i, 9, count, "stop", 0, 0) for i, count in enumerate(tokens))
    return GroupSummary("e0-r0", 0, engine, samples, seconds)


def test_a_token_takes_the_time_of_the_groups_over_their_longest_responses() -> None:
    found = seconds_per_token([summary("a", 2.0, 10, 4), summary("a", 1.0, 5), summary("b", 9.0, 3), summary("c", 1.0)])
    assert found == {"a": pytest.approx(0.2), "b": pytest.approx(3.0)}  # c sampled nothing


@pytest.mark.parametrize(
    ("paces", "found"),
    [
        ({}, None),
        ({"a": 1.0}, None),
        ({"a": 1.0, "b": 3.0}, ("b", 3.0)),
        ({"a": 1.0, "b": 6.0, "c": 2.0, "d": 3.0}, ("b", 3.0)),
        ({"a": 0.0, "b": 1.0}, None),
    ],
)
def test_the_slowest_is_compared_with_the_others(paces: Mapping[str, float], found: tuple[str, float] | None) -> None:
    assert slowest(paces) == found


async def steps(folder: Path, factors: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, float]], list[Any]]:
    """Metrics and events of steps in which the engines take so many seconds for a token."""
    groups: list[ScoredGroup] = []
    events = EventLog()
    events.open(folder, 0)
    engines = [Engine(LocalWorker(name, FakeEngine(name)), f"node-of-{name}") for name in "abc"]
    part = SlowEngines(lambda: groups, engines, events)
    metrics = []
    for number, paces in enumerate(factors, 1):
        events.step = number
        groups[:] = [
            ScoredGroup(summary(name, 10 * pace, 10), SCORED, TABLE, TABLE, ()) for name, pace in paces.items()
        ]
        metrics.append(await part.after_step(cast("Any", None), {}))
    events.close()
    return metrics, [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


async def test_an_engine_that_is_slow_in_three_steps_is_named_with_its_node(tmp_path: Path) -> None:
    metrics, events = await steps(tmp_path, [{"a": 1.0, "b": 3.0, "c": 1.0}] * 5)
    assert metrics == [{"rollout/slowest_engine": pytest.approx(3.0)}] * 5
    assert [(event["event"], event["worker"], event["step"]) for event in events] == [("slow_engine", "b", 3)]
    assert events[0]["detail"].startswith("takes 3.0 times") and events[0]["detail"].endswith("on node-of-b")


@pytest.mark.parametrize(
    "factors",
    [
        [{"a": 1.0, "b": 1.9, "c": 1.0}] * 6,
        [{"a": 1.0, "b": 3.0, "c": 1.0}, {"a": 3.0, "b": 1.0, "c": 1.0}] * 3,
        [{"a": 1.0, "b": 3.0, "c": 1.0}, {"a": 1.0, "b": 3.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}] * 2,
        [{"a": 3.0}] * 6,
    ],
    ids=["not much slower", "another one each time", "not in a row", "the only one"],
)
async def test_others_are_not_named(tmp_path: Path, factors: Sequence[Mapping[str, float]]) -> None:
    _, events = await steps(tmp_path, factors)
    assert not events
