"""Workers without Ray and without models, for tests of the orchestrator and for benchmarks of the controller.

`FakeEngine`, `FakeReward`, `FakePolicy` and `FakeCritic` implement the protocols of their roles
(`workers/contract/roles.py`) in this process; `LocalWorker` is their handle. They cost as little as possible, so that a
benchmark can measure the controller around them. `FaultyEngine`, `FaultyReward` and `FaultyWorker` fail on request in
every way a worker can, and record what they were asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import pyarrow as pa

from troupe.orchestrator.cluster.event_loop import within
from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.cluster.worker_group import CriticGroup, PolicyGroup, TrainerGroup
from troupe.orchestrator.controller import Controller, RunOutcome
from troupe.orchestrator.errors import WorkerDied, WorkerRaised, WorkerTimeout
from troupe.orchestrator.pools.engine import Engine
from troupe.orchestrator.pools.engines import EnginePool
from troupe.orchestrator.pools.pool_weights import PoolWeights
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointStore
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.recovery import Push, TrainerRecovery
from troupe.orchestrator.training.updates import Updates
from troupe.workers.contract import roles
from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.judges import Judge, JudgeLink
from troupe.workers.contract.messages import (
    KEPT_BATCH,
    SHARED_CALL_S,
    FinishedSamples,
    GroupRequest,
    GroupSummary,
    KeepRequest,
    KeptFile,
    KeptTable,
    PrepareRequest,
    RankPlan,
    ReferenceScores,
    RewardRequest,
    RewardSummary,
    SampleKey,
    SampleSummary,
    SaveStatus,
    ScoredGroups,
    ScoreSummary,
    TextCut,
    TextSummary,
    TrainRow,
    TrainSummary,
    Unscored,
    UpdateMetrics,
    WeightAck,
    WeightsSent,
    WeightUpdate,
    WorkerGone,
    WorkerHealth,
)
from troupe.workers.contract.roles import EngineLink, EnvironmentLink, ReferenceLink, Reply
from troupe.workers.data.kept_tables import write_tables

P = ParamSpec("P")
R = TypeVar("R")
SpecT = TypeVar("SpecT", bound=RunSpec)
W_co = TypeVar("W_co", bound=roles.Worker, covariant=True)

PROMPT_TOKENS, RESPONSE_TOKENS = 64, 256


def with_fields(spec: SpecT, **sections: Mapping[str, Any]) -> SpecT:
    """The spec with other values of some fields, by section."""
    fields = spec.model_dump()
    changed = {name: (fields[name] or {}) | dict(section) for name, section in sections.items()}
    return type(spec).model_validate(fields | changed)


_SPEC = RolloutSpec.model_validate(
    {
        "name": "fakes",
        "seed": 17,
        "model": {"path": "model"},
        "roles": {"rollout": {}, "policy": {}, "reward": {"functions": [{"name": "exact_match"}]}},
        "algorithm": {"name": "grpo", "group_size": 4, "kl_states": 0, "kl": {"coef": 0.0}},
        "schedule": {
            "steps": 4,
            "prompts_per_step": 5,
            "train_timeout_s": 60.0,
            "step_timeout_s": 60.0,
            "start_timeout_s": 60.0,
            "generate_timeout_s": 60.0,
        },
        "data": {"train": {"kind": "jsonl", "path": "prompts.jsonl"}},
        "checkpoint": {"every_steps": 2},
        "failures": {
            "nonfinite_steps": 2,
            "failed_saves": 0,
            "health_interval_s": 1.0,
            "health_misses": 1,
            "engine_restarts": 2,
            "trainer_restarts": 0,
            "steps_per_restart": 0,
            "replay_steps": 4,
        },
        "output": {"trajectories": False, "replay_steps": 0},
    }
)


def fake_spec(**sections: Mapping[str, Any]) -> RolloutSpec:
    """A spec of workers that answer at once: four steps of five groups of four, a checkpoint after every second step.

    Args:
        sections: Other values of fields, by section.
    """
    return with_fields(_SPEC, **sections)


def pool_spec(max_load: int = 64, restarts: int = 2) -> RolloutSpec:
    """A spec whose engines have at most `max_load` unfinished samples."""
    return fake_spec(
        roles={"rollout": {"max_num_seqs": max_load - 2}},
        algorithm={"group_size": 1},
        failures={"engine_restarts": restarts, "health_interval_s": 0.05},
    )


class FakeTable(NamedTuple):
    """In place of a reference to an Arrow table; describes the table's content."""

    kind: str
    uids: tuple[str, ...]
    attempt: int = 0
    versions: tuple[int, ...] = ()
    samples: int = 4


