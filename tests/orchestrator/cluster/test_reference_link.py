"""Responses of the reference: from the least-loaded engine that is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from troupe.orchestrator.cluster import links
from troupe.orchestrator.cluster.links import ActorReferences
from troupe.workers.contract.messages import GroupRequest, ReferenceGone, ReferenceResponse

REQUEST = GroupRequest("e0-r1", 0, 0, 2, seed=3)
Asked = tuple[GroupRequest, list[int], Sequence[int]]


class Engines:
    """Two engines; a name in `dead` has died."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.asked: list[Asked] = []
        self.open = Counter[str]()
        self.answers = asyncio.Event()

    def submit(self, actor: str, method: object, *asked: Any) -> Awaitable[list[ReferenceResponse]]:
        """Stands for `links.submit`."""
        self.open[actor] += 1
        self.asked.append(asked)
        return self._answer(actor, asked[2])

    async def _answer(self, actor: str, indices: Sequence[int]) -> list[ReferenceResponse]:
        if actor in self.dead:
            raise RayActorError
        await self.answers.wait()
        return [ReferenceResponse(actor, (index,), "stop", 1.0, 0.5) for index in indices]


def link_to(engines: Engines, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 60.0, lost: str = "") -> Any:
    monkeypatch.setattr(links, "submit", engines.submit)
    return ActorReferences({name: name for name in ("reference_engine-0", "reference_engine-1")}, timeout_s, lost)


async def test_requests_are_shared_by_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    link = link_to(engines, monkeypatch)
    calls = [asyncio.create_task(link.complete(REQUEST, [1, 2], range(2, 4))) for _ in range(5)]
    await asyncio.sleep(0)
    assert engines.open == {"reference_engine-0": 3, "reference_engine-1": 2}
    assert engines.asked[0] == (REQUEST, [1, 2], range(2, 4))
    engines.answers.set()
    for responses in await asyncio.gather(*calls):
        assert [one.ids for one in responses] == [(2,), (3,)]


async def test_a_lost_engine_s_requests_go_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines("reference_engine-0")
    engines.answers.set()
    link = link_to(engines, monkeypatch)
    found = [(await link.complete(REQUEST, [1], [2]))[0].engine for _ in range(2)]
    assert found == ["reference_engine-1", "reference_engine-1"]
    assert engines.open["reference_engine-0"] == 1, "it is asked no more"


async def test_without_engines_the_group_waits_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Engines("reference_engine-0", "reference_engine-1")
    with pytest.raises(ReferenceGone):
        await link_to(dead, monkeypatch).complete(REQUEST, [1], [2])
    with pytest.raises(RuntimeError, match="no restart is left"):
        await link_to(dead, monkeypatch, lost="no restart is left").complete(REQUEST, [1], [2])


async def test_a_silent_engine_fails_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    with pytest.raises(TimeoutError, match=r"reference_engine-0 did not answer in 0\.01 s"):
        await link_to(Engines(), monkeypatch, timeout_s=0.01).complete(REQUEST, [1], [2])
    assert len(cancelled) == 1
