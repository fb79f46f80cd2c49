"""Workers without Ray and without models, for the scheduler, the controller and the weight sync.

They honour the real protocol (`call`, `call_for_table`, the messages), take virtual time (sleeps of the event loop),
and can be told to fail in every way a worker can.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.controller import TrainPlan
from orchestrator.engine_pool import Engine, EnginePool, PoolBounds
from orchestrator.errors import WorkerDied, WorkerTimeout
from orchestrator.handles import Gang
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
    WorkerHealth,
)

BOUNDS = PoolBounds(
    max_load=64,
    generate_timeout_s=5.0,
    probe_timeout_s=0.05,
    probe_misses=1,
    start_timeout_s=1.0,
    restarts=2,
)


PLAN = TrainPlan(
    steps=4,
    epochs=1,
    minibatches=1,
    skip_silent=True,
    seed=3,
    critic_warmup=0,
    train_timeout_s=5.0,
    step_timeout_s=5.0,
    probe_every_s=1.0,
    checkpoint_every=2,
    evaluate_every=0,
    evaluate_at_start=False,
    evaluate_at_end=False,
    nonfinite_limit=2,
)
"""Four steps with a checkpoint after every second; what a test changes it replaces."""


@dataclass
class FakeTable:
    """Stands where a reference to an Arrow table stands; says what it holds."""

    kind: str
    uids: tuple[str, ...]
    attempt: int = 0
    versions: tuple[int, ...] = ()


@dataclass
class FakeHandle:
    """A worker whose methods are coroutines of a plain object."""

    name: str
    target: Any
    dead: bool = False
    frozen: bool = False
    calls: list[str] = field(default_factory=list)
    _death: asyncio.Event = field(default_factory=asyncio.Event)

    def __hash__(self) -> int:
        return id(self)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Run the method unless dead; a frozen worker answers nothing until the bound."""
        self.calls.append(method)
        if self.dead:
            raise WorkerDied(self.name, method, "the process is gone")
        work = asyncio.ensure_future(self._run(method, *args))
        death = asyncio.ensure_future(self._death.wait())
        done, _ = await asyncio.wait({work, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if work in done:
            return work.result()
        work.cancel()
        if self.dead:
            raise WorkerDied(self.name, method, "the process is gone")
        raise WorkerTimeout(self.name, method, f"no answer in {timeout_s:g} s")

    async def call_for_table(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, Any]:
        """As the real handle: (summary, reference)."""
        return await self.call(method, *args, timeout_s=timeout_s)

    def kill(self) -> None:
        """As kill -9."""
        self.dead = True
        self._death.set()

    async def _run(self, method: str, *args: Any) -> Any:
        while self.frozen:
            await asyncio.sleep(0.01)
        return await getattr(self.target, method)(*args)


@dataclass
class FakeEngine:
    """Generates by sleeping; records the version every token would have."""

    name: str
    rng: random.Random
    mean_s: float = 0.002
    version: int = 0
    digest: str = "d0"
    refuse_rows: frozenset[int] = frozenset()
    lie_about_digest: bool = False
    fail_next: int = 0
    served: list[GroupRequest] = field(default_factory=list)

    async def generate(self, request: GroupRequest, prompts: object) -> tuple[GroupSummary, FakeTable]:
        """One group; half of the time is spent before a possible weight update, half after."""
        self.served.append(request)
        if request.row in self.refuse_rows:
            return GroupSummary(request.prompt_uid, request.attempt, self.name, (), 0.0, "too long"), FakeTable("", ())
        oldest = self.version
        await asyncio.sleep(self.rng.expovariate(1 / self.mean_s))
        if self.fail_next:
            self.fail_next -= 1
            raise WorkerDied(self.name, "generate", "lost on the way")
        samples = tuple(SampleSummary(i, 10, 5 + i, "stop", oldest, self.version) for i in range(request.samples))
        table = FakeTable("rollouts", (request.prompt_uid,), request.attempt, (oldest, self.version))
        return GroupSummary(request.prompt_uid, request.attempt, self.name, samples, 0.0), table

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Take the weights."""
        await asyncio.sleep(0)
        self.version, self.digest = update.version, update.digest
        return WeightAck(self.name, self.version, "other" if self.lie_about_digest else self.digest, 0.0)

    async def health(self) -> WorkerHealth:
        """Alive."""
        return WorkerHealth(self.name, "host", 1, self.version, 0)


@dataclass
class FakeReward:
    """Reward 1.0 for odd samples, or a failure where told."""

    fail: dict[tuple[str, int], str] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    """Groups whose rewards are all equal."""

    async def score(self, rollouts: FakeTable) -> tuple[RewardSummary, FakeTable]:
        """Scalars for a group of eight at most (the fake does not know the group's size: it is told by `samples`)."""
        uid = rollouts.uids[0]
        statuses = tuple(self.fail.get((uid, i), "ok") for i in range(self.samples))
        signal = uid not in self.silent
        rewards = tuple(float(signal and i % 2) if s == "ok" else None for i, s in enumerate(statuses))
        return RewardSummary(uid, rollouts.attempt, statuses, rewards, {"fake": rewards}), FakeTable("rewards", (uid,))

    samples: int = 4


@dataclass
class FakePolicy:
    """Trains by counting; publishes a digest that follows the version."""

    rank: int = 0
    updates: list[RankPlan] = field(default_factory=list)
    prepared: list[tuple[tuple[str, int], ...]] = field(default_factory=list)
    skip_updates: bool = False
    update_s: float = 0.0
    kl_old: tuple[float, ...] = ()
    """KL(old || new) that the first updates find; 0 after them."""
    kl_old_coefs: list[float] = field(default_factory=list)
    learnt_texts: list[FakeTable | None] = field(default_factory=list)
    held: list[tuple[RankPlan, int]] = field(default_factory=list)

    async def prepare(self, request: PrepareRequest, *tables: FakeTable) -> tuple[TrainSummary, FakeTable]:
        """Every row has signal but the first."""
        keep = request.keep
        self.prepared.append(keep)
        rows = tuple(TrainRow(15, 5, i > 0) for i in range(len(keep)))
        return TrainSummary(rows, {"advantages/std": 1.0}), FakeTable("train", tuple(uid for uid, _ in keep))

    async def compute_logprobs(self, plan: RankPlan, *tables: FakeTable) -> tuple[int, FakeTable]:
        """Names the groups of the wave."""
        return 0, FakeTable("old_logprobs", tuple(uid for table in tables for uid in table.uids))

    async def hold_distributions(self, plan: RankPlan, batch: FakeTable, stride: int) -> None:
        """Keep what was asked for."""
        self.held.append((plan, stride))

    async def divergence(self) -> tuple[float, int]:
        """A quarter nat at each of ten states."""
        return 2.5, 10

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        """Count."""
        self.learnt_texts.append(texts)
        await asyncio.sleep(self.update_s)
        found = dict(enumerate(self.kl_old)).get(len(self.updates), 0.0)
        self.updates.append(plan)
        self.kl_old_coefs.append(kl_old_coef)
        return UpdateMetrics({"loss": 0.5}, {"grad_norm": 1.0, "kl_old": found}, skipped=self.skip_updates)

    async def publish_weights(self, version: int) -> WeightUpdate | None:
        """Only rank 0 has something to say."""
        if self.rank:
            return None
        return WeightUpdate(version, f"d{version}", "/dev/shm/x", "host", (), 100)

    async def save(self, directory: str) -> None:
        """One file, so that the checkpoint has something to verify."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"rank-{self.rank}").write_text(str(len(self.updates)))

    async def load(self, directory: str) -> int:
        """How many ranks saved."""
        return len(list(Path(directory).iterdir()))

    async def export(self, directory: str) -> None:
        """As save."""
        await self.save(directory)


def fake_pool(engines: list[FakeEngine], bounds: PoolBounds = BOUNDS) -> EnginePool:
    """A pool over fake engines that can replace them."""
    made = {"n": 0}

    async def spawn(name: str) -> Engine:
        await asyncio.sleep(0.001)
        made["n"] += 1
        return Engine(FakeHandle(name, FakeEngine(f"{name}#{made['n']}", random.Random(made["n"]))), "host")

    return EnginePool([Engine(FakeHandle(e.name, e), "host") for e in engines], spawn, bounds)


def gang(*policies: FakePolicy) -> Gang:
    """The policy gang over fakes."""
    return Gang("policy", [FakeHandle(f"policy-{p.rank}", p) for p in policies], 256)
