"""The policy and engines are lost together: an engine that starts needs weights that only a living policy can renew."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakePolicy, FaultyEngine, FaultyWorker, fakes_of
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.controller import Controller
from troupe.orchestrator.errors import UpdateDamaged, WorkerError
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.workers.contract.messages import GroupRequest, GroupSummary, WeightAck, WeightUpdate


class SharedFileRun(RolloutRun):
    """A run whose weights are in a file that goes with the policy, as that of a real one."""

    def __init__(self, out: Path, **sections: Any) -> None:
        super().__init__(out, **sections)
        self.change(failures={"trainer_restarts": 9})
        self.published: WeightUpdate | None = None
        self.policies = [_publisher(self)()]
        self.engines = [_Reader(f"rollout-{i}", self) for i in range(2)]
        self.starts = 0
        self.loaded: set[tuple[int, str]] = set()
        """(version, digest) of what engines have loaded."""
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.on_generate: Any = lambda: None

    def build(self) -> Controller:
        controller = super().build()

        async def spawn(name: str) -> Engine:
            self.starts += 1
            await self.may_start.wait()
            await asyncio.sleep(0.001)
            return Engine(FaultyWorker(name, _Reader(name, self)), "host")

        self.pool._spawn = spawn
        self.pool.budget = RestartBudget("engine", 99)
        return controller

    def kill_policy(self) -> None:
        """As kill -9: its file is removed with it."""
        for worker in fakes_of(self.policy):
            worker.kill()
        self.published = None

    def kill_engines(self) -> None:
        for engine in list(self.pool.workers):
            engine.handle.kill()


def _publisher(run: SharedFileRun) -> type[FakePolicy]:
    class Publisher(FakePolicy):
        async def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
            update = await super().publish_weights(version, base)
            if update is not None:
                digest = await self.digest()
                run.published = WeightUpdate(version, digest, update.path, update.host, (), update.nbytes)
            return run.published

    return Publisher


class _Reader(FaultyEngine):
    def __init__(self, name: str, run: SharedFileRun) -> None:
        super().__init__(name, random.Random(1))
        self._run = run

    async def generate(self, request: GroupRequest, prompts: object, finished: Any = None) -> tuple[GroupSummary, Any]:
        self._run.on_generate()
        return await super().generate(request, prompts, finished)

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        await asyncio.sleep(0.001)
        found = self._run.published
        if found is None or found.digest != update.digest:
            raise UpdateDamaged(self.name, "update_weights", "the file is not there")
        self._run.loaded.add((update.version, update.digest))
        return await super().update_weights(update)


def _once(version: int, run: SharedFileRun, what: Any) -> Any:
    """A hook of `generate` that does something in the middle of the step after this version."""
    seen = 0

    def hook() -> None:
        nonlocal seen
        if run.controller.version == version:
            seen += 1
            if seen == 3:
                what()

    return hook


def _finished(run: SharedFileRun) -> None:
    outcome = run.run()
    assert outcome.steps_done == 4
    assert (outcome.ledger["trained"], outcome.ledger["in_flight"]) == (80, 0)
    assert [line["step"] for line in run.lines()] == [1, 2, 3, 4]
    assert len({version for version, _ in run.loaded}) == len(run.loaded) == 4


def test_a_policy_that_dies_with_all_engines_is_brought_back_for_them(tmp_path: Path) -> None:
    """The engines' budget pays for the engines alone."""
    run = SharedFileRun(tmp_path)

    def kill() -> None:
        run.kill_engines()
        run.kill_policy()

    run.on_generate = _once(2, run, kill)
    _finished(run)
    assert run.controller.components.recovery.budget.total == 1
    assert run.pool.budget.total == 2 and run.starts == 2
    whole = SharedFileRun(tmp_path / "whole")
    _finished(whole)
    assert [w.target.learned for w in fakes_of(run.policy)] == [w.target.learned for w in fakes_of(whole.policy)]


def test_a_dead_policy_is_found_while_no_engine_serves(tmp_path: Path) -> None:
    """Engines start only once it is back: nothing but a probe can find it."""
    run = SharedFileRun(tmp_path)
    run.change(failures={"health_interval_s": 0.05})

    def kill() -> None:
        run.may_start.clear()
        run.kill_engines()
        asyncio.get_running_loop().call_later(0.2, run.kill_policy)

    async def restarted() -> None:
        while not run.controller.components.recovery.budget.total or run.published is None:
            await asyncio.sleep(0.01)
        run.may_start.set()

    run.on_generate = _once(2, run, lambda: (kill(), tasks.append(asyncio.ensure_future(restarted()))))
    tasks: list[asyncio.Future[None]] = []
    _finished(run)
    assert tasks and tasks[0].done()


