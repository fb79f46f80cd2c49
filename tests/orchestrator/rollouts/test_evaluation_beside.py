"""The engine that evaluates while training continues: it keeps its weights, whatever happens to it and to others."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakePolicy, FakeTable, FaultyEngine, FaultyWorker, fake_pool, fake_spec
from tests.orchestrator.test_best_checkpoint import DATA
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.controller import Controller
from troupe.orchestrator.data.prompts import PromptPick
from troupe.orchestrator.errors import EvaluationLost, WorkerDied
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.rollouts.evaluation import EvaluationBeside, Evaluator, HeldOutSet, engine_sampler
from troupe.orchestrator.spec.checks.data import held_out_problems
from troupe.orchestrator.spec.derived.sampling import held_out_sets
from troupe.orchestrator.telemetry.run_folder import RunFolder
from troupe.workers.contract.messages import GroupRequest, RankPlan, UpdateMetrics

PROMPTS = 6
EVAL_S = 0.02
"""What an engine takes for a held-out prompt: longer than the training steps of the fakes."""
WAIT_S = 60.0


class Recording(FaultyEngine):
    """Records the version at which each held-out prompt was sampled, and pauses in the middle of one on request."""

    def __init__(self, name: str, rng: random.Random) -> None:
        super().__init__(name, rng)
        self.evaluated: list[tuple[str, int]] = []
        self.trained_on: list[str] = []
        self.begun = 0
        """Held-out prompts that it has received."""
        self.evaluates = asyncio.Event()
        """Cleared: held-out prompts wait in it."""
        self.evaluates.set()
        self.wait: Callable[[str], float] = lambda uid: EVAL_S if uid.startswith("eval") else 0.001
        self._seconds = lambda request: self.wait(request.prompt_uid)

    async def generate(self, request: GroupRequest, prompts: object, finished: Any = None) -> Any:
        if not request.prompt_uid.startswith("eval"):
            found = await super().generate(request, prompts, finished)
            self.trained_on.append(request.prompt_uid)
            return found
        oldest = self.version
        self.begun += 1
        await self.evaluates.wait()
        summary, table = await super().generate(request, prompts, finished)
        self.evaluated.append((request.prompt_uid, self.version))
        return replace(summary, samples=tuple(replace(one, oldest_version=oldest) for one in summary.samples)), table


class WaitingPolicy(FakePolicy):
    """Waits before its update of one step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.waits, self.go_on = asyncio.Event(), asyncio.Event()

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        if len(self.updates) + 1 == self.step:
            self.waits.set()
            await self.go_on.wait()
        return await super().update(plan, batch, kl_old_coef, texts)


class PoolRun(RolloutRun):
    """A run over fake engines of which one evaluates while the others sample."""

    def __init__(self, out: Path, engines: int = 3, **sections: Any) -> None:
        evaluation = {"every_steps": 2, "beside": True, "at_start": False, "at_end": False}
        fields: dict[str, Any] = {
            "evaluation": evaluation,
            "data": DATA,
            "roles": {"rollout": {"workers": engines, "max_num_seqs": 8}},
            "schedule": {"steps": 8},
            "failures": {"health_interval_s": 9.0},
        }
        super().__init__(out, **(fields | sections))
        self.recording = [Recording(f"rollout-{i}", random.Random(i)) for i in range(engines)]
        self.engines = [*self.recording]
        self.during: Callable[[Controller], Awaitable[None]] | None = None
        """Runs beside the run."""

    def pause_evaluations(self) -> None:
        """Held-out prompts wait in their engine, for what has to happen meanwhile."""
        for engine in self.recording:
            engine.evaluates.clear()

    def continue_evaluations(self) -> None:
        for engine in self.recording:
            engine.evaluates.set()

    def beside(self) -> EvaluationBeside:
        (settings,) = held_out_sets(self.spec)
        picks = [PromptPick(f"eval-r{row}", row) for row in range(PROMPTS)]
        evaluator = Evaluator(7, [HeldOutSet(settings, picks, None)], engine_sampler(self.pool), self.rewards)
        self.evaluator = evaluator
        return EvaluationBeside(evaluator, self.pool)

    def engine_pool(self, weights: PoolWeights) -> EnginePool:
        return fake_pool(self.engines, self.spec, weights)

    def workers(self) -> dict[str, FaultyWorker[Any]]:
        return {engine.name: engine.handle for engine in self.pool.workers if isinstance(engine.handle, FaultyWorker)}

    def run(self) -> Any:
        async def run() -> Any:
            controller = await self.start()
            beside = None if self.during is None else asyncio.create_task(self.during(controller))  # type: ignore[arg-type]
            outcome = await controller.run()
            if beside is not None:
                await beside
            return outcome

        return asyncio.run(run())

    def held(self) -> list[str]:
        return [engine.name for engine in self.pool.workers if engine.held]

    def evaluations(self) -> dict[int, float]:
        lines = RunFolder(self.out).metrics()
        return {line["step"]: line["eval/prompts"] for line in lines if "eval/prompts" in line}


