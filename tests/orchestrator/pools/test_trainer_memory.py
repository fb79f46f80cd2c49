"""Engines and trainers on the same GPUs: at no time do both hold the memory that only one of them can have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakePolicy, FakeTable, FaultyEngine, FaultyWorker, fakes_of
from tests.orchestrator.test_controller import RolloutRun
from troupe.orchestrator.cluster.worker_group import ReferenceGroup
from troupe.orchestrator.errors import EnginesLost, WorkerRaised
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool, trainer_memory
from troupe.orchestrator.pools.pool_weights import MemoryLock, PoolWeights
from troupe.orchestrator.pools.replicas import ReplicaPool, RestartBudget
from troupe.orchestrator.rollouts.scoring import TokenScorer
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.recovery import Push, TrainerRecovery
from troupe.orchestrator.training.updates import Updates
from troupe.workers.contract.messages import (
    GroupRequest,
    GroupSummary,
    RankPlan,
    ScoreSummary,
    UpdateMetrics,
    WeightAck,
    WeightUpdate,
    WorkerHealth,
)

SHARED = {
    "rollout": {"gpus": 0.5, "colocate_with": "policy", "workers": 2},
    "policy": {"gpus": 0.5, "workers": 2},
}


class Gpus:
    """The memory of the GPUs of a run, and what happens on them in order."""

    def __init__(self) -> None:
        self.caches: set[str] = set()
        """Engines that have their KV cache."""
        self.optimizer: set[int] = set()
        """Ranks with their optimizer on the GPU."""
        self.both: list[str] = []
        """Where both were there."""
        self.log: list[str] = []
        self.deaths: list[str] = []
        """Methods in which the policy dies, each once."""
        self.unresting: set[str] = set()
        """Engines that do not sleep."""

    def note(self, what: str) -> None:
        """It happens now."""
        self.log.append(what)
        if self.caches and self.optimizer:
            self.both.append(what)


class SharedEngine(FaultyEngine):
    """An engine with a cache."""

    def __init__(self, name: str, gpus: Gpus) -> None:
        super().__init__(name, random.Random(0))
        self.gpus = gpus
        gpus.caches.add(name)
        gpus.note(f"start {name}")

    async def generate(self, request: GroupRequest, prompts: object, finished: Any = None) -> tuple[GroupSummary, Any]:
        """Waits while the engine sleeps, also in the middle."""
        await self._awake()
        answer = await super().generate(request, prompts, finished)
        await self._awake()
        return answer

    async def _awake(self) -> None:
        while self.name not in self.gpus.caches:
            await asyncio.sleep(0.001)

    async def sleep(self) -> None:
        """Gives the cache away."""
        if self.name in self.gpus.unresting:
            raise WorkerRaised(self.name, "sleep", "CUDA error")
        await asyncio.sleep(0.001)
        self.gpus.caches.discard(self.name)
        self.gpus.note(f"sleep {self.name}")

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Takes it back."""
        ack = await super().update_weights(update)
        self.gpus.caches.add(self.name)
        self.gpus.note(f"wake {self.name}")
        return ack


class SharedTeacher:
    """A teacher's engine with a cache, on the same GPUs."""

    def __init__(self, name: str, gpus: Gpus) -> None:
        self.name = name
        self.gpus = gpus
        gpus.caches.add(name)
        gpus.note(f"start {name}")

    async def score(self, plan: RankPlan, *rollouts: Any) -> tuple[ScoreSummary, Any]:
        """Waits while the engine sleeps, also in the middle."""
        for _ in range(2):
            while self.name not in self.gpus.caches:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.002)
        self.gpus.note("score")
        return ScoreSummary(sum(map(len, plan.micro_batches)), {}), FakeTable("scores", ())

    async def health(self) -> WorkerHealth:
        return WorkerHealth(self.name, "host", 1, 0, 0)

    async def close(self) -> None: ...

    async def sleep(self) -> None:
        if f"{self.name} sleeps" in self.gpus.unresting:
            raise WorkerRaised(self.name, "sleep", "CUDA error")
        self.gpus.caches.discard(self.name)
        self.gpus.note(f"sleep {self.name}")

    async def wake(self) -> None:
        if f"{self.name} wakes" in self.gpus.unresting:
            raise WorkerRaised(self.name, "wake", "out of memory")
        self.gpus.caches.add(self.name)
        self.gpus.note(f"wake {self.name}")


