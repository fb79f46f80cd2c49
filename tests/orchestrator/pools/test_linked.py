"""The pool of workers that other workers call: links, deaths, replacements and the budget, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tests.clock import on_virtual_time
from tests.fakes import FaultyWorker
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.pools.linked import Callers, LinkedPool
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.workers.contract.messages import WorkerGone, WorkerHealth
from troupe.workers.contract.roles import Watched


class Service:
    """A worker that serves until it is told that it no longer can."""

    def __init__(self) -> None:
        self.broken = asyncio.Event()
        self.in_flight = 0

    async def start(self) -> WorkerHealth:
        return await self.health()

    async def health(self) -> WorkerHealth:
        if self.broken.is_set():
            raise WorkerGone("it is broken")
        return WorkerHealth("service-0", "here", 1, 0, self.in_flight)

    async def close(self) -> None:
        pass

    async def watch(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.broken.wait(), seconds)
        except TimeoutError:
            return True
        return False


Link = tuple[tuple[str, ...], str]
"""(names of the workers, why there will be none again)."""


@dataclass
class Caller:
    """A worker that calls those of the pool."""

    links: list[Link] = field(default_factory=list)
    dead: bool = False


@dataclass
class Parts:
    """A pool and what is around it."""

    callers: list[Caller]
    services: dict[str, list[FaultyWorker[Watched]]]
    """Workers by name, in the order in which they were started."""
    fails_to_start: bool = False

    async def until(self, *links: Link) -> None:
        """Wait until the callers that live have got exactly these links, in this order."""
        wanted = list(links)
        async with asyncio.timeout(5):
            while not all(caller.links == wanted for caller in self.callers if not caller.dead):
                await asyncio.sleep(0.01)


def play(
    test: Callable[[LinkedPool[Watched, Caller, Link], Parts], Awaitable[None]], workers: int = 2, restarts: int = 2
) -> None:
    """Run a test on a started pool with two callers."""

    async def run() -> None:
        parts = Parts([Caller(), Caller()], {})

        async def connect(caller: Caller, link: Link) -> None:
            if caller.dead:
                raise WorkerDied("caller", "connect", "the process is gone")
            caller.links.append(link)

        def make_link(workers: Sequence[WorkerHandle[Watched]], lost: str) -> Link:
            return tuple(sorted(worker.name for worker in workers)), lost

        async def launch(name: str) -> FaultyWorker[Watched]:
            await asyncio.sleep(0)
            if parts.fails_to_start:
                raise WorkerDied(name, "start", "out of memory")
            worker: FaultyWorker[Watched] = FaultyWorker(name, Service())
            parts.services.setdefault(name, []).append(worker)
            return worker

        first = [await launch(f"service-{index}") for index in range(workers)]
        callers = Callers(lambda: parts.callers, connect)
        pool = LinkedPool(
            "service", first, callers, make_link, launch, RestartBudget("service", restarts), watch_s=0.05
        )
        await pool.start()
        try:
            await test(pool, parts)
        finally:
            await pool.close()

    on_virtual_time(run())


BOTH: Link = (("service-0", "service-1"), "")
ONE: Link = (("service-1",), "")


def test_all_callers_get_the_link_at_the_start_and_new_ones_when_they_come() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        assert [caller.links for caller in parts.callers] == [[BOTH], [BOTH]]
        late = Caller()
        await pool.connect(late)
        assert late.links == [BOTH]

    play(test)


def test_a_dead_worker_leaves_the_link_and_its_replacement_joins_it() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        parts.services["service-0"][0].kill()
        await parts.until(BOTH, ONE, BOTH)
        assert len(parts.services["service-0"]) == 2 and pool.budget.total == 1
        assert sorted(pool.names) == ["service-0", "service-1"]
        parts.services["service-0"][1].kill()  # the replacement is watched too
        await parts.until(BOTH, ONE, BOTH, ONE, BOTH)

    play(test)


def test_renewed_workers_are_others_of_the_same_names_and_cost_no_restart() -> None:
    """A worker that is starting meanwhile has the settings of before, and is renewed too."""

    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        parts.services["service-0"][0].kill()
        while not pool.starting:
            await asyncio.sleep(0)
        await pool.renew()
        assert sorted(pool.names) == ["service-0", "service-1"] and pool.budget.total == 1
        assert {name: len(workers) for name, workers in parts.services.items()} == {"service-0": 3, "service-1": 2}
        assert all(caller.links[-1] == BOTH for caller in parts.callers)
        parts.fails_to_start = True
        with pytest.raises(WorkerDied, match="out of memory"):
            await pool.renew()

    play(test)


def test_a_worker_that_no_longer_serves_is_replaced() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        service = parts.services["service-1"][0]
        assert isinstance(service.target, Service)
        service.target.broken.set()
        await parts.until(BOTH, (("service-0",), ""), BOTH)
        assert service.dead

    play(test)


def test_without_a_budget_the_link_says_why_there_is_none() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        parts.services["service-0"][0].kill()
        await parts.until(
            (("service-0",), ""), ((), "no service worker is left (0 of 0 restarts used: failures.service_restarts)")
        )
        assert pool.names == []

    play(test, workers=1, restarts=0)


def test_a_replacement_that_does_not_start_leaves_the_others() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        parts.fails_to_start = True
        parts.services["service-0"][0].kill()
        await parts.until(BOTH, ONE, ONE)
        assert pool.names == ["service-1"]
        parts.services["service-1"][0].kill()
        lost: Link = ((), "no service worker is left (2 of 2 restarts used: failures.service_restarts)")
        await parts.until(BOTH, ONE, ONE, ((), ""), lost)

    play(test)


def test_a_dead_caller_holds_nobody_up() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        parts.callers[0].dead = True
        parts.services["service-0"][0].kill()
        await parts.until(BOTH, ONE, BOTH)
        assert parts.callers[0].links == [BOTH]

    play(test)


def test_a_removed_worker_finishes_its_work_first() -> None:
    async def test(pool: LinkedPool[Watched, Caller, Link], parts: Parts) -> None:
        service = parts.services["service-0"][0].target
        assert isinstance(service, Service)
        service.in_flight = 1
        leaving = asyncio.create_task(pool.retire("service-0", 10))
        await parts.until(BOTH, ONE)
        assert not leaving.done()
        service.in_flight = 0
        await asyncio.wait_for(leaving, 5)
        assert pool.names == ["service-1"] and pool.budget.total == 0
        await pool.retire("service-0", 10)  # it is gone already
        await pool.join("service-0")
        await parts.until(BOTH, ONE, BOTH)

    play(test)