def sampled_at(run: PoolRun) -> dict[int, dict[str, int]]:
    """Which engines sampled held-out prompts of each version, and how many."""
    found: dict[int, dict[str, int]] = {}
    for engine in run.recording:
        for _, version in engine.evaluated:
            own = found.setdefault(version, {})
            own[engine.name] = own.get(engine.name, 0) + 1
    return found


@pytest.mark.parametrize("staleness", [0, 2])
def test_one_engine_keeps_the_version_while_others_get_newer_ones(tmp_path: Path, staleness: int) -> None:
    run = PoolRun(tmp_path, schedule={"steps": 8, "max_staleness": staleness})
    outcome = run.run()
    assert outcome.ledger["trained"] == outcome.ledger["dispatched"] == 8 * 20
    assert run.evaluations() == dict.fromkeys((2, 4, 6, 8), PROMPTS)
    engines = sampled_at(run)
    assert sorted(engines) == [2, 4, 6, 8]
    assert [list(engines[step].values()) for step in (2, 4, 6)] == [[PROMPTS]] * 3
    # Training is over, and no engine has it alone; one may still take the newest weights.
    assert len(engines[8]) > 1 and sum(engines[8].values()) == PROMPTS
    assert max(line["staleness/max"] for line in run.lines() if "staleness/max" in line) <= staleness
    # Nothing was lost, and the last version is everywhere.
    assert all(engine.name in {"rollout-0", "rollout-1", "rollout-2"} for engine in run.pool.workers)
    assert run.held() == [] and {engine.version for engine in run.pool.workers} == {8}


def test_the_evaluating_engine_gets_no_groups_and_then_catches_up(tmp_path: Path) -> None:
    run, seen = PoolRun(tmp_path, engines=2), list[tuple[int, int, list[str]]]()
    run.pause_evaluations()

    async def watch(controller: Controller) -> None:
        while controller.version < 8:
            for engine, recorded in zip(run.pool.workers, run.recording, strict=True):
                if engine.held:
                    seen.append((engine.version, controller.version, list(recorded.trained_on)))
                    if controller.version > engine.version:
                        run.continue_evaluations()
            await asyncio.sleep(0.001)

    run.during = watch
    run.run()
    assert {version for version, _, _ in seen} == {2, 4, 6}
    assert any(now > version for version, now, _ in seen)  # training went on beside it
    by_version = {v: [groups for version, _, groups in seen if version == v] for v in (2, 4, 6)}
    assert all(groups == found[0] for found in by_version.values() for groups in found)
    assert {engine.version for engine in run.pool.workers} == {8}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_lost_engine_s_evaluation_begins_again_where_the_version_still_is(tmp_path: Path) -> None:
    """The updates wait until then: no newer version has been sent."""
    run, policy = PoolRun(tmp_path, schedule={"steps": 3}), WaitingPolicy(3)
    run.policies = [policy]
    run.pause_evaluations()
    lost: list[str] = []

    async def kill(controller: Controller) -> None:
        await policy.waits.wait()
        lost.extend(run.held())
        run.workers()[lost[0]].kill()
        run.continue_evaluations()
        await until(lambda: run.held() not in ([], lost))
        policy.go_on.set()

    run.during = kill
    run.run()
    assert run.evaluations() == {2: PROMPTS}
    ((engine, prompts),) = sampled_at(run)[2].items()
    assert engine not in lost and prompts == PROMPTS


def test_an_evaluation_whose_version_is_nowhere_is_made_up_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine dies after newer versions were sent: no result of it is used, and the next step is evaluated."""
    run = PoolRun(tmp_path, evaluation={"every_steps": 3, "beside": True, "at_start": False, "at_end": False})
    run.pause_evaluations()

    async def kill(controller: Controller) -> None:
        await until(lambda: run.held() and run.pool.weights.version > 3)
        run.workers()[run.held()[0]].kill()
        run.continue_evaluations()

    run.during = kill
    run.run()
    assert "the evaluation of step 3 is lost" in caplog.text
    made = run.evaluations()
    assert 3 not in made and len(made) == 2 and 6 in made and set(made.values()) == {PROMPTS}


def test_an_engine_that_leaves_hands_its_evaluation_over(tmp_path: Path) -> None:
    """It leaves with unfinished prompts, and its process ends."""
    run, policy = PoolRun(tmp_path, schedule={"steps": 3}), WaitingPolicy(3)
    run.policies = [policy]
    run.pause_evaluations()
    left: list[str] = []

    async def retire(controller: Controller) -> None:
        await policy.waits.wait()
        left.extend(run.held())
        worker = run.workers()[left[0]]
        await run.pool.retire(left[0], 0.0)
        worker.kill()
        run.continue_evaluations()
        await until(run.held)
        policy.go_on.set()

    run.during = retire
    run.run()
    assert run.evaluations() == {2: PROMPTS} and len(run.pool.workers) == 2
    ((engine, prompts),) = sampled_at(run)[2].items()
    assert engine not in left and prompts == PROMPTS


def test_the_last_engine_takes_new_weights_and_the_evaluation_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All others die, and cannot be replaced: training goes before the evaluation, which would be of two versions."""
    run = PoolRun(tmp_path, engines=2, failures={"engine_restarts": 0, "health_interval_s": 9.0})
    policy = WaitingPolicy(4)
    run.policies = [policy]
    run.pause_evaluations()

    async def kill(controller: Controller) -> None:
        await policy.waits.wait()  # step 4 has its samples, and step 2 is being evaluated
        (held,) = run.held()
        (other,) = set(run.workers()) - {held}
        run.workers()[other].kill()
        await run.pool.probe_all()
        policy.go_on.set()
        await until(lambda: {one.name: one.version for one in run.recording}[held] == 4)
        run.continue_evaluations()

    run.during = kill
    outcome = run.run()
    assert outcome.ledger["trained"] == 8 * 20
    assert re.search(r"the evaluation of step 2 is lost: rollout-\d has received other weights", caplog.text)
    assert run.evaluations() == dict.fromkeys((4, 6, 8), PROMPTS)