class SharedPolicy(FakePolicy):
    """A rank with an optimizer. `run` is set by the run."""

    run: SharedRun

    async def start(self, rendezvous: Any) -> Any:
        """Builds the optimizer on the GPU."""
        self._take("start policy")
        return await super().start(rendezvous)

    async def update(self, *args: Any, **kwargs: Any) -> UpdateMetrics:
        """Takes the optimizer back."""
        self._take("update")
        await self._dies("update")
        return await super().update(*args, **kwargs)

    async def compute_logprobs(self, plan: Any, *rollouts: Any) -> Any:
        """Needs the weights alone."""
        await self._dies("compute_logprobs")
        return await super().compute_logprobs(plan, *rollouts)

    async def offload_states(self) -> int:
        """Moves the optimizer away."""
        self.run.gpus.optimizer.discard(self.rank)
        self.run.gpus.note("offload")
        return 1

    def _take(self, what: str) -> None:
        self.run.gpus.optimizer.add(self.rank)
        self.run.gpus.note(what)

    async def _dies(self, method: str) -> None:
        gpus = self.run.gpus
        if self.rank == 0 and method in gpus.deaths:
            gpus.deaths.remove(method)
            for worker in fakes_of(self.run.policy):
                worker.kill()  # what it held is free
            gpus.optimizer.clear()
            await asyncio.sleep(1)


