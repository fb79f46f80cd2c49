"""Turns of a frozen opponent: as many at once as episodes wait, from the worker with the fewest."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from troupe.orchestrator.cluster import links
from troupe.orchestrator.cluster.links import ActorJudges
from troupe.workers.contract.judges import JudgeAnswer, JudgeGone, Question

QUESTION = Question([{"role": "user", "content": "J"}])


class Workers:
    """Two judge workers; a name in `dead` has died."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.open = Counter[str]()
        self.answers = asyncio.Event()

    def submit(self, actor: str, method: object, questions: list[Question]) -> Awaitable[list[JudgeAnswer]]:
        """Stands for `links.submit`."""
        self.open[actor] += 1
        return self._answer(actor)

    async def _answer(self, actor: str) -> list[JudgeAnswer]:
        if actor in self.dead:
            raise RayActorError
        await self.answers.wait()
        return [JudgeAnswer(actor)]


def judges(workers: Workers, monkeypatch: pytest.MonkeyPatch, lost: str = "") -> ActorJudges:
    monkeypatch.setattr(links, "submit", workers.submit)
    return ActorJudges("model", {name: name for name in ("judge-0", "judge-1")}, lost)


async def test_every_episode_s_turn_is_open_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pool of threads has, shared by the workers."""
    workers = Workers()
    link = judges(workers, monkeypatch)
    turns = [asyncio.create_task(link.turn(QUESTION, 60.0)) for _ in range(101)]
    await asyncio.sleep(0)
    assert workers.open == {"judge-0": 51, "judge-1": 50}
    workers.answers.set()
    assert {answer.text for answer in await asyncio.gather(*turns)} == {"judge-0", "judge-1"}
    assert (await link.turn(QUESTION, 60.0)).text == "judge-0", "ended turns are not counted"


async def test_a_lost_judge_s_turn_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("judge-0")
    workers.answers.set()
    link = judges(workers, monkeypatch)
    assert [(await link.turn(QUESTION, 60.0)).text for _ in range(2)] == ["judge-1", "judge-1"]
    assert workers.open["judge-0"] == 1, "it is asked no more"


async def test_without_judges_a_turn_waits_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Workers("judge-0", "judge-1")
    with pytest.raises(JudgeGone):
        await judges(dead, monkeypatch).turn(QUESTION, 60.0)
    assert (await judges(dead, monkeypatch, "no restart is left").turn(QUESTION, 60.0)).failure == "no restart is left"


async def test_a_silent_judge_s_turn_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    answer = await judges(Workers(), monkeypatch).turn(QUESTION, 0.01)
    assert (answer.failure, len(cancelled)) == ("judge-0 did not answer in 0.01 s", 1)
