"""One run from a spec to its outcome: a cluster, the cast, the controller, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from orchestrator import algorithms
from orchestrator.actor_group import Cluster
from orchestrator.batch_source import unless_stopped
from orchestrator.cast import Casting, Scene, WorkerClasses
from orchestrator.checkpoint import Checkpoint, CheckpointStore, take_up
from orchestrator.console import Console
from orchestrator.control import ControlServer
from orchestrator.controller import Cast, Controller, RunOutcome, TrainPlan
from orchestrator.engine_pool import EnginePool, PoolBounds
from orchestrator.errors import TroupeError, UsageError, WorkerError
from orchestrator.evaluation import EvalPlan, Evaluator
from orchestrator.examples import load_examples
from orchestrator.handles import Gang
from orchestrator.ledger import Ledger
from orchestrator.metrics import MetricSinks
from orchestrator.placement import role_sizes, room
from orchestrator.prompts import DataError, PromptPool, PromptSource, evaluation_picks, load_pools
from orchestrator.rollout_source import RolloutCast, RolloutPlan, RolloutSource
from orchestrator.run_offline import OfflineCompany
from orchestrator.scaling import Crew, LeaveBounds, ScaledEngines, ScaledRewardWorkers, ScaledScorers, ScaledWorkers
from orchestrator.scheduler import RolloutScheduler, SchedulePlan
from orchestrator.scoring import RewardPool, Scorer, TokenScorer
from orchestrator.spec import Spec
from orchestrator.spec_any import AnySpec
from orchestrator.spec_files import RESOLVED_SPEC
from orchestrator.spec_offline import OfflineSpec
from orchestrator.spec_sections import RoleName
from orchestrator.texts import Pieces, TextOrder, TextPool, load_texts
from orchestrator.train_memory import TrainMemory
from orchestrator.weight_sync import DeviceSync, FileSync, WeightSync
from workers.advantage_state import AdvantageState
from workers.messages import TextSummary

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_SOLVED_AT = 1.0
"""A held-out sample with at least this reward counts as solved."""


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for."""

    spec: AnySpec
    out: Path
    resume: bool
    address: str | None


Classes = Callable[[], WorkerClasses]
"""Called once everything cheap is known to be in order: the import of the workers takes seconds."""


def run(request: RunRequest, classes: Classes, console: Console) -> RunOutcome:
    """Train as the spec says. Raises TroupeError with one clear message."""
    request.out.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(request.out / "checkpoints", request.spec.checkpoint.keep)
    store.prepare()
    found = store.latest()
    if found is not None and not request.resume:
        raise TroupeError(f"{request.out} holds a run already (step {found.step}): use --resume, or another --out")
    if request.resume and found is None:
        log.warning("nothing to resume in %s: starting from the beginning", request.out)
    _write_spec(request.spec, request.out / RESOLVED_SPEC)
    return asyncio.run(_run(request, classes, console, store, found))


def newest_step(request: RunRequest) -> int | None:
    """Step of the newest checkpoint that is whole; None where there is none."""
    found = CheckpointStore(request.out / "checkpoints", request.spec.checkpoint.keep).latest()
    return found.step if found is not None else None


def evaluate(request: RunRequest, classes: Classes, console: Console) -> dict[str, float]:
    """Evaluate the spec's model alone: on prompts with engines and reward workers, no trainer; on given examples with
    the trainers, which know its loss, and the reference. Raises UsageError where the spec names no held-out data."""
    if isinstance(request.spec, OfflineSpec):
        return asyncio.run(_evaluate_examples(request, request.spec, classes, console))
    return asyncio.run(_evaluate_prompts(request, request.spec, classes, console))


async def _run(
    request: RunRequest, classes: Classes, console: Console, store: CheckpointStore, found: Checkpoint | None
) -> RunOutcome:
    spec = request.spec
    if isinstance(spec, OfflineSpec):
        examples = load_examples(spec)
        async with open_scene(request, classes, console) as scene:
            company = OfflineCompany(spec, request.out, scene)
            return await (await company.controller(examples, store, found)).run()
    data = load_data(spec)
    async with open_scene(request, classes, console) as scene:
        company = Company(spec, request.out, scene, data)
        try:
            controller = await company.controller(store, found)
            company.listen()
            return await controller.run()
        finally:
            await company.close()


