"""Weights that engines load beside the next update: what waits for them, and what becomes of a load that fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clock import on_virtual_time
from tests.fakes import FakePolicy, FakeTable, FaultyEngine
from tests.orchestrator.test_best_checkpoint import DATA, Values
from tests.orchestrator.test_controller import RolloutRun
from tests.orchestrator.training.test_recovery import RecoveringRun
from troupe.orchestrator.controller import RunOutcome
from troupe.orchestrator.errors import UpdateDamaged, WeightsNotVerified, WorkerRaised
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.messages import RankPlan, UpdateMetrics, WeightAck, WeightUpdate

STALE = {"max_staleness": 1}


class Order:
    """What the workers of a run do, in order: (what, step or version)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._changed = asyncio.Condition()

    async def note(self, what: str, number: int) -> None:
        self.events.append((what, number))
        async with self._changed:
            self._changed.notify_all()

    async def has(self, what: str, number: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: (what, number) in self.events)

    def before(self, first: tuple[str, int], second: tuple[str, int]) -> bool:
        return self.events.index(first) < self.events.index(second)


class Policy(FakePolicy):
    """Notes the beginning of its updates, one a step, and its publications."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self.hangs_at = 0

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        await self.order.note("update", step := len(self.updates) + 1)
        if step == self.hangs_at:
            await asyncio.Event().wait()
        return await super().update(plan, batch, kl_old_coef, texts)

    async def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
        await self.order.note("publish", version)
        return await super().publish_weights(version, base)


class Engine(FaultyEngine):
    """Loads a version only after the next update has begun, if it is told to."""

    def __init__(self, number: int, order: Order) -> None:
        super().__init__(f"rollout-{number}", random.Random(number))
        self.order = order
        self.patient: tuple[int, ...] = ()
        """Versions that it loads so."""
        self.fails: Mapping[int, Exception] = {}
        """What it raises in place of loading a version."""
        self.lies_at = 0

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        await asyncio.sleep(0.001)
        if update.version in self.patient:
            await self.order.has("update", update.version + 1)
        if (error := self.fails.get(update.version)) is not None:
            raise error
        self.lie_about_digest = update.version == self.lies_at
        ack = await super().update_weights(update)
        await self.order.note("loaded", update.version)
        return ack


def run_of(out: Path, patient: tuple[int, ...] = (), **sections: Any) -> tuple[RolloutRun, Order]:
    """A run of four steps, whose engines load the patient versions only after the next update has begun."""
    run, order = RolloutRun(out, **sections), Order()
    run.policies, run.sync_timeout_s = [Policy(order)], 60.0
    engines = [Engine(number, order) for number in range(2)]
    for engine in engines:
        engine.patient = patient
    run.engines = list(engines)
    return run, order


def engine_of(run: RolloutRun) -> Engine:
    """The second engine."""
    engine = run.engines[1]
    assert isinstance(engine, Engine)
    return engine


def loaded(out: Path) -> list[int]:
    """Versions that were reported as loaded everywhere."""
    return [event["version"] for event in RunFolder(out).events("weights")]


def damage(version: int) -> UpdateDamaged:
    """The error of an engine that did not receive what was published."""
    return UpdateDamaged("rollout-1", "update_weights", f"version {version} has another digest")


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_next_update_begins_while_engines_load(tmp_path: Path, staleness: int) -> None:
    """A version is published once the engines have loaded the one before; the last one is waited for."""
    run, order = run_of(tmp_path, patient=(1, 2, 3), schedule={"max_staleness": staleness})
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    for version in (1, 2, 3):
        assert order.before(("update", version + 1), ("loaded", version))
        assert order.before(("loaded", version), ("publish", version + 1))
    assert loaded(tmp_path) == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in run.lines()) <= staleness


@pytest.mark.parametrize("sections", [{}, {"schedule": STALE, "evaluation": {"every_steps": 1}, "data": DATA}])
def test_a_step_without_staleness_and_an_evaluation_wait_for_the_engines(
    tmp_path: Path, sections: Mapping[str, Any]
) -> None:
    run, order = run_of(tmp_path, **sections)
    run.evaluator = Values(0.1, 0.2, 0.3, 0.4, 0.5)
    run.run()
    last = {step: max(i for i, event in enumerate(order.events) if event == ("loaded", step)) for step in (1, 2, 3)}
    assert all(last[step] < order.events.index(("update", step + 1)) for step in last)


def test_a_load_that_is_not_verified_ends_the_run_during_the_next_update(tmp_path: Path) -> None:
    """Even where that update hangs."""
    run, order = run_of(tmp_path, patient=(2,), schedule=STALE)
    engine_of(run).lies_at, run.policies[0].hangs_at = 2, 3  # type: ignore[attr-defined]
    with pytest.raises(WeightsNotVerified, match="rollout-1 acknowledged version 2 digest other"):
        run.run()
    assert ("update", 3) in order.events and loaded(tmp_path) == [1]


def test_an_error_of_a_load_names_the_worker_and_the_step_whose_weights_these_are(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, patient=(2,), schedule=STALE)
    engine_of(run).fails = {2: WorkerRaised("rollout-1", "update_weights", "out of memory")}
    with pytest.raises(WorkerRaised, match=r"^rollout-1.update_weights: out of memory \[step 2, sync\]$"):
        run.run()


def test_weights_damaged_beside_an_update_are_replaced_by_the_next_version(tmp_path: Path) -> None:
    """The policy no longer has what it published. No group starts at a version that it would be too old with."""
    run, order = run_of(tmp_path, patient=(1, 2), schedule=STALE)
    engine_of(run).fails = {2: damage(2)}
    outcome = run.run()
    assert outcome.ledger["trained"] == 80
    assert loaded(tmp_path) == [1, 3, 4]
    assert [event for event in order.events if event[0] == "publish"] == [("publish", step) for step in (1, 2, 3, 4)]
    assert max(line["staleness/max"] for line in run.lines()) <= 1


@pytest.mark.parametrize(
    ("staleness", "patient", "published"),
    [(1, (2,), [1, 2, 3, 3, 4]), (2, (2, 3), [1, 2, 3, 4])],  # the policy waits for version 3, or has samples left
)
def test_weights_of_two_versions_in_a_row_may_be_lost(
    tmp_path: Path, staleness: int, patient: tuple[int, ...], published: list[int]
) -> None:
    """A policy that waits for samples publishes again what the engines need for them."""
    run, order = run_of(tmp_path, patient=patient, schedule={"max_staleness": staleness}, checkpoint={"every_steps": 0})

    class Forgetful(Engine):
        async def update_weights(self, update: WeightUpdate) -> WeightAck:
            try:
                return await super().update_weights(update)
            finally:
                self.fails = {version: error for version, error in self.fails.items() if version != update.version}

    run.engines[1] = Forgetful(1, order)
    engine_of(run).fails, engine_of(run).patient = {2: damage(2), 3: damage(3)}, patient

    async def whole() -> RunOutcome:
        return await (await run.start()).run()

    assert on_virtual_time(whole()).ledger["trained"] == 80
    assert [version for what, version in order.events if what == "publish"] == published
    assert loaded(tmp_path) == [1, *published[3:]]
    assert max(line["staleness/max"] for line in run.lines()) <= staleness


def test_weights_that_do_not_arrive_the_second_time_either_end_the_run(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, schedule=STALE)
    engine_of(run).fails = {2: damage(2)}
    with pytest.raises(UpdateDamaged, match=r"rollout-1.update_weights: version 2 .* \[step 2, sync\]"):
        run.run()


def test_an_engine_that_dies_while_it_loads_is_replaced(tmp_path: Path) -> None:
    run, order = run_of(tmp_path, patient=(2,), schedule=STALE)

    class Dying(Engine):
        async def update_weights(self, update: WeightUpdate) -> WeightAck:
            if update.version == 2:
                await self.order.has("update", 3)
                run.pool.workers[1].kill()
            return await super().update_weights(update)

    run.engines = [run.engines[0], Dying(1, order)]
    outcome = run.run()
    assert (outcome.ledger["trained"], outcome.ledger["dropped"]) == (80, 0)
    assert loaded(tmp_path) == [1, 2, 3, 4] and run.pool.budget.total == 1
    assert {engine.version for engine in run.pool.workers} == {4}


@pytest.mark.parametrize("file_lost", [False, True])
def test_a_policy_that_is_lost_while_engines_load_is_restarted_with_the_engines_at_its_version(
    tmp_path: Path, file_lost: bool
) -> None:
    """An engine hangs in its first load of version 2 until the restart ends the call, or finds the file gone."""
    run = RecoveringRun(tmp_path, ("policy-0", "update", 3), schedule=STALE)  # step 3: the critic warms up in step 1
    run.sync_timeout_s = 60.0
    loads: list[int] = []

    class Hanging(FaultyEngine):
        async def update_weights(self, update: WeightUpdate) -> WeightAck:
            loads.append(update.version)
            if loads.count(2) == 1 and update.version == 2:
                if file_lost:
                    raise damage(2)
                await asyncio.Event().wait()
            return await super().update_weights(update)

    run.engines = [run.engines[0], Hanging("rollout-1", random.Random(1))]
    outcome = run.run()
    assert outcome.ledger == {"dispatched": 80, "trained": 80, "dropped": 0, "in_flight": 0, "retries": 0}
    assert run.controller.components.recovery.budget.total == 1
    assert loads == [1, 2, 2, 2, 3, 4]  # version 2: the first load, its repetition, and that of the recovery
    assert {engine.version for engine in run.engines} == {4}


def test_a_run_that_stops_while_engines_load_waits_for_them_and_resumes(tmp_path: Path) -> None:
    first, _ = run_of(tmp_path, schedule={"steps": 6, "max_staleness": 1})
    outcome = first.run_until(2)
    assert outcome.stopped and loaded(tmp_path)[-1] == outcome.steps_done
    second, _ = run_of(tmp_path, schedule={"steps": 6, "max_staleness": 1})
    second.resume = True
    second.run()
    prepared = [uid for run in (first, second) for keep in run.policies[0].prepared for uid, _ in keep]
    assert len(prepared) == 6 * 20 and {prepared.count(uid) for uid in prepared} == {4}
