"""Stages that take time, fail or do nothing at all, around the product's own controller.

Only workers are simulated. They honour the protocol (`orchestrator/handles.py`, `workers/messages.py`): bounds, deaths,
acknowledged weights. Controller, scheduler, engine pool, scoring, ledger, weight sync, rollout source, prompt order,
micro-batch plans, metrics and console are those that `troupe run` puts together.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.harness import NotCorrect
from orchestrator.checkpoint import CheckpointStore
from orchestrator.console import Console
from orchestrator.controller import Cast, Controller, RunOutcome, TrainPlan
from orchestrator.deadlines import within
from orchestrator.engine_pool import Engine, EnginePool, PoolBounds
from orchestrator.errors import WorkerDied, WorkerTimeout
from orchestrator.handles import Gang, WorkerHandle
from orchestrator.ledger import Ledger
from orchestrator.metrics import MetricSinks
from orchestrator.prompts import PromptPick, PromptSource
from orchestrator.rollout_source import RolloutCast, RolloutPlan, RolloutSource
from orchestrator.scheduler import NextPrompt, RolloutScheduler, SchedulePlan
from orchestrator.scoring import RewardPool, Scorer
from orchestrator.weight_sync import FileSync
from workers.messages import (
    GroupRequest,
    GroupSummary,
    PrepareRequest,
    RankPlan,
    RewardSummary,
    SampleSummary,
    TrainRow,
    TrainSummary,
    UpdateMetrics,
    WeightAck,
    WeightUpdate,
    WorkerGone,
    WorkerHealth,
)

PROMPT_TOKENS, RESPONSE_TOKENS = 64, 256
BOUND_S = 60.0
"""Bound of every call."""
Table = tuple[str, int, int]
"""What stands for a table in the object store: (prompt_uid, attempt, samples)."""


class LocalWorker:
    """A worker in this process."""

    def __init__(self, name: str, target: Any) -> None:
        self._name = name
        self._target = target
        self._dead = False

    @property
    def name(self) -> str:
        """Role and index."""
        return self._name

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run a coroutine method. Raises WorkerDied and WorkerTimeout; a call under way sees a death when it ends."""
        if self._dead:
            raise WorkerDied(self._name, method, "the process is gone")
        try:
            answer = await within(timeout_s, getattr(self._target, method)(*args))
        except TimeoutError:
            raise WorkerTimeout(self._name, method, f"no answer in {timeout_s:g} s") from None
        except WorkerGone as error:
            self._dead = True
            raise WorkerDied(self._name, method, str(error)) from None
        if self._dead:
            raise WorkerDied(self._name, method, "the process is gone")
        return answer

    async def call_for_table(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, Any]:
        """As `call`, for methods that return (summary, table)."""
        return await self.call(method, *args, timeout_s=timeout_s)

    def kill(self) -> None:
        """End the worker."""
        self._dead = True


@lru_cache(maxsize=64)
def _samples(count: int, oldest: int, newest: int) -> tuple[SampleSummary, ...]:
    return tuple(SampleSummary(i, PROMPT_TOKENS, RESPONSE_TOKENS, "stop", oldest, newest) for i in range(count))


@lru_cache(maxsize=8)
def _rewards(count: int) -> tuple[float, ...]:
    return tuple(float(i % 2) for i in range(count))


@lru_cache(maxsize=8)
def _rows(groups: int, size: int) -> tuple[TrainRow, ...]:
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    return tuple(TrainRow(tokens, RESPONSE_TOKENS, True, PROMPT_TOKENS, g) for g in range(groups) for _ in range(size))


Work = Callable[[GroupRequest], float]
"""Seconds that a group takes an engine. Raises WorkerGone where it kills the engine."""


def no_work(request: GroupRequest) -> float:
    """Engines answer at once."""
    return 0.0