def test_a_run_with_one_engine_left_waits_for_its_evaluations(tmp_path: Path) -> None:
    run = PoolRun(tmp_path, engines=1)
    run.run()
    assert run.evaluations() == dict.fromkeys((2, 4, 6, 8), PROMPTS)
    assert "seconds/evaluate" in run.lines()[1]


@pytest.mark.parametrize("seed", range(6))
def test_no_evaluation_is_ever_of_two_versions(tmp_path: Path, seed: int) -> None:
    """Engines die, leave and join at random moments, also while weights are sent."""
    rng = random.Random(seed)
    run = PoolRun(
        tmp_path,
        engines=4,
        schedule={"steps": 10, "max_staleness": seed % 3},
        failures={"engine_restarts": 9, "max_failed_fraction": 1.0, "health_interval_s": 9.0},
    )
    for number, engine in enumerate(run.recording):
        engine.wait = lambda uid, n=number: random.Random(f"{seed}{n}{uid}").uniform(0, EVAL_S)

    async def disturb(controller: Controller) -> None:
        for _ in range(3):
            await asyncio.sleep(rng.uniform(0.01, 0.06))
            chosen = run.held() if rng.random() < 0.6 and run.held() else sorted(run.workers())
            if controller.version >= 10:
                return
            if rng.random() < 0.7:
                run.workers()[rng.choice(chosen)].kill()
            elif len(run.pool.serving) > 2:
                await run.pool.retire(rng.choice(chosen), 0.05)

    run.during = disturb
    outcome = run.run()
    assert outcome.ledger["trained"] == 10 * 20
    assert set(run.evaluations().values()) <= {PROMPTS}
    assert run.held() == [] or len(run.pool.workers) == 1
    assert {engine.version for engine in run.pool.workers if not engine.held} <= {10}


def test_a_token_of_another_version_is_found(tmp_path: Path) -> None:
    """Should an engine ever be given weights while it evaluates."""

    async def run() -> None:
        built = PoolRun(tmp_path)
        built.pause_evaluations()
        built.build()
        pool: EnginePool = built.pool
        evaluation = await built.beside().begin(0)
        assert evaluation is not None and pool.weights.version == 0
        (engine,) = [engine for engine in pool.workers if engine.held]
        pool.weights.version = 1
        task = asyncio.create_task(evaluation)
        (recording,) = [one for one in built.recording if one.name == engine.name]
        await until(lambda: recording.begun)
        recording.version = 1
        built.continue_evaluations()
        with pytest.raises(EvaluationLost, match="has received other weights"):
            await task
        await pool.close()

    asyncio.run(run())


def test_an_engine_that_cannot_catch_up_is_replaced(tmp_path: Path) -> None:
    run = PoolRun(
        tmp_path, engines=2, schedule={"steps": 6}, evaluation={"every_steps": 3, "beside": True, "at_start": False}
    )
    run.policies[0].update_s = 0.01

    async def fail(controller: Controller) -> None:
        await until(run.held)
        (name,) = run.held()
        engine = next(one for one in run.recording if one.name == name)

        async def raises(update: object) -> Any:
            run.workers()[name].kill()
            raise WorkerDied(name, "update_weights", "it is gone")

        engine.update_weights = raises

    run.during = fail
    assert run.run().steps_done == 6
    assert len(run.pool.workers) == 2 and {engine.version for engine in run.pool.workers} == {6}


def test_engines_that_sleep_while_the_policy_trains_cannot_evaluate_beside_it() -> None:
    evaluation = {"every_steps": 2, "beside": True}
    roles = {"rollout": {"workers": 2, "sleep": "weights"}}
    assert list(held_out_problems(fake_spec(evaluation=evaluation, data=DATA, roles=roles))) == [
        (
            "evaluation.beside",
            "engines release their memory while the policy trains (roles.rollout.sleep): none can evaluate then",
        )
    ]