def test_a_dead_policy_that_cannot_be_restarted_ends_the_run_at_once(tmp_path: Path) -> None:
    """The error names it, although the step waits for engines."""
    run = SharedFileRun(tmp_path)
    run.change(failures={"trainer_restarts": 0, "health_interval_s": 0.05}, schedule={"step_timeout_s": 60.0})

    def kill() -> None:
        run.may_start.clear()
        run.kill_engines()
        asyncio.get_running_loop().call_later(0.2, run.kill_policy)

    run.on_generate = _once(1, run, kill)

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await run.build().run()

    with pytest.raises(WorkerError, match=r"policy-0.health: .*\(0 of 0 restarts used: failures.trainer_restarts"):
        asyncio.run(bounded())


@pytest.mark.parametrize("with_policy", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_file_that_is_lost_between_publication_and_load_is_published_again(
    tmp_path: Path, with_policy: bool, staleness: int
) -> None:
    """The policy waits for samples meanwhile."""
    run = SharedFileRun(tmp_path, schedule={"max_staleness": staleness})
    loads = 0

    class Late(_Reader):
        async def update_weights(self, update: WeightUpdate) -> WeightAck:
            nonlocal loads
            loads += 1
            if loads == 3:  # of the second version
                if with_policy:
                    run.kill_policy()
                run.published = None
            return await super().update_weights(update)

    run.engines = [Late(f"rollout-{i}", run) for i in range(2)]
    _finished(run)
    assert run.controller.components.recovery.budget.total == with_policy
    assert run.pool.budget.total == 0


def test_an_engine_waits_for_the_next_version_where_the_policy_has_trained_on(tmp_path: Path) -> None:
    """The file is lost while the policy trains: what it would publish now is not the version that the file had."""
    run = SharedFileRun(tmp_path, schedule={"max_staleness": 1})
    policy = run.policies[0]
    update = policy.update
    killed: list[int] = []

    async def slow(*args: Any, **kwargs: Any) -> Any:
        done = await update(*args, **kwargs)
        if len(policy.updates) == 2:
            while {engine.version for engine in run.pool.workers} != {1}:
                await asyncio.sleep(0.001)  # engines load it beside this update
            run.published = None
            killed.append(run.starts)
            run.pool.workers[0].handle.kill()
            await run.pool.probe_all()
            await asyncio.sleep(0.1)
        return done

    policy.update = slow
    _finished(run)
    assert killed == [0] and run.starts == 1 and run.pool.budget.total == 1
    assert {engine.version for engine in run.pool.workers} == {4}


@pytest.mark.parametrize("seed", range(8))
def test_a_run_survives_scaling_with_kills_of_any_role_between(tmp_path: Path, seed: int) -> None:
    """Twenty seeded actions: engines join and leave, engines, the policy and the file are lost."""
    run = SharedFileRun(tmp_path, schedule={"steps": 30, "step_timeout_s": 20.0}, checkpoint={"every_steps": 5})
    run.change(
        failures={"trainer_restarts": 99, "health_interval_s": 0.05, "replay_steps": 9},
        schedule={"max_staleness": seed % 2},
    )
    rng, lost = random.Random(seed), set[int]()

    async def act() -> None:
        for number in range(20):
            await asyncio.sleep(rng.random() * 0.05)
            await _act(run, rng, number, lost)

    async def whole() -> Any:
        controller = run.build()
        acting = asyncio.create_task(act())
        async with asyncio.timeout(50):
            outcome = await controller.run()
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        return outcome

    outcome = asyncio.run(whole())
    assert outcome.steps_done == 30
    assert (outcome.ledger["trained"], outcome.ledger["in_flight"]) == (600, 0)
    assert len({version for version, _ in run.loaded}) == len(run.loaded)


async def _act(run: SharedFileRun, rng: random.Random, number: int, lost: set[int]) -> None:
    """One action. The file of a version is lost once: losing it again while it is published again ends the run."""
    pool = run.pool
    match rng.choice(("join", "retire", "engine", "engines", "policy", "file")):
        case "join":
            asyncio.get_running_loop().create_task(_quietly(pool.join(f"rollout-{number + 2}")))
        case "retire" if len(pool.serving) > 1:
            asyncio.get_running_loop().create_task(_quietly(pool.retire(pool.serving[-1].name, 0.1)))
        case "engine" if pool.serving:
            rng.choice(pool.serving).handle.kill()
        case "engines":
            run.kill_engines()
        case "policy":
            run.kill_policy()
        case "file" if run.published is not None and run.published.version not in lost:
            lost.add(run.published.version)
            run.published = None
        case _:
            pass


async def _quietly(change: Any) -> None:
    with contextlib.suppress(WorkerError, TimeoutError):
        await change
