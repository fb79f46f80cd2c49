"""Simulated workers that take time, fail or do nothing at all, around the product's own controller.

Only the workers are simulated (`tests/fakes.py`). They follow the protocols of their roles
(`workers/contract/roles.py`): timeouts, deaths, acknowledged weights. Controller, scheduler, engine pool, scoring,
ledger, weight sync, rollout source, prompt order, micro-batch plans, metrics and console are those that `troupe run`
puts together.
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
from typing import Any, cast

from benchmarks.support.harness import NotCorrect
from tests.fakes import (
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    FakeEngine,
    FakePolicy,
    FakeReward,
    LocalWorker,
    Seconds,
    fake_spec,
    no_work,
)
from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.cluster.worker_group import PolicyGroup, TrainerGroup, WorkerHandle
from troupe.orchestrator.controller import Controller, RunComponents, RunOutcome
from troupe.orchestrator.data.prompts import PromptPick, PromptSource
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.pools.workers import Workers
from troupe.orchestrator.rollouts.reward_pool import RewardPool
from troupe.orchestrator.rollouts.scheduler import NextPrompt, RolloutScheduler
from troupe.orchestrator.rollouts.scoring import Scorer
from troupe.orchestrator.rollouts.source import RolloutComponents, RolloutSource
from troupe.orchestrator.rollouts.weight_sync import FileSync
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.parts import run_parts
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.sinks import LoggedRun, MetricSinks
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.contract import roles
from troupe.workers.contract.messages import (
    PrepareRequest,
    TrainRow,
)

TIMEOUT_S = 60.0
"""Bound on every call."""


@lru_cache(maxsize=8)
def _rows(groups: int, size: int) -> tuple[TrainRow, ...]:
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    return tuple(TrainRow(tokens, RESPONSE_TOKENS, True, PROMPT_TOKENS, g) for g in range(groups) for _ in range(size))


class SimPolicy(FakePolicy):
    """A policy whose rows all have an advantage."""

    @property
    def rows(self) -> list[int]:
        """Rows of every update's micro-batches."""
        return [sum(map(len, plan.micro_batches)) for plan in self.updates]

    def _rows(self, request: PrepareRequest) -> tuple[TrainRow, ...]:
        groups = len(request.prompt_rows)
        return _rows(groups, len(request.keep) // groups)


@dataclass(frozen=True)
class Shape:
    """The size of a simulated run."""

    engines: int
    slots: int
    """Groups that one engine samples at once."""
    groups: int
    """Groups per step."""
    samples: int
    """Samples per group."""
    staleness: int
    steps: int
    restarts: int = 0
    probe_every_s: float = 20.0
    """The spec's default, `failures.health_interval_s`."""
    timeout_s: float = TIMEOUT_S
    """Bound on every call."""

    @property
    def sequences(self) -> int:
        """Sequences per step."""
        return self.groups * self.samples

    @property
    def spec(self) -> RolloutSpec:
        """The spec of the run: nothing but engines may fail."""
        timeouts = dict.fromkeys(
            ("start_timeout_s", "generate_timeout_s", "train_timeout_s", "step_timeout_s"), self.timeout_s
        )
        return fake_spec(
            algorithm={"name": "reinforce", "group_size": self.samples},
            schedule={
                "steps": self.steps,
                "prompts_per_step": self.groups,
                "max_staleness": self.staleness,
                **timeouts,
            },
            checkpoint={"every_steps": 0},
            failures={
                "engine_restarts": self.restarts,
                "max_failed_fraction": 0.0,
                "health_interval_s": self.probe_every_s,
            },
            output={"trajectories": True},
        )


@dataclass(frozen=True)
class Tick:
    """The end of a step."""

    wall: float
    """Seconds on the event loop's clock."""
    cpu: float
    """CPU seconds of this process so far."""
    staleness: float
    """Mean of the step's samples, in versions."""


class Clock(Console):
    """The product's console, printing into memory; records when each step is reported."""

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        super().__init__(io.StringIO())
        self._on_step = on_step
        self.ticks: list[Tick] = []

    def step(self, step: int, metrics: Mapping[str, object]) -> None:
        """Record the end of a step."""
        super().step(step, metrics)
        stale = cast("float", metrics["staleness/mean"])
        self.ticks.append(Tick(asyncio.get_running_loop().time(), time.process_time(), stale))
        if self._on_step is not None:
            self._on_step(step)


@dataclass(frozen=True)
class _Pool:
    """The properties of a prompt pool that `PromptSource` needs."""

    rows: int
    digest: str = "simulated"


@dataclass
class SimulatedWorkers:
    """The workers of a simulated run."""

    engines: Sequence[WorkerHandle[roles.RolloutEngine]]
    policy: WorkerHandle[roles.Policy]
    rewards: Sequence[WorkerHandle[roles.Reward]]
    spawn: Callable[[str], WorkerHandle[roles.RolloutEngine]]
    """Creates a replacement for an engine that died."""

    @classmethod
    def local(cls, shape: Shape, policy: SimPolicy, work: Seconds = no_work) -> SimulatedWorkers:
        """Workers in this process, without work by default."""

        def engine(name: str) -> LocalWorker[FakeEngine]:
            return LocalWorker(name, FakeEngine(name, work))

        engines = [engine(f"rollout-{number}") for number in range(shape.engines)]
        return cls(engines, LocalWorker("policy-0", policy), [LocalWorker("reward-0", FakeReward())], engine)


@dataclass
class Simulation:
    """One run of the product's controller over simulated workers."""

    shape: Shape
    workers: SimulatedWorkers
    clock: Clock = field(default_factory=Clock)
    on_prompt: Callable[[PromptPick], None] | None = None
    """Called with every prompt that is drawn, when its group becomes available to the engines."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the run when set, as a signal would."""

    async def run(self) -> tuple[RunOutcome, EnginePool]:
        """Run to the end, in a temporary folder."""
        with tempfile.TemporaryDirectory() as folder:
            controller, pool = self._controller(Path(folder))
            try:
                return await controller.run(), pool
            finally:
                await pool.close()

    def _controller(self, out: Path) -> tuple[Controller, EnginePool]:
        shape, workers, spec = self.shape, self.workers, self.shape.spec

        async def spawn(name: str) -> Engine:
            await asyncio.sleep(0)
            return Engine(workers.spawn(name), "host")

        calls = RecoverableCalls()
        policy = PolicyGroup("policy", [workers.policy], 16384, calls=calls)
        weights = PoolWeights(lambda engine: sync.bring_up(engine))
        pool = EnginePool([Engine(handle, "host") for handle in workers.engines], spawn, spec, weights)
        pool.dispatch.max_load = shape.slots * shape.samples
        rewards = RewardPool(workers.rewards, shape.timeout_s)
        ledger = Ledger()
        prompts = PromptSource(_Pool((shape.steps + shape.staleness + 1) * shape.groups), 17)
        scheduler = RolloutScheduler(spec, pool, Scorer(rewards, ()), ledger, self._drawn(prompts), None)
        makers = RolloutComponents(Workers({"policy": policy}), pool, scheduler, rewards, prompts, ledger)
        source = RolloutSource(spec, out, makers, self.clock, self.stop)
        updates = RolloutUpdates(spec, policy, None, self.clock)
        sinks = MetricSinks.open(LoggedRun(out))
        store, sync = CheckpointStore(out / "checkpoints", 1), FileSync(policy, pool, shape.timeout_s)
        recovery = TrainerRecovery(spec, calls, updates, sync.push, store, _restart, self.clock)
        recorder = StepRecorder(spec, out, updates.trainers)
        components = RunComponents(source, updates, recovery, sync, None, ledger, recorder)
        parts = run_parts(spec, components, RunCheckpoints(store), sinks, self.clock)
        return Controller(spec, components, parts, sinks, self.clock, self.stop), pool

    def _drawn(self, prompts: PromptSource) -> NextPrompt:
        on_prompt = self.on_prompt
        if on_prompt is None:
            return prompts.next

        def draw() -> PromptPick:
            pick = prompts.next()
            on_prompt(pick)
            return pick

        return draw


async def _restart(groups: Sequence[TrainerGroup[Any]]) -> None:
    """Never called: the simulated trainers do not die."""


def check(shape: Shape, outcome: RunOutcome, policy: SimPolicy) -> None:
    """Check that every dispatched sequence was trained once, in a full batch, or is in flight after a stop.

    Raises:
        NotCorrect: A sequence was lost, dropped or trained twice.
    """
    ledger, wanted = outcome.ledger, shape.steps * shape.sequences
    whole = ledger["dispatched"] == wanted + ledger["in_flight"] and bool(ledger["in_flight"]) == outcome.stopped
    if outcome.steps_done != shape.steps or not whole or ledger["trained"] != wanted or ledger["dropped"]:
        raise NotCorrect(
            f"{outcome.steps_done} of {shape.steps} steps of {shape.sequences} sequences ended, the ledger has {ledger}"
        )
    if {len(keep) for keep in policy.prepared} != {shape.sequences} or set(policy.rows) != {shape.sequences}:
        raise NotCorrect(f"a batch or an update does not have all {shape.sequences} sequences")
    if len({identity for keep in policy.prepared for identity in keep}) != wanted:
        raise NotCorrect("a sequence was trained twice")
