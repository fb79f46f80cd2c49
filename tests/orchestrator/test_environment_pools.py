"""The pools of a run with several environments: engines get a link to each, and each loses and replaces its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.clock import on_virtual_time
from tests.conftest import ROOT
from tests.fakes import FaultyEngine, FaultyWorker
from tests.orchestrator.pools.test_linked import Service
from troupe.orchestrator.errors import WorkerDied
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.spec.load import load_rollout_spec

SPEC = load_rollout_spec(ROOT / "deploy" / "specs" / "tiny-mixture.yaml", ("failures.environment_restarts=1",))


class Environments(Service):
    """An environment worker, which keeps what it was asked to end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def end_all(self, caller: str) -> int:
        self.ended.append(caller)
        return 0


class Linked(FaultyEngine):
    """An engine that keeps its links."""

    def __init__(self, name: str) -> None:
        super().__init__(name, random.Random(1))
        self.links: dict[str, list[tuple[tuple[str, ...], str]]] = {}

    async def connect_environments(self, name: str, link: Any) -> None:
        self.links.setdefault(name, []).append(link)


class Run:
    """A run's pools on workers of this process."""

    def __init__(self) -> None:
        self.started: list[str] = []
        roles = {role: [self._worker(f"{role}-0")] for role in ("environment.guess", "environment.retry", "reward")}
        self.engine = Linked("rollout-0")
        self.engines = [Engine(FaultyWorker("rollout-0", self.engine), "host")]

        async def replica(name: str) -> FaultyWorker[Any]:
            self.started.append(name)
            return self._worker(name)

        async def engine(name: str) -> Engine:
            self.engine = Linked(name)
            return Engine(FaultyWorker(name, self.engine), "host")

        context: Any = SimpleNamespace(
            workers=SimpleNamespace(policy=None, each=lambda role: self.engines if role == "rollout" else roles[role]),
            launcher=SimpleNamespace(replica=replica, engine=engine),
            cluster=SimpleNamespace(environment_link=self._link),
        )
        self.pools = RunPools(SPEC, context)

    def environment(self, name: str) -> FaultyWorker[Environments]:
        (worker,) = self.pools.by_role[f"environment.{name}"].workers
        return worker

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    @staticmethod
    def _worker(name: str) -> FaultyWorker[Any]:
        return FaultyWorker(name, Environments())

    @staticmethod
    def _link(workers: Sequence[Any], lost: str) -> tuple[tuple[str, ...], str]:
        return tuple(worker.name for worker in workers), lost


def test_engines_are_linked_to_every_environment_by_its_name() -> None:
    async def go() -> None:
        run = Run()
        assert list(run.pools.by_role) == ["rollout", "reward", "environment.guess", "environment.retry"]
        await run.pools.start()
        expected = {name: [((f"environment.{name}-0",), "")] for name in ("guess", "retry")}
        assert run.engine.links == expected
        ended = [run.environment(name).target for name in expected]
        first = run.engine
        engines = run.pools.engines
        await engines.lose(engines.workers[0], WorkerDied("rollout-0", "generate", "the process is gone"))
        await run.until(lambda: run.engine is not first and run.engine.links == expected)
        assert [worker.ended for worker in ended] == [["rollout-0"]] * 2, "the episodes of the lost engine are closed"
        await run.pools.close()

    on_virtual_time(go())


def test_a_lost_worker_costs_its_own_environment_and_no_other() -> None:
    """It is replaced by one of the same name while its own restarts last; the other environment keeps its link."""

    async def go() -> None:
        run = Run()
        await run.pools.start()
        run.environment("retry").kill()
        await run.until(lambda: run.started == ["environment.retry-0"] and len(run.engine.links["retry"]) == 3)
        assert run.engine.links["retry"][1:] == [((), ""), (("environment.retry-0",), "")]
        assert run.engine.links["guess"] == [(("environment.guess-0",), "")]
        run.environment("retry").kill()
        await run.until(lambda: run.engine.links["retry"][-1][1])
        lost = run.engine.links["retry"][-1][1]
        assert lost == ("no environment.retry worker is left (1 of 1 restarts used: failures.environment_restarts)")
        run.environment("guess").kill()  # whose restart is not used up
        await run.until(lambda: run.started[-1] == "environment.guess-0" and run.engine.links["guess"][-1][0])
        await run.pools.close()

    on_virtual_time(go())