class SimEngine:
    """Samples a group by waiting; even with nothing to do, the answer comes in a later turn of the loop."""

    def __init__(self, name: str, work: Work = no_work) -> None:
        self.name = name
        self._work = work
        self._version = 0

    async def generate(self, request: GroupRequest, prompts: object) -> tuple[GroupSummary, Table]:
        """One group."""
        oldest = self._version
        await asyncio.sleep(self._work(request))
        samples = _samples(request.samples, oldest, self._version)
        table = request.prompt_uid, request.attempt, request.samples
        return GroupSummary(request.prompt_uid, request.attempt, self.name, samples, 0.0), table

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Serve the version."""
        await asyncio.sleep(0)
        self._version = update.version
        return WeightAck(self.name, update.version, update.digest, 0.0)

    async def health(self) -> WorkerHealth:
        """Alive."""
        await asyncio.sleep(0)
        return WorkerHealth(self.name, "host", 1, self._version, 0)


class SimReward:
    """Rewards 0 and 1 in turn; writes nothing."""

    async def score(self, rollouts: Table) -> tuple[RewardSummary, Table]:
        """One group."""
        await asyncio.sleep(0)
        uid, attempt, samples = rollouts
        rewards = _rewards(samples)
        return RewardSummary(uid, attempt, ("ok",) * samples, rewards, {"sim": rewards}), rollouts

    async def write_trajectories(self, path: str, *tables: Table) -> int:
        """Nothing."""
        return 0


class SimPolicy:
    """Trains by waiting."""

    def __init__(self, update_s: float = 0.0) -> None:
        self._update_s = update_s
        self.kept: list[tuple[tuple[str, int], ...]] = []
        """(prompt_uid, sample_index) of every batch that was prepared."""
        self.rows: list[int] = []
        """Rows of every update's micro-batches."""

    async def prepare(self, request: PrepareRequest, *tables: Table) -> tuple[TrainSummary, Table]:
        """Every row has a signal."""
        await asyncio.sleep(0)
        self.kept.append(request.keep)
        groups = len(request.prompt_rows)
        return TrainSummary(_rows(groups, len(request.keep) // groups)), tables[0]

    async def update(self, plan: RankPlan, batch: Table) -> UpdateMetrics:
        """One update."""
        await asyncio.sleep(self._update_s)
        self.rows.append(sum(map(len, plan.micro_batches)))
        return UpdateMetrics({"loss": 0.5}, {"grad_norm": 1.0})

    async def publish_weights(self, version: int) -> WeightUpdate:
        """Weights of no bytes, on the engines' own host."""
        await asyncio.sleep(0)
        return WeightUpdate(version, f"digest-{version}", "", "host", (), 0)

    async def save(self, directory: str) -> None:
        """One file, so that the run's last checkpoint has something to hash."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "rank-0").write_text(str(len(self.rows)))

    async def export(self, directory: str) -> None:
        """As `save`."""
        await self.save(directory)


@dataclass(frozen=True)
class Shape:
    """How large a simulated run is."""

    engines: int
    slots: int
    """Groups that an engine holds at a time."""
    groups: int
    """Groups of a step."""
    samples: int
    """Samples of a group."""
    staleness: int
    steps: int
    restarts: int = 0
    probe_every_s: float = 20.0
    """The spec's default, `failures.health_interval_s`."""

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.groups * self.samples


@dataclass(frozen=True)
class Tick:
    """The end of a step."""

    wall: float
    """Seconds on the monotonic clock."""
    cpu: float
    """CPU seconds of this process so far."""


class Clock(Console):
    """The product's display, into memory; notes when each step was reported."""

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        super().__init__(io.StringIO())
        self._on_step = on_step
        self.ticks: list[Tick] = []

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """A step is done."""
        super().step(step, metrics)
        self.ticks.append(Tick(time.perf_counter(), time.process_time()))
        if self._on_step is not None:
            self._on_step(step)


@dataclass(frozen=True)
class _Pool:
    """What the order of prompts needs to know of the prompts."""

    rows: int
    digest: str = "simulated"


@dataclass
class Stage:
    """The workers of a simulated run; by default all of them in this process and with nothing to do."""

    engines: Sequence[WorkerHandle]
    policy: WorkerHandle
    reward: WorkerHandle
    spawn: Callable[[str], WorkerHandle]
    """A fresh engine in place of one that died."""

    @classmethod
    def local(cls, shape: Shape, policy: SimPolicy, work: Work = no_work) -> Stage:
        """Workers in this process."""

        def engine(name: str) -> LocalWorker:
            return LocalWorker(name, SimEngine(name, work))

        engines = [engine(f"rollout-{number}") for number in range(shape.engines)]
        return cls(engines, LocalWorker("policy-0", policy), LocalWorker("reward-0", SimReward()), engine)


@dataclass
class Simulation:
    """One run of the product's controller over a stage."""

    shape: Shape
    stage: Stage
    clock: Clock = field(default_factory=Clock)
    on_prompt: Callable[[PromptPick], None] | None = None
    """Told of every prompt that is drawn: from then on its group waits for an engine."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the run when it is set, as a signal would."""

    async def run(self) -> tuple[RunOutcome, EnginePool]:
        """The whole run, in a temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            controller, pool = self._controller(Path(folder))
            try:
                return await controller.run(), pool
            finally:
                await pool.close()

    def _controller(self, out: Path) -> tuple[Controller, EnginePool]:
        shape, stage = self.shape, self.stage

        async def spawn(name: str) -> Engine:
            await asyncio.sleep(0)
            return Engine(stage.spawn(name), "host")

        bounds = PoolBounds(shape.slots * shape.samples, BOUND_S, BOUND_S, 3, BOUND_S, shape.restarts)
        pool = EnginePool([Engine(handle, "host") for handle in stage.engines], spawn, bounds)
        policy = Gang("policy", [stage.policy], 16384)
        rewards = RewardPool([stage.reward], BOUND_S)
        ledger = Ledger()
        prompts = PromptSource(_Pool((shape.steps + shape.staleness + 1) * shape.groups), 17)
        schedule = SchedulePlan(shape.groups, shape.samples, shape.staleness, shape.steps, 3, 0.0, 1, 17)
        scheduler = RolloutScheduler(schedule, pool, Scorer(rewards, ()), ledger, self._drawn(prompts), None)
        makers = RolloutCast(policy, pool, scheduler, rewards, prompts, ledger)
        rollouts = RolloutPlan(False, shape.staleness, BOUND_S, out / "trajectories")
        source = RolloutSource(rollouts, makers, self.clock, self.stop)
        cast = Cast(policy, None, source, FileSync(policy, pool, BOUND_S), None, ledger)
        sinks = MetricSinks.open(out, tensorboard=False, resume_at=0)
        store = CheckpointStore(out / "checkpoints", 1)
        return Controller(_plan(shape), cast, store, sinks, self.clock, self.stop), pool

    def _drawn(self, prompts: PromptSource) -> NextPrompt:
        told = self.on_prompt
        if told is None:
            return prompts.next

        def draw() -> PromptPick:
            pick = prompts.next()
            told(pick)
            return pick

        return draw


def _plan(shape: Shape) -> TrainPlan:
    return TrainPlan(
        steps=shape.steps,
        epochs=1,
        minibatches=1,
        skip_silent=True,
        seed=17,
        critic_warmup=0,
        train_timeout_s=BOUND_S,
        step_timeout_s=BOUND_S,
        probe_every_s=shape.probe_every_s,
        checkpoint_every=0,
        evaluate_every=0,
        evaluate_at_start=False,
        evaluate_at_end=False,
        nonfinite_limit=3,
    )


def check(shape: Shape, outcome: RunOutcome, policy: SimPolicy) -> None:
    """Every sequence dispatched was trained, once, in a whole batch, or is in flight where the run was stopped.

    Raises NotCorrect.
    """
    books, wanted = outcome.ledger, shape.steps * shape.sequences
    whole = books["dispatched"] == wanted + books["in_flight"] and bool(books["in_flight"]) == outcome.stopped
    if outcome.steps_done != shape.steps or not whole or books["trained"] != wanted or books["dropped"]:
        raise NotCorrect(f"{outcome.steps_done} of {shape.steps} steps of {shape.sequences} sequences, books {books}")
    if {len(keep) for keep in policy.kept} != {shape.sequences} or set(policy.rows) != {shape.sequences}:
        raise NotCorrect(f"a batch has not {shape.sequences} sequences, or an update left some out")
    if len({identity for keep in policy.kept for identity in keep}) != wanted:
        raise NotCorrect("a sequence was trained twice")