async def _evaluate_examples(
    request: RunRequest, spec: OfflineSpec, classes: Classes, console: Console
) -> dict[str, float]:
    held_out = None if spec.data.eval is None else load_examples(spec)[1]
    if held_out is None:
        raise UsageError("the spec has no data.eval: there are no held-out examples to evaluate on")
    async with open_scene(request, classes, console) as scene:
        company = OfflineCompany(spec, request.out, scene)
        evaluator = await unless_stopped(scene.stop, company.evaluator(held_out))
        return await unless_stopped(scene.stop, evaluator.run(lambda done, of: console.phase("evaluate", done, of)))


async def _evaluate_prompts(request: RunRequest, spec: Spec, classes: Classes, console: Console) -> dict[str, float]:
    if spec.evaluation is None:
        raise UsageError("the spec has no evaluation section: there is nothing to evaluate on")
    data = load_data(spec)
    roles = frozenset({"rollout", "reward"})
    async with open_scene(request, classes, console, roles) as scene:
        company = Company(spec, request.out, scene, data)
        evaluator = company.evaluator()
        if evaluator is None:
            raise TroupeError("there are no held-out prompts to evaluate on")
        try:
            running = evaluator.run(lambda done, total: console.phase("evaluate", done, total))
            return await unless_stopped(scene.stop, running)
        finally:
            await company.close()


@asynccontextmanager
async def open_scene(
    request: RunRequest, classes: Classes, console: Console, roles: frozenset[str] | None = None
) -> AsyncIterator[Scene]:
    """A cluster with the cast started on it, and all of it ended afterwards, however the run ends."""
    console.phase("start Ray", 0, 1)
    cluster = Cluster.connect(room(request.spec), request.address)
    stop = asyncio.Event()
    try:
        with _interrupts(cluster, stop):
            casting = Casting(request.spec, cluster, classes())
            console.phase("start workers", 0, 1)
            console.message("starting " + ", ".join(f"{s.workers} {s.role}" for s in role_sizes(request.spec)))
            stage = await unless_stopped(stop, casting.open(roles))
            console.phase("start workers", 1, 1)
            try:
                yield Scene(cluster, casting, stage, console, stop)
            finally:
                console.phase("close", 0, 1)
                await cluster.close(_CLOSE_TIMEOUT_S)
    except WorkerError as error:
        error.add_note(f"the workers' own logs: {cluster.logs}")
        raise
    finally:
        cluster.abandon()


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    train: PromptPool
    held_out: PromptPool | None
    texts: TextPool | None


def load_data(spec: Spec) -> RunData:
    """Read what the spec names. Raises DataError."""
    on_bad_row = spec.failures.on_bad_row
    texts = None if spec.data.ptx is None else load_texts(spec.data.ptx, on_bad_row)
    return RunData(*load_pools(spec.data, on_bad_row), texts)