class LocalWorker(Generic[W_co]):
    """Handle of a worker in this process."""

    def __init__(self, name: str, target: W_co) -> None:
        self._name = name
        self.target = target
        self.dead = False

    @property
    def name(self) -> str:
        """Role and index."""
        return self._name

    async def call(
        self, method: Callable[Concatenate[W_co, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """See `WorkerHandle.call`. A call in progress notices the worker's death when it ends."""
        name = method.__name__
        if self.dead:
            raise WorkerDied(self._name, name, "the process is gone")
        try:
            answer = await within(timeout_s, getattr(self.target, name)(*args, **kwargs))
        except TimeoutError:
            raise WorkerTimeout(self._name, name, f"no answer in {timeout_s:g} s") from None
        except WorkerGone as error:
            self.dead = True
            raise WorkerDied(self._name, name, str(error)) from None
        if self.dead:
            raise WorkerDied(self._name, name, "the process is gone")
        return answer

    async def call_for_table(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, Any]]],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, Any]:
        """See `WorkerHandle.call_for_table`."""
        return await self.call(method, timeout_s, *args, **kwargs)

    async def call_for_tables(
        self,
        method: Callable[Concatenate[W_co, P], Reply[tuple[R, *tuple[Any, ...]]]],
        tables: int,
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[R, list[Any]]:
        """See `WorkerHandle.call_for_tables`."""
        summary, *found = await self.call(method, timeout_s, *args, **kwargs)
        return summary, found

    def kill(self) -> None:
        """Ends the worker."""
        self.dead = True


class FaultyWorker(LocalWorker[W_co]):
    """A handle that records its calls, notices death at once, and can be frozen."""

    def __init__(self, name: str, target: W_co) -> None:
        super().__init__(name, target)
        self.frozen = False
        self.calls: list[str] = []
        self._death = asyncio.Event()

    async def call(
        self, method: Callable[Concatenate[W_co, P], Reply[R]], timeout_s: float, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """See `WorkerHandle.call`. A frozen worker does not answer within the timeout."""
        name = method.__name__
        self.calls.append(name)
        if self.dead:
            raise WorkerDied(self._name, name, "the process is gone")
        work = asyncio.ensure_future(self._answer(name, *args, **kwargs))
        death = asyncio.ensure_future(self._death.wait())
        done, _ = await asyncio.wait({work, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if work in done:
            return work.result()
        work.cancel()
        if self.dead:
            raise WorkerDied(self._name, name, "the process is gone")
        raise WorkerTimeout(self._name, name, f"no answer in {timeout_s:g} s")

    def kill(self) -> None:
        """As kill -9."""
        super().kill()
        self._death.set()

    async def _answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        while self.frozen:
            await asyncio.sleep(0.01)
        answer = getattr(self.target, method)(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer


Seconds = Callable[[GroupRequest], float]
"""Seconds that a group takes an engine. Raises WorkerGone where it kills the engine."""


def no_work(request: GroupRequest) -> float:
    """Engines answer immediately."""
    return 0.0


@lru_cache(maxsize=64)
def _samples(count: int, oldest: int, newest: int) -> tuple[SampleSummary, ...]:
    return tuple(SampleSummary(i, PROMPT_TOKENS, RESPONSE_TOKENS, "stop", oldest, newest) for i in range(count))


@lru_cache(maxsize=8)
def _alternating(count: int) -> tuple[float, ...]:
    return tuple(float(i % 2) for i in range(count))


class FakeEngine:
    """Samples a group by waiting; even without work, the answer comes in a later turn of the event loop."""

    def __init__(self, name: str, seconds: Seconds = no_work) -> None:
        self.name = name
        self._seconds = seconds
        self.version = 0
        self.digest = "d0"

    async def start(self) -> WorkerHealth:
        """Starts."""
        return await self.health()

    async def generate(
        self, request: GroupRequest, prompts: object, finished: Any = None
    ) -> tuple[GroupSummary, FakeTable]:
        """One group, with the versions before and after the wait; finished samples stay as they were."""
        oldest = self.version
        await asyncio.sleep(self._seconds(request))
        before = {sample.sample_index: sample for sample in request.finished}
        new, versions = self._sampled(request.samples, oldest), (oldest, self.version)
        samples = tuple(before.get(sample.sample_index, sample) for sample in new) if before else new
        table = FakeTable("rollouts", (request.prompt_uid,), request.attempt, versions, request.samples)
        return GroupSummary(request.prompt_uid, request.attempt, self.name, samples, 0.0), table

    async def finished_samples(self) -> tuple[tuple[FinishedSamples, ...], FakeTable]:
        """None: a group is finished as a whole."""
        return (), FakeTable("rollouts", ())

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Serves the version."""
        await asyncio.sleep(0)
        self.version, self.digest = update.version, update.digest
        return WeightAck(self.name, update.version, update.digest, 0.0)

    async def write_weights(self, update: WeightUpdate, payload: Any) -> None:
        """Writes nothing."""

    async def change_weights(self, update: WeightUpdate, delta: Any) -> bool:
        """Has no version to change."""
        return False

    async def sleep(self) -> None:
        """Rests."""

    async def wake(self) -> None:
        """Wakes."""

    async def health(self) -> WorkerHealth:
        """Healthy."""
        await asyncio.sleep(0)
        return WorkerHealth(self.name, "host", 1, self.version, 0)

    async def close(self) -> None:
        """Nothing to close."""

    async def connect_judge(self, judge: JudgeLink) -> None:
        """Takes a link."""

    async def connect_reference(self, link: ReferenceLink) -> None:
        """Takes a link."""

    async def connect_environments(self, name: str, link: EnvironmentLink) -> None:
        """There is no environment."""

    async def reset_prefix_cache(self) -> bool:
        """There is no cache."""
        return True

    async def transfer_init(self, init_info: dict[str, Any]) -> None:
        """Joins."""

    async def transfer_start(self) -> None:
        """Pauses."""

    async def transfer_receive(self, update_info: dict[str, Any]) -> None:
        """Receives nothing."""

    async def transfer_finish(self, version: int, digest: str) -> WeightAck:
        """Serves the version."""
        self.version = version
        return WeightAck(self.name, version, digest, 0.0)

    def _sampled(self, count: int, oldest: int) -> tuple[SampleSummary, ...]:
        return _samples(count, oldest, self.version)


class FaultyEngine(FakeEngine):
    """Takes a random time for a group, refuses prompts and fails on request."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        mean_s: float = 0.002,
        refuse_rows: frozenset[int] = frozenset(),
        lie_about_digest: bool = False,
        fail_next: int = 0,
    ) -> None:
        """`fail_next` calls of `generate` fail."""
        super().__init__(name, lambda request: rng.expovariate(1 / self.mean_s))
        self.mean_s = mean_s
        self.load_s = 0.0
        """Seconds that it takes to load weights."""
        self.refuse_rows = refuse_rows
        self.lie_about_digest = lie_about_digest
        self.fail_next = fail_next
        self.served: list[GroupRequest] = []
        self.truncated: frozenset[int] = frozenset()
        """Samples of every group that are cut at the longest response."""
        self.candidates = 0
        """Answers from other sources to every prompt."""

    async def generate(
        self, request: GroupRequest, prompts: object, finished: Any = None
    ) -> tuple[GroupSummary, FakeTable]:
        """One group, a refusal or a failure."""
        self.served.append(request)
        if request.row in self.refuse_rows:
            return GroupSummary(request.prompt_uid, request.attempt, self.name, (), 0.0, "too long"), FakeTable("", ())
        summary, table = await super().generate(request, prompts, finished)
        answer = summary, table
        if request.candidates and self.candidates:
            others = range(request.samples, request.samples + self.candidates)
            given = tuple(SampleSummary(i, 10, 50 + i, "stop", self.version, self.version) for i in others)
            answer = replace(summary, candidates=given), table._replace(samples=others.stop)
        if self.fail_next:
            self.fail_next -= 1
            raise WorkerDied(self.name, "generate", "lost on the way")
        return answer

    async def update_weights(self, update: WeightUpdate) -> WeightAck:
        """Serves the version, after the time it takes; may acknowledge another digest."""
        if self.load_s:
            await asyncio.sleep(self.load_s)
        ack = await super().update_weights(update)
        return WeightAck(ack.engine, ack.version, "other" if self.lie_about_digest else ack.digest, 0.0)

    def _sampled(self, count: int, oldest: int) -> tuple[SampleSummary, ...]:
        reasons = ["length" if i in self.truncated else "stop" for i in range(count)]
        return tuple(SampleSummary(i, 10, 5 + i, reasons[i], oldest, self.version) for i in range(count))


class FakeReward:
    """Rewards 0 and 1 in turn; writes nothing."""

    async def start(self) -> WorkerHealth:
        """Starts."""
        return await self.health()

    async def connect_judge(self, judge: Judge) -> None:
        """Uses no judge."""

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        """One group."""
        await asyncio.sleep(0)
        (uid,), samples = rollouts.uids, rollouts.samples
        given = _alternating(samples)
        return RewardSummary(uid, rollouts.attempt, ("ok",) * samples, given, {"fake": given}), rollouts

    async def score_groups(self, asked: Sequence[RewardRequest], *rollouts: FakeTable) -> tuple[ScoredGroups, Any]:
        """See `Reward.score_groups`."""
        now = asyncio.get_running_loop().time
        until, scored = now() + SHARED_CALL_S, list[tuple[RewardSummary, FakeTable]]()
        for one, table in zip(asked, rollouts, strict=True):
            if scored and now() > until:
                break
            scored.append(await self.score(table, one.rewards, one.vote))
        return ScoredGroups(tuple([summary for summary, _ in scored])), *[table for _, table in scored]

    async def score_references(self, model: str, references: Any) -> ReferenceScores:
        """Every reference scores 1."""
        return ReferenceScores((1.0,) * references.num_rows)

    async def write_trajectories(self, path: str, step: int, unscored: Unscored, *tables: FakeTable) -> int:
        """Writes nothing."""
        return 0

    async def write_evaluation(self, path: str, step: int, *tables: FakeTable) -> int:
        """Writes nothing."""
        return 0

    async def keep_groups(
        self, folder: str, request: KeepRequest, *tables: FakeTable
    ) -> tuple[dict[str, KeptTable], ...]:
        """Writes what describes the tables of each group: a file for each of their kinds."""
        kept = []
        for number, (uid, _) in enumerate(request.groups):
            own = {table.kind: table for table in tables if uid in table.uids}
            places = {kind: KeptTable(kind, f"{kind}-{request.part:03d}-{number}", 0) for kind in own}
            for kind, table in own.items():
                (Path(folder) / places[kind].file).write_text(json.dumps(table))
            kept.append(places)
        return tuple(kept)

    async def read_group(self, folder: str, kept: KeptTable) -> tuple[int, FakeTable]:
        """Reads what `keep_groups` wrote."""
        kind, uids, attempt, versions, samples = json.loads((Path(folder) / kept.file).read_text())
        return samples, FakeTable(kind, tuple(uids), attempt, tuple(versions), samples)

    async def health(self) -> WorkerHealth:
        """Healthy."""
        return WorkerHealth("reward-0", "host", 1, 0, 0)

    async def close(self) -> None:
        """Nothing to close."""


class FaultyReward(FakeReward):
    """Fails on chosen samples; gives chosen groups equal rewards."""

    def __init__(self, fail: dict[tuple[str, int], str] | None = None, uniform: frozenset[str] = frozenset()) -> None:
        """`fail`: status by (prompt_uid, sample_index). `uniform`: groups whose rewards are all equal."""
        self.fail = fail or {}
        self.uniform = uniform

    async def score(
        self, rollouts: FakeTable, rewards: str = "", vote: bool = False
    ) -> tuple[RewardSummary, FakeTable]:
        """One group."""
        uid = rollouts.uids[0]
        statuses = tuple(self.fail.get((uid, i), "ok") for i in range(rollouts.samples))
        differs = uid not in self.uniform
        given = tuple(float(differs and i % 2) if s == "ok" else None for i, s in enumerate(statuses))
        return RewardSummary(uid, rollouts.attempt, statuses, given, {"fake": given}), FakeTable("rewards", (uid,))


class FakeTrainer:
    """The part of a training rank that is the same for every model; trains by counting."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.updates: list[RankPlan] = []
        self.learned: list[str] = []
        """What its weights consist of: every update since the initial model, with its batch."""
        self.write_s = 0.0
        """Time in which it writes a save in the background."""
        self.not_finite: dict[SampleKey, str] = {}
        """Why samples have no finite score."""
        self.saving: tuple[str, asyncio.Task[SaveStatus]] | None = None

    def summary_of(self, uids: Sequence[str]) -> ScoreSummary:
        """What it says of the scores of these groups."""
        return ScoreSummary(0, {key: why for key, why in self.not_finite.items() if key[0] in uids})

    async def host(self) -> str:
        """One machine for all."""
        return "host"

    async def rendezvous(self, *, one_host: bool) -> tuple[str, int]:
        """An address nobody connects to."""
        return "127.0.0.1", 1

    async def packs(self) -> bool:
        """No."""
        return False

    async def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Starts."""
        return await self.health()

    async def save(self, directory: str) -> None:
        """Writes one file, so that the checkpoint has something to verify."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"rank-{self.rank}").write_text(json.dumps(self.learned))

    async def begin_save(self, directory: str, model: str = "", average: str = "") -> None:
        """As `save` and the exports, later, with what was learned until now. One at a time."""
        if self.saving is not None and not self.saving[1].done():
            raise RuntimeError(f"{self.saving[0]} is still being written")
        copy = FakeTrainer(self.rank)
        copy.learned = list(self.learned)
        self.saving = directory, asyncio.create_task(self._write(copy, [directory, *filter(None, (model, average))]))

    async def _write(self, copy: FakeTrainer, folders: Sequence[str]) -> SaveStatus:
        await asyncio.sleep(self.write_s)
        for folder in folders:
            await copy.save(folder)
        return SaveStatus(done=True)

    async def save_status(self, directory: str) -> SaveStatus:
        """Whether it is written."""
        if self.saving is None or self.saving[0] != directory:
            raise WorkerRaised(f"rank-{self.rank}", "save_status", f"{directory} is not being written")
        return self.saving[1].result() if self.saving[1].done() else SaveStatus(done=False)

    async def offload_states(self) -> int:
        """Has nothing to move."""
        return 0

    async def try_save(self, directory: str) -> None:
        """As `save`."""
        await self.save(directory)

    async def load(self, directory: str) -> int:
        """Loads what any rank saved, for all learn the same; number of ranks that saved."""
        files = list(Path(directory).iterdir())
        saved = [file for file in files if file.name.startswith("rank-")]
        self.learned = json.loads(saved[0].read_text()) if saved else []
        return len(files)

    async def digest(self) -> str:
        """Of everything learned."""
        return hashlib.sha256(json.dumps(self.learned).encode()).hexdigest()

    async def keep_batch(
        self, folder: str, batch: FakeTable, texts: FakeTable | None = None, rows: Sequence[int] = ()
    ) -> dict[str, KeptFile]:
        """Writes the groups of the table."""
        return write_tables(folder, {KEPT_BATCH: pa.table({"uids": list(batch.uids)})})

    async def export(self, directory: str, average: bool = False) -> None:
        """As `save`."""
        await self.save(directory)

    async def health(self) -> WorkerHealth:
        """Healthy."""
        return WorkerHealth(f"rank-{self.rank}", "host", 1, 0, 0)

    async def close(self) -> None:
        """Nothing to close."""


class FakeCritic(FakeTrainer):
    """A critic that trains by counting."""

    async def compute_values(self, plan: RankPlan, *rollouts: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        """Lists the groups of the wave, with the number of updates that the critic has made."""
        uids = tuple(uid for table in rollouts for uid in table.uids)
        return self.summary_of(uids), FakeTable("values", uids, versions=(len(self.learned),))

    async def update(self, plan: RankPlan, batch: FakeTable) -> UpdateMetrics:
        """Counts."""
        self.updates.append(plan)
        self.learned.append(f"{plan.total_loss_tokens} tokens from {batch.uids[0]}")
        return UpdateMetrics({"loss": 0.5}, {"grad_norm": 1.0})


class FakePolicy(FakeTrainer):
    """A policy that trains by waiting; publishes a digest that follows the version."""

    def __init__(self, rank: int = 0, update_s: float = 0.0) -> None:
        super().__init__(rank)
        self.update_s = update_s
        self.prepared: list[tuple[tuple[str, int], ...]] = []
        """(prompt_uid, sample_index) of the samples of every batch."""
        self.masked: list[tuple[tuple[str, int], ...]] = []
        """Those of them without loss."""
        self.candidates: list[tuple[tuple[str, int], ...]] = []
        """Those of them that come from other sources."""
        self.sources: list[Mapping[str, str]] = []
        self.algorithms: list[Mapping[str, str]] = []
        """Source of every prompt of a batch, within which statistics are computed."""
        self.values: list[dict[str, list[int]]] = []
        """Of every batch, which versions of the critic gave the values of each of its groups."""
        self.skip_updates = False
        self.overflows: frozenset[int] | None = None
        """Updates, counted from 0, in which the scaled gradient overflows; None: it is not scaled."""
        self.kl_old: tuple[float, ...] = ()
        """KL(old || new) that the first updates find; 0 after them."""
        self.kl_old_coefs: list[float] = []
        self.learned_texts: list[FakeTable | None] = []
        self.held: list[tuple[RankPlan, int]] = []
        self.divergences: list[float] = []
        self.step_lengths = [1.0]
        self.releases = 0

    async def shares_prompts(self) -> bool:
        """No."""
        return False

    async def prepare(self, request: PrepareRequest, *tables: object) -> tuple[TrainSummary, FakeTable]:
        """A row for each sample."""
        await asyncio.sleep(0)
        self.prepared.append(request.keep)
        self.masked.append(request.masked)
        self.candidates.append(request.candidates)
        self.sources.append(request.sources)
        self.algorithms.append(request.algorithms)
        # Over Ray (`benchmarks.controller_cost`) tables are references.
        values = [table for table in tables if isinstance(table, FakeTable) and table.kind == "values"]
        uids = dict(request.keep)
        self.values.append({uid: [table.versions[0] for table in values if uid in table.uids] for uid in uids})
        table = FakeTable("train", tuple([uid for uid, _ in request.keep]))
        return TrainSummary(self._rows(request), {"advantages/std": 1.0}), table

    async def compute_logprobs(self, plan: RankPlan, *rollouts: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        """Lists the groups of the wave."""
        uids = tuple(uid for table in rollouts for uid in table.uids)
        return self.summary_of(uids), FakeTable("old_logprobs", uids)

    async def reference_logprobs(self, plan: RankPlan, *rollouts: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        """Lists the groups of the wave."""
        return ScoreSummary(0), FakeTable("ref_logprobs", tuple(uid for table in rollouts for uid in table.uids))

    async def teacher_logprobs(self, plan: RankPlan, name: str, *rollouts: FakeTable) -> tuple[ScoreSummary, FakeTable]:
        """Lists the groups of the wave, and the number of updates before it."""
        uids = tuple(uid for table in rollouts for uid in table.uids)
        return self.summary_of(uids), FakeTable(name, uids, versions=(len(self.learned),))

    async def token_records(self) -> tuple[int, FakeTable]:
        """Keeps none."""
        return 0, FakeTable("records", ())

    async def cut_texts(self, texts: FakeTable, cuts: Sequence[TextCut]) -> tuple[tuple[TextSummary, ...], FakeTable]:
        """No text."""
        return tuple(TextSummary(()) for _ in cuts), texts

    async def store_distributions(self, plan: RankPlan, batch: FakeTable, stride: int, weights: bool = False) -> None:
        """Records the request."""
        self.held.append((plan, stride))
        self.step_lengths = [1.0]

    async def divergence(self) -> tuple[float, int]:
        """At each of ten states the next of `divergences`, or a quarter nat times the step's length squared."""
        whole = self.divergences.pop(0) if self.divergences else 0.25
        return 10 * whole * self.step_lengths[-1] ** 2, 10

    async def shorten_step(self, factor: float) -> tuple[float, int]:
        """Records the step's length."""
        self.step_lengths.append(self.step_lengths[-1] * factor)
        return await self.divergence()

    async def discard_stored(self) -> None:
        """Counts."""
        self.releases += 1

    async def update(
        self, plan: RankPlan, batch: FakeTable, kl_old_coef: float = 0.0, texts: FakeTable | None = None
    ) -> UpdateMetrics:
        """Counts."""
        self.learned_texts.append(texts)
        await asyncio.sleep(self.update_s)
        found = self.kl_old[len(self.updates)] if len(self.updates) < len(self.kl_old) else 0.0
        self.updates.append(plan)
        self.learned.append(f"{plan.total_loss_tokens} tokens from {batch.uids[0]}")
        self.kl_old_coefs.append(kl_old_coef)
        values, overflowed = {"grad_norm": 1.0, "kl_old": found}, len(self.updates) - 1 in (self.overflows or ())
        if self.overflows is not None:
            values |= {"loss_scale": 1024.0, "overflows": float(overflowed)}
        return UpdateMetrics({"loss": 0.5}, values, skipped=self.skip_updates or overflowed)

    async def publish_weights(self, version: int, base: str = "") -> WeightUpdate | None:
        """An update that no file backs; only rank 0 returns it."""
        await asyncio.sleep(0)
        return None if self.rank else WeightUpdate(version, f"d{version}", "/dev/shm/x", "host", (), 100)

    async def read_weights(self, update: WeightUpdate) -> tuple[int, Any]:
        """The digest in place of the bytes."""
        return update.nbytes, update.digest

    async def read_delta(self, update: WeightUpdate) -> tuple[int, Any]:
        """The whole payload is cheaper."""
        return 0, ""

    async def connect_engines(self, link: EngineLink) -> None:
        """Connects to nothing."""

    async def send_weights(self, version: int) -> WeightsSent | None:
        """Sends nothing."""
        return None

    def _rows(self, request: PrepareRequest) -> tuple[TrainRow, ...]:
        """Every row but the first has an advantage."""
        rows = tuple(TrainRow(15, 5, i > 0) for i in range(len(request.keep)))
        return tuple(row for row, key in zip(rows, request.keep, strict=True) if key not in request.masked)


def fake_pool(
    engines: Sequence[FaultyEngine], spec: RolloutSpec | None = None, weights: PoolWeights | None = None
) -> EnginePool:
    """A pool over fake engines that can replace them."""
    started = 0

    async def spawn(name: str) -> Engine:
        nonlocal started
        await asyncio.sleep(0.001)
        started += 1
        return Engine(FaultyWorker(name, FaultyEngine(f"{name}#{started}", random.Random(started))), "host")

    workers = [Engine(FaultyWorker(e.name, e), "host") for e in engines]
    return EnginePool(workers, spawn, spec or pool_spec(), weights or PoolWeights())


def policy_group(*policies: FakePolicy, calls: RecoverableCalls | None = None) -> PolicyGroup:
    """The policy's ranks over fakes."""
    return PolicyGroup("policy", [FaultyWorker(f"policy-{p.rank}", p) for p in policies], 256, calls=calls)


def critic_group(*critics: FakeCritic, calls: RecoverableCalls | None = None) -> CriticGroup:
    """The critic's ranks over fakes."""
    return CriticGroup("critic", [FaultyWorker(f"critic-{c.rank}", c) for c in critics], 256, calls=calls)


def fakes_of(group: TrainerGroup[Any]) -> list[FaultyWorker[Any]]:
    """The ranks of a group of fakes."""
    return [worker for worker in group.workers if isinstance(worker, FaultyWorker)]


async def restart_fakes(groups: Sequence[TrainerGroup[Any]]) -> None:
    """Replaces every rank by a new fake with the initial model, which has learned nothing."""
    for group in groups:
        ranks = fakes_of(group)
        for worker in ranks:
            worker.kill()
        await group.restart([FaultyWorker(rank.name, type(rank.target)(rank.target.rank)) for rank in ranks], 1.0)


class FakeRun(ABC, Generic[SpecT]):
    """A controller with the fakes that it needs, which a subclass builds."""

    def __init__(self, out: Path, spec: SpecT, resume: bool) -> None:
        self.out = out
        self.spec = spec
        self.resume = resume
        self.stop = asyncio.Event()
        self.trainer_calls = RecoverableCalls()
        self.found: Checkpoint | None = None
        """The checkpoint that the run resumes from."""
        self.taken_over = 0
        """Finished samples that the run has taken over from it."""

    def change(self, **sections: Mapping[str, Any]) -> None:
        """Give fields of the spec other values, by section."""
        self.spec = with_fields(self.spec, **sections)

    @abstractmethod
    def build(self) -> Controller:
        """Build the controller. Called inside the running event loop."""

    async def start(self) -> Controller:
        """Build the controller, with the state of the checkpoint."""
        controller = self.build()
        if self.found is not None:
            self.taken_over = await controller.components.source.restore(self.found)
        return controller

    def open_store(self) -> tuple[CheckpointStore, Checkpoint | None, Ledger]:
        """The run's checkpoints, the one to resume from, and the ledger as it was then."""
        store = CheckpointStore(self.out / "checkpoints", 2)
        store.prepare()
        found = self.found = store.latest() if self.resume else None
        return store, found, Ledger() if found is None else Ledger.restore(found.state["ledger"])

    def recovery(
        self, updates: Updates, push: Push | None, store: CheckpointStore, console: Console, done: int
    ) -> TrainerRecovery:
        """Restarts trainers as new fakes."""
        return TrainerRecovery(self.spec, self.trainer_calls, updates, push, store, restart_fakes, console, done)

    def run(self) -> RunOutcome:
        """Run to the end."""

        async def run() -> RunOutcome:
            controller = await self.start()
            return await controller.run()

        return asyncio.run(run())

    def run_until(self, version: int) -> RunOutcome:
        """Run, and set `stop` once the policy has this version."""

        async def run() -> RunOutcome:
            controller = await self.start()

            async def stop() -> None:
                while controller.version < version:
                    await asyncio.sleep(0)
                self.stop.set()

            stopper = asyncio.create_task(stop())
            outcome = await controller.run()
            await stopper
            return outcome

        return asyncio.run(run())

    def lines(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
