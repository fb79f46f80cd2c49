"""An RL run: assembles workers, data and ledger into the controller that every run uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from troupe.orchestrator.algorithms import section as algorithms
from troupe.orchestrator.algorithms.custom import group_filter
from troupe.orchestrator.audit.auditor import AuditedWeights, Auditor
from troupe.orchestrator.audit.report import AuditReport
from troupe.orchestrator.cluster.ray_cluster import Cluster
from troupe.orchestrator.cluster.worker_group import PolicyGroup, WorkerHandle
from troupe.orchestrator.controller import Controller, RunComponents, TrainSettings
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.prompts import DataError, PromptPool, PromptSource, evaluation_picks, load_pools
from troupe.orchestrator.data.summary import Pools, data_metrics, named
from troupe.orchestrator.data.texts import Pieces, TextOrder, TextPool, load_texts
from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.launcher import RunContext
from troupe.orchestrator.live.control import ControlServer
from troupe.orchestrator.live.scaling import (
    RemovalTimeouts,
    ScaledEngines,
    ScaledLinked,
    ScaledRewardWorkers,
    ScaledScorers,
    ScaledWorkers,
    WorkerScaler,
)
from troupe.orchestrator.pools.engines import Engine, EnginePool, PoolBounds
from troupe.orchestrator.pools.linked import Callers, LinkedPool, PoolLimits
from troupe.orchestrator.pools.replacement import Replacer
from troupe.orchestrator.pools.restart_budget import RestartBudget
from troupe.orchestrator.replay.step_recorder import KeeperSettings, StepKeeper
from troupe.orchestrator.reporting.recorder import RunRecorder
from troupe.orchestrator.reporting.sinks.metric_sinks import MetricSinks
from troupe.orchestrator.rollouts.evaluation import EvalSettings, Evaluator
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler, ScheduleSettings
from troupe.orchestrator.rollouts.scoring import RewardPool, Scorer, SignalTest, TokenScorer
from troupe.orchestrator.rollouts.source import RolloutComponents, RolloutSettings, RolloutSource
from troupe.orchestrator.rollouts.weight_sync import DeviceSync, FileSync, WeightSync
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.preflight import RESOLVED_SPEC
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sections import RoleName
from troupe.orchestrator.training.checkpoint import MODEL, Checkpoint, CheckpointStore, load_checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.recovery import RecoverySettings, TrainerRecovery
from troupe.orchestrator.training.state import ControllerState
from troupe.orchestrator.training.updates import RolloutUpdates, UpdateSettings
from troupe.orchestrator.why.facts import EngineQueue, Queues
from troupe.workers.contract import roles
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.contract.judges import Judge

CLOSE_TIMEOUT_S = 10.0
"""Timeout for closing one worker."""
_CONNECT_TIMEOUT_S = 60.0
"""Timeout for giving an engine the link to the environment."""


@dataclass(frozen=True)
class RunData:
    """The data sets of a run."""

    train: PromptPool
    held_out: PromptPool | None
    texts: TextPool | None
    refused: Mapping[str, int] = field(default_factory=dict)
    """Prompts that do not fit the model, of those that were rendered before the start, by the name of their section."""

    @property
    def pools(self) -> Pools:
        """The pools by the name of their section."""
        return named(self.train, self.held_out, self.texts)


def load_data(spec: RolloutSpec) -> RunData:
    """Reads the data sets of the spec. Raises DataError."""
    on_bad_row = spec.failures.on_bad_row
    texts = None if spec.data.ptx is None else load_texts(spec.data.ptx, on_bad_row)
    return RunData(*load_pools(spec.data, on_bad_row, plain=spec.model.plain), texts)


class RolloutRun:
    """Assembles workers, data and ledger into a controller."""

    def __init__(self, spec: RolloutSpec, out: Path, context: RunContext, data: RunData) -> None:
        self._spec = spec
        self._budgets: list[RestartBudget] = []
        self._out = out
        self._context = context
        self._workers = context.workers
        self._data = data
        self._pool = EnginePool(context.workers.engines, self._start_engine, pool_bounds(spec))
        self._rewards = RewardPool(
            context.workers.reward,
            spec.schedule.score_timeout_s,
            Replacer(self._start_reward_worker, self._budget("reward", spec.failures.reward_restarts)),
            spec.schedule.start_timeout_s,
        )
        self._environments = self._environment_pool()
        self._judges = self._judge_pool()
        self._reference = self._reference_scorer()
        self._scaler = self._worker_scaler()
        self._control = ControlServer(out, self._scaler)

    async def start(self) -> None:
        """Connects the engines to the environment and the reward workers to the judge, where there are some."""
        for pool in (self._environments, self._judges):
            if pool is not None:
                await pool.start()

    async def controller(self, store: CheckpointStore, found: Checkpoint | None) -> Controller:
        """The controller, at step 0 or at the step of the checkpoint."""
        spec, policy = self._spec, self._workers.policy
        if policy is None:
            raise TroupeError("the run has no policy workers: it cannot train")
        done = found.step if found is not None else 0
        ledger, advantages, state = Ledger(), None, None
        curriculum = None if spec.data.curriculum is None else Curriculum(spec.data.curriculum, spec.seed)
        prompts = PromptSource(self._data.train, spec.seed, curriculum)
        texts = await self._texts(policy)
        if found is not None:
            with found.restoring():
                ledger = Ledger.restore(found.state["ledger"])
                advantages = AdvantageState.model_validate(found.state["source"]["advantages"])
                prompts.restore(found.state["source"]["prompts"])
                if texts is not None:
                    texts.restore(found.state["source"]["texts"])
                state = ControllerState.model_validate(found.state["memory"])
            await self._load(found)
        scheduler = self._scheduler(ledger, prompts, curriculum, done)
        rollouts = RolloutComponents(policy, self._pool, scheduler, self._rewards, prompts, ledger, texts, curriculum)
        updates = RolloutUpdates(UpdateSettings.from_spec(spec), policy, self._workers.critic, self._context.console)
        sync = weight_sync(spec, policy, self._pool, self._context.cluster)
        recovery = RecoverySettings.from_spec(spec), updates, sync.push, store, self._context.launcher.restart
        cluster = self._context.cluster
        recorder = RunRecorder(cluster.calls, cluster.events, self._out, done, spec.output.keep_gib)
        components = RunComponents(
            source=RolloutSource(
                _rollout_settings(spec, self._out), rollouts, self._context.console, self._context.stop, advantages
            ),
            updates=updates,
            recovery=TrainerRecovery(*recovery, self._context.console, done),
            sync=sync,
            keeper=StepKeeper(KeeperSettings.from_spec(spec, self._out), updates.trainers),
            evaluator=self.evaluator(self._out / "evaluation" if spec.output.trajectories else None),
            ledger=ledger,
            scaler=self._scaler,
            budgets=[*self._budgets, *(pool.budget for pool in self._pools())],
            peaks=cluster.peaks,
            recorder=recorder,
            data=data_metrics(self._data.pools, self._data.refused),
        )
        sinks = MetricSinks.of_spec(spec, self._out, done)
        settings = TrainSettings.from_spec(spec, spec.failures.health_interval_s, spec.failures.alarm)
        return Controller(settings, components, store, sinks, self._context.console, self._context.stop, done, state)

    async def audit(
        self, spec: RolloutSpec, found: Checkpoint | None, controller: Controller | None = None
    ) -> AuditReport:
        """Compares engines and trainer with the judge, with the initial weights or those of the checkpoint.

        Args:
            spec: With models that are folders.
            found: The checkpoint; None: the initial weights.
            controller: The run's, which has loaded the checkpoint; None: nothing has loaded it.
        """
        policy, model = self._workers.policy, Path(spec.model.path)
        if policy is None:
            raise TroupeError("the run has no policy workers: there is nothing to audit")
        prompts = self._data.train, self._context.cluster.put(self._data.train.table)
        auditor = Auditor(spec, self._pool, policy, prompts, self._context.launcher.judge_tokens)
        self._context.console.phase("audit", 0, 1)
        if found is None:
            report = await auditor.run(AuditedWeights("the initial weights", 0, model))
        else:
            await auditor.warm()
            sync = None if controller is None else controller.components.sync
            if sync is None:
                await self._load(found)
                sync = weight_sync(spec, policy, self._pool, self._context.cluster)
            await sync.push(found.step)
            weights = AuditedWeights(f"the checkpoint of step {found.step}", found.step, found.path / MODEL, model)
            report = await auditor.run(weights)
        await auditor.forget()
        self._context.console.phase("audit", 1, 1)
        return report

    def queues(self) -> Queues:
        """What the engines have to do. May be called from any thread."""
        engines = [EngineQueue(e.name, e.state.value, e.outstanding) for e in list(self._pool.engines)]
        return Queues(tuple(engines), self._pool.starting_names, self._pool.waiting)

    def listen(self) -> None:
        """Accepts changes of the spec from now on (`troupe scale`, `troupe apply`)."""
        self._control.open()

    async def close(self) -> None:
        """Accepts no more changes and starts no more workers."""
        await self._control.close()
        await self._scaler.close()
        for pool in (self._environments, self._judges):
            if pool is not None:
                await pool.close()
        await self._rewards.close()
        await self._pool.close()

    def evaluator(self, responses: Path | None = None) -> Evaluator | None:
        """Held-out evaluation, if the spec has one; its samples are written to the folder `responses`, if given."""
        evaluation = self._spec.evaluation
        if evaluation is None or self._data.held_out is None:
            return None
        picks = tuple(evaluation_picks(self._data.held_out, self._spec.seed, evaluation.prompts))
        if self._spec.solved_at is None:
            hint = "set evaluation.solved_at to the reward of a right response"
            self._context.console.message(f"held-out accuracy is not reported for this reward: {hint}")
        settings = EvalSettings(picks, evaluation.sampling, self._spec.solved_at, self._spec.seed, responses)
        return Evaluator(settings, self._pool, self._rewards, self._context.cluster.put(self._data.held_out.table))

    async def _texts(self, policy: PolicyGroup) -> TextOrder | None:
        """The texts of PPO-ptx, tokenized and split once."""
        pool, source = self._data.texts, self._spec.data.ptx
        if pool is None or source is None:
            return None
        timeout_s = self._spec.schedule.train_timeout_s
        texts = self._context.cluster.put(pool.table)
        summary, table = await policy.cut_texts(texts, source.max_tokens, timeout_s=timeout_s)
        if not summary.tokens:
            raise DataError("data.ptx: no text has two tokens or more: there is nothing to train on")
        return TextOrder(Pieces(table, summary.tokens, pool.digest), source.texts_per_step, self._spec.seed)

    def _scheduler(
        self, ledger: Ledger, prompts: PromptSource, curriculum: Curriculum | None, done: int
    ) -> RolloutScheduler:
        spec, schedule = self._spec, self._spec.schedule
        settings = ScheduleSettings(
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
            signal=SignalTest(
                component=spec.algorithm.dynamic_sampling_on,
                mask_truncated=spec.algorithm.mask_truncated,
                keep=group_filter(spec.algorithm),
            ),
        )
        scorer = Scorer(self._rewards, self._token_scorers())
        table = self._context.cluster.put(self._data.train.table)
        observe = None if curriculum is None else curriculum.observe
        return RolloutScheduler(settings, self._pool, scorer, ledger, prompts.next, table, done, observe)

    async def _start_engine(self, name: str) -> Engine:
        """Starts an engine, to replace one or to add one."""
        engine = await self._context.launcher.engine(name)
        if self._environments is not None:
            await self._environments.connect(engine)
        return engine

    async def _start_reward_worker(self, name: str) -> WorkerHandle[roles.Reward]:
        """Starts a reward worker, to replace one or to add one."""
        worker: WorkerHandle[roles.Reward] = await self._context.launcher.replica(name)
        if self._judges is not None:
            await self._judges.connect(worker)
        return worker

    def _budget(self, role: str, limit: int) -> RestartBudget:
        """The restarts of a role."""
        budget = RestartBudget(role, limit, self._spec.failures.steps_per_restart)
        self._budgets.append(budget)
        return budget

    def _pools(self) -> list[EnginePool | LinkedPool[Any, Any, Any]]:
        """The pools that the run has."""
        return [pool for pool in (self._pool, self._environments, self._judges) if pool is not None]

    def _environment_pool(self) -> LinkedPool[roles.Environment, Engine, roles.EnvironmentLink] | None:
        failures, context = self._spec.failures, self._context
        if self._spec.roles.environment is None:
            return None

        async def connect(engine: Engine, link: roles.EnvironmentLink) -> None:
            await engine.connect_environments(link, _CONNECT_TIMEOUT_S)

        callers = Callers(lambda: self._pool.engines, connect)
        restarts = failures.environment_restarts, "environment", failures.steps_per_restart
        limits = PoolLimits(failures.health_interval_s, *restarts)
        link, launch = context.cluster.environment_link, context.launcher.replica
        return LinkedPool(self._workers.environments, callers, link, launch, limits)

    def _judge_pool(self) -> LinkedPool[roles.JudgeEngine, WorkerHandle[roles.Reward], Judge] | None:
        failures, context, config = self._spec.failures, self._context, self._spec.judge_config()
        if config is None:
            return None
        name = config.model_dump_json(exclude={"engine", "device"})  # what an answer depends on

        async def connect(worker: WorkerHandle[roles.Reward], judge: Judge) -> None:
            # A worker that scores a group answers when it has finished.
            await worker.call(roles.Reward.connect_judge, self._spec.schedule.score_timeout_s, judge)

        def link(workers: Sequence[WorkerHandle[roles.JudgeEngine]], lost: str) -> Judge:
            return context.cluster.judge_link(name, workers, lost)

        callers = Callers(lambda: self._rewards.workers, connect)
        restarts = failures.judge_restarts, "judge", failures.steps_per_restart
        limits = PoolLimits(failures.health_interval_s, *restarts)
        return LinkedPool(self._workers.judges, callers, link, context.launcher.replica, limits)

    def _reference_scorer(self) -> TokenScorer | None:
        reference, timeout_s = self._workers.reference, self._spec.schedule.score_timeout_s
        if reference is None:
            return None
        budget = self._budget("reference", self._spec.failures.reference_restarts)
        replacer = Replacer(self._context.launcher.replica, budget)
        return TokenScorer(reference, reference.score, timeout_s, replacer)

    def _worker_scaler(self) -> WorkerScaler:
        """The roles of the run that can be scaled."""
        spec, launcher = self._spec, self._context.launcher
        timeouts = RemovalTimeouts(finish_s=spec.schedule.generate_timeout_s, close_s=CLOSE_TIMEOUT_S)
        scaled: dict[RoleName, ScaledWorkers] = {
            "reward": ScaledRewardWorkers(self._rewards, launcher, timeouts, self._start_reward_worker)
        }
        if "rollout" in spec.roles.scaled():
            scaled["rollout"] = ScaledEngines(self._pool, launcher, timeouts)
        if self._reference is not None:
            scaled["reference"] = ScaledScorers(self._reference, launcher, timeouts)
        if self._environments is not None:
            scaled["environment"] = ScaledLinked(self._environments, launcher, timeouts)
        if self._judges is not None:
            scaled["judge"] = ScaledLinked(self._judges, launcher, timeouts)
        file = self._out / RESOLVED_SPEC
        return WorkerScaler(spec, scaled, self._context.console, lambda changed: write_spec(changed, file), str(file))

    def _token_scorers(self) -> list[TokenScorer]:
        """The models that score tokens of every group during generation."""
        spec, policy, critic = self._spec, self._workers.policy, self._workers.critic
        timeout_s = spec.schedule.score_timeout_s
        scorers = []
        if self._reference is not None:
            scorers.append(self._reference)
        if critic is not None:
            scorers.append(TokenScorer(critic, critic.compute_values, timeout_s))
        if policy is not None and spec.reference_in_policy:
            scorers.append(TokenScorer(policy, policy.reference_logprobs, timeout_s))
        if policy is not None and spec.needs_old_logprobs and spec.schedule.max_staleness == 0:
            # The policy is idle during synchronous generation, so it computes log-probs group by group meanwhile.
            scorers.append(TokenScorer(policy, policy.compute_logprobs, timeout_s))
        return scorers

    async def _load(self, found: Checkpoint) -> None:
        """Loads the checkpoint of policy and critic."""
        groups = [group for group in (self._workers.policy, self._workers.critic) if group is not None]
        for line in await load_checkpoint(found, groups, self._spec.schedule.train_timeout_s):
            self._context.console.message(line)


def _rollout_settings(spec: RolloutSpec, out: Path) -> RolloutSettings:
    return RolloutSettings(
        old_logprobs_at_batch=spec.needs_old_logprobs and spec.schedule.max_staleness > 0,
        max_staleness=spec.schedule.max_staleness,
        train_timeout_s=spec.schedule.train_timeout_s,
        trajectories=out / "trajectories" if spec.output.trajectories else None,
        mask_truncated=spec.algorithm.mask_truncated,
    )


def weight_sync(spec: RolloutSpec, policy: PolicyGroup, pool: EnginePool, cluster: Cluster) -> WeightSync:
    """The weight sync for the spec's back-end."""
    timeout_s = spec.schedule.sync_timeout_s
    if spec.resolved_backend() == "shm":
        return FileSync(policy, pool, timeout_s)
    ranks = spec.roles.rollout.tensor_parallel_size
    return DeviceSync(policy, pool, lambda engines: cluster.link(engines, ranks, timeout_s), timeout_s)


def pool_bounds(spec: RolloutSpec) -> PoolBounds:
    """Limits and timeouts of the engine pool.

    Two groups can queue in a full engine and take the places that finished samples free before their group ends.
    An episode that waits for its environment takes no place in the engine, so that an engine gets as many groups as
    there are episodes.
    """
    environment, engines = spec.roles.environment, spec.roles.rollout.workers
    episodes = 0 if environment is None else -(-environment.workers * environment.episodes // engines)
    places = max(spec.roles.rollout.max_num_seqs, spec.group_size, episodes)
    return PoolBounds(
        max_load=places + 2 * spec.group_size,
        generate_timeout_s=spec.schedule.generate_timeout_s,
        probe_timeout_s=spec.failures.health_interval_s,
        probe_misses=spec.failures.health_misses,
        start_timeout_s=spec.schedule.start_timeout_s,
        restarts=spec.failures.engine_restarts,
        steps_per_restart=spec.failures.steps_per_restart,
    )


def write_spec(spec: RunSpec, file: Path) -> None:
    """Writes the resolved spec, with every default, for its owner only."""
    write_atomic(file, yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False), PRIVATE)