class SharedRun(RolloutRun):
    """A run whose two engines share the GPUs of two policy ranks."""

    def __init__(self, out: Path, resume: bool = False, **sections: Mapping[str, Any]) -> None:
        super().__init__(out, 1, resume, roles=SHARED, **sections)
        self.gpus = Gpus()
        kind = type("Policy", (SharedPolicy,), {"run": self})
        self.policies = [kind(rank) for rank in range(2)]
        self.start_s = 0.001
        self.teacher_s = 0.0
        self.teachers: list[ReplicaPool[Any]] = []

    def teach(self) -> None:
        """Two teacher's engines score every group, also on these GPUs."""
        names = [f"teacher.math-{rank}" for rank in range(2)]

        async def launch(name: str) -> Any:
            async with self.pool.weights.memory.starting():
                await asyncio.sleep(self.teacher_s)
                return FaultyWorker(name, SharedTeacher(name, self.gpus))

        workers: list[Any] = [FaultyWorker(name, SharedTeacher(name, self.gpus)) for name in names]
        group = ReferenceGroup("teacher.math", workers, 512)
        pool = ReplicaPool(workers, launch, RestartBudget("reference", 2))
        self.teachers.append(pool)
        scorer = self.scheduler._scorer
        scorer.token_scorers += (TokenScorer(group, group.score, 60.0, pool),)

    def engine_pool(self, weights: PoolWeights) -> EnginePool:
        """Of engines that have started."""

        async def spawn(name: str) -> Engine:
            engine = Engine(FaultyWorker(name, SharedEngine(name, self.gpus)), "host")
            await asyncio.sleep(self.start_s)
            return engine

        self.started = [FaultyWorker(f"rollout-{i}", SharedEngine(f"rollout-{i}", self.gpus)) for i in range(2)]
        return EnginePool([Engine(worker, "host") for worker in self.started], spawn, self.spec, weights)

    def recovery(
        self, updates: Updates, push: Push | None, store: CheckpointStore, console: Console, done: int
    ) -> TrainerRecovery:
        """As `RolloutRun` has it in a run."""
        whole = super().recovery(updates, push, store, console, done)
        memory = partial(trainer_memory, self.pool, self.teachers, self.policy, 1.0)
        return TrainerRecovery(
            self.spec, self.trainer_calls, updates, push, store, whole._restart_groups, console, done, memory
        )

    def trained(self) -> list[list[str]]:
        """What each rank has learned."""
        return [worker.target.learned for worker in fakes_of(self.policy)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SharedRun:
    """A run without a fault."""
    run = SharedRun(tmp_path_factory.mktemp("whole"))
    run.run()
    return run


def test_every_step_rests_updates_offloads_and_wakes_in_this_order(whole: SharedRun) -> None:
    assert whole.gpus.both == []
    log = [line for line in whole.gpus.log if not line.startswith("start")]
    kinds = [line.partition(" ")[0] for line in log]
    assert kinds == 4 * ["sleep", "sleep", "update", "update", "offload", "offload", "wake", "wake"]
    assert not any(engine.asleep for engine in whole.pool.workers)


@pytest.mark.parametrize(("method", "version"), [("update", 0), ("update", 3), ("compute_logprobs", 0)])
def test_trainers_that_are_lost_restart_while_the_engines_rest(
    tmp_path: Path, whole: SharedRun, method: str, version: int
) -> None:
    """Also in the middle of sampling, and before there was a version to send: the engines wake all the same."""
    run = SharedRun(tmp_path, failures={"trainer_restarts": 1})
    run.change(algorithm={"kl": {"coef": 0.0}}, schedule={"epochs": 2 if method == "compute_logprobs" else 1})

    async def main() -> None:
        controller = run.build()
        if method == "compute_logprobs":  # of the first group, while the others are sampled
            run.started[1].target.mean_s = 0.1

        async def die() -> None:
            while controller.version < version:
                await asyncio.sleep(0)
            run.gpus.deaths.append(method)

        dying = asyncio.create_task(die())
        await controller.run()
        await dying

    asyncio.run(main())
    assert (run.gpus.both, run.gpus.deaths) == ([], [])
    assert "start policy" in run.gpus.log and run.controller.version == 4
    restart = run.gpus.log.index("start policy")
    assert {"sleep rollout-0", "sleep rollout-1"} <= set(run.gpus.log[:restart])
    if method == "update":
        assert run.trained() == whole.trained()


@pytest.mark.parametrize("start_s", [0.001, 0.05])
def test_an_engine_that_is_replaced_starts_when_the_trainers_have_given_the_memory_back(
    tmp_path: Path, start_s: float
) -> None:
    run = SharedRun(tmp_path, schedule={"steps": 6})
    run.start_s = start_s
    run.policies[0].update_s = 0.02

    async def main() -> None:
        controller = run.build()

        async def kill() -> None:
            while "update" not in run.gpus.log:
                await asyncio.sleep(0)
            run.started[0].kill()  # it sleeps; its loss is noticed when it is to load weights
            run.gpus.caches.discard("rollout-0")
            await run.pool.probe_all()

        killing = asyncio.create_task(kill())
        await controller.run()
        await killing

    asyncio.run(main())
    assert run.gpus.both == []
    assert run.gpus.log.count("start rollout-0") == 2 and run.controller.version == 6


def test_an_engine_that_does_not_rest_is_replaced_before_the_update(tmp_path: Path) -> None:
    run = SharedRun(tmp_path)
    run.gpus.unresting.add("rollout-1")

    async def main() -> None:
        controller = run.build()
        lose = run.pool.lose

        async def freed(worker: Engine, error: Any, may_replace: bool = True) -> None:
            run.gpus.caches.discard(worker.name)  # its process is killed
            run.gpus.unresting.clear()
            await lose(worker, error, may_replace)

        run.pool.lose = freed
        await controller.run()

    asyncio.run(main())
    assert run.gpus.both == [] and run.gpus.log.count("start rollout-1") == 2


def test_a_run_whose_engines_all_fail_to_rest_ends(tmp_path: Path) -> None:
    run = SharedRun(tmp_path, failures={"engine_restarts": 0})
    run.gpus.unresting.update(("rollout-0", "rollout-1"))
    with pytest.raises(EnginesLost, match="no rollout engine is left"):
        run.run()


def taught(run: SharedRun, *, during: str = "", kill: bool = False) -> SharedRun:
    """The run, to its end, with a teacher; `kill` ends one of its engines when `during` is logged."""

    async def main() -> None:
        controller = run.build()
        run.teach()
        (teachers,) = run.teachers
        lose = teachers.lose

        async def freed(worker: Any, error: Any, may_replace: bool = True) -> None:
            run.gpus.caches.discard(worker.name)  # its process is killed
            run.gpus.unresting.clear()
            await lose(worker, error, may_replace)

        async def fault() -> None:
            while kill and during not in run.gpus.log:
                await asyncio.sleep(0)
            if kill:
                teachers.workers[1].kill()
                run.gpus.caches.discard("teacher.math-1")

        teachers.lose = freed
        faulty = asyncio.create_task(fault())
        await controller.run()
        await faulty

    asyncio.run(main())
    return run


def test_a_teacher_sleeps_after_the_samplers_and_wakes_before_them(tmp_path: Path) -> None:
    """As soon as the optimizer is away. Every group of the next step finds it awake."""
    run = taught(SharedRun(tmp_path))
    assert run.gpus.both == [] and run.controller.version == 4
    log = [line.partition("-")[0] for line in run.gpus.log if not line.startswith("start") and line != "score"]
    asleep = ["sleep rollout", "sleep teacher.math", "update", "offload", "wake teacher.math", "wake rollout"]
    assert log == 4 * [line for line in asleep for _ in range(2)]
    scored = [i for i, line in enumerate(run.gpus.log) if line == "score"]
    updates = [i for i, line in enumerate(run.gpus.log) if line == "update"]
    assert {sum(at < i for at in updates) for i in scored} == {0, 2, 4, 6}, "between the updates, in every step"


@pytest.mark.parametrize("during", ["update", "offload", "sleep teacher.math-1", "score"])
@pytest.mark.parametrize("teacher_s", [0.001, 0.05])
def test_a_teacher_that_is_lost_starts_again_when_the_trainers_have_given_the_memory_back(
    tmp_path: Path, during: str, teacher_s: float
) -> None:
    run = SharedRun(tmp_path, schedule={"steps": 6})
    run.teacher_s = teacher_s
    run.policies[0].update_s = 0.02
    taught(run, during=during, kill=True)
    assert run.gpus.both == [] and run.controller.version == 6
    assert run.gpus.log.count("start teacher.math-1") == 2 and run.teachers[0].budget.used == 1


@pytest.mark.parametrize("fault", ["sleeps", "wakes"])
def test_a_teacher_that_does_not_sleep_or_wake_is_replaced(tmp_path: Path, fault: str) -> None:
    run = SharedRun(tmp_path)
    run.gpus.unresting.add(f"teacher.math-0 {fault}")
    taught(run)
    assert run.gpus.both == [] and run.controller.version == 4
    assert run.gpus.log.count("start teacher.math-0") == 2


def test_trainers_that_are_lost_while_a_teacher_scores_restart_while_it_sleeps(tmp_path: Path) -> None:
    run = SharedRun(tmp_path, failures={"trainer_restarts": 1})
    run.gpus.deaths.append("update")
    taught(run)
    assert (run.gpus.both, run.gpus.deaths) == ([], []) and run.controller.version == 4
    restart = max(i for i, line in enumerate(run.gpus.log) if line == "start policy")
    before = [line for line in run.gpus.log[:restart] if line.endswith("teacher.math-0")]
    assert before[-1] == "sleep teacher.math-0"


async def test_trainers_wait_for_engines_that_start_and_keep_others_from_it() -> None:
    lock, log = MemoryLock(), list[str]()

    async def start(name: str) -> None:
        async with lock.starting():
            log.append(f"{name} starts")
            await asyncio.sleep(0.01)
            log.append(f"{name} serves")

    async def train() -> None:
        async with lock.training():
            log.append("training")
            await asyncio.sleep(0.01)
            log.append("trained")

    first = [asyncio.create_task(start("a")), asyncio.create_task(start("b"))]
    await asyncio.sleep(0.001)
    training = asyncio.create_task(train())
    await asyncio.sleep(0.001)
    late = asyncio.create_task(start("c"))
    await asyncio.gather(*first, training, late)
    assert log == ["a starts", "b starts", "a serves", "b serves", "training", "trained", "c starts", "c serves"]


async def test_a_lock_that_is_cancelled_while_it_waits_is_free_again() -> None:
    lock = MemoryLock()
    async with lock.starting():
        waiting = asyncio.create_task(_enter(lock))
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), lock.starting():
            pass
    async with asyncio.timeout(1), lock.training():
        pass


async def _enter(lock: MemoryLock) -> None:
    async with lock.training():
        pass