class Company:
    """Joins workers, data and books into a controller."""

    def __init__(self, spec: Spec, out: Path, scene: Scene, data: RunData) -> None:
        self._spec = spec
        self._out = out
        self._scene = scene
        self._stage = scene.stage
        self._data = data
        self._pool = EnginePool(scene.stage.engines, scene.casting.engine, pool_bounds(spec))
        self._rewards = RewardPool(scene.stage.reward, spec.schedule.score_timeout_s)
        self._reference = self._reference_scorer()
        self._crew = self._scaled_crew()
        self._control = ControlServer(out, self._crew)

    async def controller(self, store: CheckpointStore, found: Checkpoint | None) -> Controller:
        """The controller, at step 0 or where the checkpoint left off."""
        spec, policy = self._spec, self._stage.policy
        if policy is None:
            raise TroupeError("there is no policy to train")
        done = found.step if found is not None else 0
        ledger = Ledger.restore(found.state["ledger"]) if found is not None else Ledger()
        prompts = PromptSource(self._data.train, spec.seed)
        texts = await self._texts(policy)
        remembered = None
        if found is not None:
            remembered = AdvantageState.model_validate(found.state["source"]["advantages"])
            prompts.restore(found.state["source"]["prompts"])
            if texts is not None:
                texts.restore(found.state["source"]["texts"])
            await self._load(found)
        scheduler = self._scheduler(ledger, prompts, done)
        makers = RolloutCast(policy, self._pool, scheduler, self._rewards, prompts, ledger, texts)
        cast = Cast(
            policy=policy,
            critic=self._stage.critic,
            source=RolloutSource(
                _rollout_plan(spec, self._out), makers, self._scene.console, self._scene.stop, remembered
            ),
            sync=weight_sync(spec, policy, self._pool, self._scene.cluster),
            evaluator=self.evaluator(),
            ledger=ledger,
            crew=self._crew,
            peaks=self._scene.cluster.peaks,
        )
        sinks = MetricSinks.open(self._out, tensorboard=spec.output.tensorboard, resume_at=done)
        memory = TrainMemory.model_validate(found.state["memory"]) if found is not None else None
        return Controller(_train_plan(spec), cast, store, sinks, self._scene.console, self._scene.stop, done, memory)

    def listen(self) -> None:
        """Take changes of the spec from now on (`troupe scale`, `troupe apply`)."""
        self._control.open()

    async def close(self) -> None:
        """Take no more changes and bring up no more workers."""
        await self._control.close()
        await self._crew.close()
        await self._pool.close()

    def evaluator(self) -> Evaluator | None:
        """Held-out evaluation, where the spec has one."""
        evaluation = self._spec.evaluation
        if evaluation is None or self._data.held_out is None:
            return None
        picks = tuple(evaluation_picks(self._data.held_out, self._spec.seed, evaluation.prompts))
        plan = EvalPlan(picks, evaluation.sampling, _SOLVED_AT, self._spec.seed)
        return Evaluator(plan, self._pool, self._rewards, self._scene.cluster.put(self._data.held_out.table))

    async def _texts(self, policy: Gang) -> TextOrder | None:
        """The texts of PPO-ptx as tokens, cut once."""
        pool, source = self._data.texts, self._spec.data.ptx
        if pool is None or source is None:
            return None
        if pool.bad_rows:
            self._scene.console.message(f"data.ptx: {pool.bad_rows} bad rows skipped; the first: {pool.problems[0]}")
        bound = self._spec.schedule.train_timeout_s
        texts = self._scene.cluster.put(pool.table)
        summary: TextSummary
        summary, table = await policy.workers[0].call_for_table("cut_texts", texts, source.max_tokens, timeout_s=bound)
        if not summary.tokens:
            raise DataError("data.ptx: no text has two tokens: there is nothing to learn")
        return TextOrder(Pieces(table, summary.tokens, pool.digest), source.texts_per_step, self._spec.seed)

    def _scheduler(self, ledger: Ledger, prompts: PromptSource, done: int) -> RolloutScheduler:
        spec, schedule = self._spec, self._spec.schedule
        plan = SchedulePlan(
            groups_per_step=schedule.prompts_per_step,
            group_size=spec.group_size,
            max_staleness=schedule.max_staleness,
            steps=schedule.steps,
            max_attempts=spec.failures.max_attempts,
            max_failed_fraction=spec.failures.max_failed_fraction,
            min_group=algorithms.row_of(spec.algorithm).min_group_size,
            seed=spec.seed,
            replaceable=algorithms.dynamic_sampling(spec.algorithm),
            greedy_baseline=spec.policy_config().advantage.baseline == "greedy",
        )
        scorer = Scorer(self._rewards, self._token_scorers())
        table = self._scene.cluster.put(self._data.train.table)
        return RolloutScheduler(plan, self._pool, scorer, ledger, prompts.next, table, done)

    def _reference_scorer(self) -> TokenScorer | None:
        reference = self._stage.reference
        return None if reference is None else TokenScorer(reference, "score", self._spec.schedule.score_timeout_s)

    def _scaled_crew(self) -> Crew:
        """The roles of the run that scale."""
        spec, casting = self._spec, self._scene.casting
        bounds = LeaveBounds(finish_s=spec.schedule.generate_timeout_s, close_s=_CLOSE_TIMEOUT_S)
        roles: dict[RoleName, ScaledWorkers] = {"reward": ScaledRewardWorkers(self._rewards, casting, bounds)}
        if "rollout" in spec.roles.scaled():
            roles["rollout"] = ScaledEngines(self._pool, casting, bounds)
        if self._reference is not None:
            roles["reference"] = ScaledScorers(self._reference, casting, bounds)
        file = self._out / RESOLVED_SPEC
        return Crew(spec, roles, self._scene.console, lambda changed: _write_spec(changed, file), str(file))

    def _token_scorers(self) -> list[TokenScorer]:
        spec, stage, bound = self._spec, self._stage, self._spec.schedule.score_timeout_s
        scorers = []
        if self._reference is not None:
            scorers.append(self._reference)
        if stage.critic is not None:
            scorers.append(TokenScorer(stage.critic, "compute_values", bound))
        if stage.policy is not None and spec.reference_in_policy:
            scorers.append(TokenScorer(stage.policy, "reference_logprobs", bound))
        if stage.policy is not None and _needs_old_logprobs(spec) and spec.schedule.max_staleness == 0:
            # While the policy stands still, its log-probs are scored group by group as generation goes on.
            scorers.append(TokenScorer(stage.policy, "compute_logprobs", bound))
        return scorers

    async def _load(self, found: Checkpoint) -> None:
        gangs = [gang for gang in (self._stage.policy, self._stage.critic) if gang is not None]
        for line in await take_up(found, gangs, self._spec.schedule.train_timeout_s):
            self._scene.console.message(line)


def _needs_old_logprobs(spec: Spec) -> bool:
    """Whether the log-probs before the update are needed: with one update a step and no KL in the reward they are
    the ones the update computes anyway."""
    how = spec.policy_config().advantage
    return spec.schedule.epochs * spec.schedule.minibatches > 1 or how.kl_coef > 0 or how.estimator == "distill"


def _train_plan(spec: Spec) -> TrainPlan:
    evaluation = spec.evaluation
    loss, penalty = spec.policy_config().loss, algorithms.kl_penalty(spec.algorithm)
    return TrainPlan(
        steps=spec.schedule.steps,
        epochs=spec.schedule.epochs,
        minibatches=spec.schedule.minibatches,
        skip_silent=loss.kl_coef == 0 and loss.entropy_coef == 0 and penalty is None,
        seed=spec.seed,
        critic_warmup=spec.roles.critic.warmup_steps if spec.roles.critic is not None else 0,
        train_timeout_s=spec.schedule.train_timeout_s,
        step_timeout_s=spec.schedule.step_timeout_s,
        probe_every_s=spec.failures.health_interval_s,
        checkpoint_every=spec.checkpoint.every_steps,
        evaluate_every=evaluation.every_steps if evaluation is not None else 0,
        evaluate_at_start=evaluation is not None and evaluation.at_start,
        evaluate_at_end=evaluation is not None and evaluation.at_end,
        nonfinite_limit=spec.failures.nonfinite_steps,
        averages=spec.roles.policy.ema_decay > 0,
        kl_stop=spec.algorithm.kl_stop or None,
        kl_states=spec.algorithm.kl_states,
        kl_penalty=penalty,
        alarm=spec.failures.alarm,
    )


def _rollout_plan(spec: Spec, out: Path) -> RolloutPlan:
    return RolloutPlan(
        old_logprobs_at_batch=_needs_old_logprobs(spec) and spec.schedule.max_staleness > 0,
        max_staleness=spec.schedule.max_staleness,
        train_timeout_s=spec.schedule.train_timeout_s,
        trajectories=out / "trajectories" if spec.output.trajectories else None,
    )


def weight_sync(spec: Spec, policy: Gang, pool: EnginePool, cluster: Cluster) -> WeightSync:
    """How the spec has the policy's weights reach the engines."""
    bound = spec.schedule.sync_timeout_s
    if spec.resolved_backend() == "shm":
        return FileSync(policy, pool, bound)
    ranks = spec.roles.rollout.tensor_parallel_size
    return DeviceSync(policy, pool, lambda engines: cluster.link(engines, ranks, bound), bound)


def pool_bounds(spec: Spec) -> PoolBounds:
    """What the pool of engines may take and wait for.

    Two groups may wait in an engine that is full, for the places that samples free between the ends of two groups.
    """
    return PoolBounds(
        max_load=max(spec.roles.rollout.max_num_seqs, spec.group_size) + 2 * spec.group_size,
        generate_timeout_s=spec.schedule.generate_timeout_s,
        probe_timeout_s=spec.failures.health_interval_s,
        probe_misses=spec.failures.health_misses,
        start_timeout_s=spec.schedule.start_timeout_s,
        restarts=spec.failures.engine_restarts,
    )


@contextmanager
def _interrupts(cluster: Cluster, stop: asyncio.Event) -> Iterator[None]:
    """SIGINT or SIGTERM once: save and leave; twice: leave at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            cluster.abandon()
            os._exit(128 + number)
        log.warning("stopping: saving first; once more to leave at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _write_spec(spec: AnySpec, file: Path) -> None:
    """Resolved: every default written out."""
    file.write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
