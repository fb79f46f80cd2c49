"""An RL run: assembles workers, data and ledger into the controller that every run uses."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.controller import Controller, RunComponents
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.mixture import curriculum_of, group_settings, prompt_order
from troupe.orchestrator.data.prompts import PromptOrder, evaluation_picks
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.summary import RunData
from troupe.orchestrator.data.summary import data_metrics
from troupe.orchestrator.data.texts import Pieces, SourcePieces, TextOrder
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.insight.audit.auditor import AuditedWeights, Auditor, AuditReport, token_scorer
from troupe.orchestrator.live.control import ControlServer
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.pools.queues import EngineQueue, Queues
from troupe.orchestrator.rollouts.evaluation import (
    EvaluationBeside,
    Evaluator,
    HeldOutSet,
    Sampler,
    engine_sampler,
    levels_of,
)
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, EvaluationLog, described_sets
from troupe.orchestrator.rollouts.handover import MemoryHandover
from troupe.orchestrator.rollouts.kept_samples import read_samples
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import Scorer
from troupe.orchestrator.rollouts.source import RolloutComponents, RolloutSource
from troupe.orchestrator.rollouts.weight_sync import weight_sync
from troupe.orchestrator.run_checkpoints import RunCheckpoints
from troupe.orchestrator.runs.context import RunContext
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.spec.checks.machine import RESOLVED_SPEC
from troupe.orchestrator.spec.rollout import GroupSettings, RolloutSpec
from troupe.orchestrator.spec.sections import SourceShare
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.training.checkpoint import MODEL, Checkpoint, load_checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.profiling import UpdateProfiles
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.contract.advantage_state import AdvantageState
from troupe.workers.contract.messages import TextCut


class RolloutRun:
    """Assembles workers, data and ledger into a controller."""

    def __init__(self, spec: RolloutSpec, out: Path, context: RunContext, data: RunData) -> None:
        self._spec = spec
        self._out = out
        self._context = context
        self._workers = context.workers
        self._data = data
        self._pools = RunPools(spec, context)
        self._pool = self._pools.engines
        self._rewards = self._pools.rewards
        policy = self._workers.policy
        self._handover: MemoryHandover | None = None
        """None if engines and policy share no GPU, or share its memory all the time."""
        if policy is not None and spec.resolved_sleep != "none":
            self._handover = MemoryHandover(self._pool, policy, spec.schedule.sync_timeout_s)
        self._scaler = WorkerScaler(
            spec,
            pools=self._pools.by_role,
            seats=context.launcher,
            console=context.console,
            save=self._follow,
            file=str(out / RESOLVED_SPEC),
        )
        self._control = ControlServer(out, self._scaler)

    def _follow(self, changed: RolloutSpec) -> None:
        """Takes over the changed spec of a run that is scaled, and writes it. Raises OSError."""
        self._pool.follow(changed)
        changed.write(self._out / RESOLVED_SPEC)

    async def start(self) -> None:
        """Connects the engines to the environments and the reward workers to the judges, if the run has them."""
        await self._pools.start()

    async def controller(self, checkpoints: RunCheckpoints) -> Controller:
        """The controller, at step 0 or at the step of the checkpoint."""
        spec, policy = self._spec, self._workers.require_policy()
        found, done = checkpoints.found, checkpoints.done
        settings = group_settings(spec, self._data.train)
        source_of = (lambda row: settings[row].source) if spec.data.mixture else None
        ledger, advantages = Ledger(source_of), None
        curriculum = curriculum_of(spec, settings)
        prompts = prompt_order(spec, self._data.train, curriculum)
        profiles = UpdateProfiles(spec.output.profile, self._out)
        updates = RolloutUpdates(spec, policy, self._workers.critic, self._context.console, profiles)
        sync = weight_sync(spec, policy, self._pool, self._context.cluster)
        recovery = TrainerRecovery(
            spec=spec,
            updates=updates,
            push=sync.push,
            store=checkpoints.store,
            restart=self._context.launcher.restart,
            console=self._context.console,
            done=done,
            hold_memory=None if self._handover is None else self._handover.training,
        )
        self._pool.renew = lambda: recovery.retry(sync.renew)
        texts = await self._texts(policy)
        if found is not None:
            with found.restoring():
                ledger = Ledger.restore(found.state["ledger"], source_of)
                advantages = AdvantageState.model_validate(found.state["source"]["advantages"])
                prompts.restore(found.state["source"]["prompts"])
                if texts is not None:
                    texts.restore(found.state["source"]["texts"])
            await recovery.retry(lambda: self._load(found))
        # Engines that sleep wake with weights, and engines without adapters do not sample.
        if spec.trains_adapters or (found is not None and self._handover is not None):
            await recovery.retry(lambda: sync.push(done))
        scheduler = self._scheduler(ledger, prompts, curriculum, done, settings)
        if found is not None:
            await self._take_over(found, scheduler)
        rollouts = RolloutComponents(
            workers=self._workers,
            pool=self._pool,
            scheduler=scheduler,
            rewards=self._rewards,
            prompts=prompts,
            ledger=ledger,
            texts=texts,
            curriculum=curriculum,
        )
        cluster = self._context.cluster
        recorder = RunRecorder(cluster.calls, cluster.events, self._out, done, spec.output.keep_gib)
        evaluator = self.evaluator(
            self._out / "evaluation" if spec.output.trajectories else None,
            EvaluationLog(self._out / EVALUATIONS, described_sets(spec, self._data.held_out), done),
        )
        beside = evaluator is not None and spec.evaluation is not None and spec.evaluation.beside
        components = RunComponents(
            source=RolloutSource(spec, self._out, rollouts, self._context.console, self._context.stop, advantages),
            updates=updates,
            recovery=recovery,
            sync=sync,
            step_recorder=StepRecorder(spec, self._out, updates.trainers),
            evaluator=evaluator,
            held_out_rows=self._data.held_out_digest,
            beside=EvaluationBeside(evaluator, self._pool) if evaluator is not None and beside else None,
            ledger=ledger,
            scaler=self._scaler,
            budgets=[pool.budget for pool in self._pools.by_role.values()],
            peaks=cluster.peaks,
            recorder=recorder,
            data=data_metrics(self._data.pools, self._data.refused),
        )
        sinks = MetricSinks.of_spec(spec, self._out, done)
        console, stop = self._context.console, self._context.stop
        return Controller(spec, components, checkpoints, sinks, console, stop)

    async def audit(
        self, spec: RolloutSpec, found: Checkpoint | None, controller: Controller | None = None
    ) -> AuditReport:
        """Compares engines and trainer with the float32 scorer, with the initial weights or the checkpoint's.

        Args:
            spec: With models that are folders.
            found: The checkpoint, or None for the initial weights.
            controller: The run's, which has loaded the checkpoint, or None if nothing has.
        """
        policy, model = self._workers.require_policy(), Path(spec.model.path)
        prompts = self._data.train, self._context.cluster.put(self._data.train.table)
        scorer = token_scorer(spec, self._context.cluster, self._context.launcher.seat(policy.workers[0].name))
        auditor = Auditor(spec, self._pool, policy, prompts, scorer)
        self._context.console.phase("audit", 0, 1)
        adapter = None if spec.model.adapter is None else Path(spec.model.adapter)
        if controller is None and spec.trains_adapters:
            await weight_sync(spec, policy, self._pool, self._context.cluster).push(0)
        if found is None:
            report = await auditor.run(AuditedWeights("the initial weights", 0, model, adapter=adapter))
        else:
            await auditor.warm()
            sync = None if controller is None else controller.components.sync
            if sync is None:
                await self._load(found)
                sync = weight_sync(spec, policy, self._pool, self._context.cluster)
            await sync.push(found.step)
            label, trained = f"the checkpoint of step {found.step}", found.path / MODEL
            if spec.trains_adapters:
                weights = AuditedWeights(label, found.step, model, adapter=trained, previous_adapter=adapter)
            else:
                weights = AuditedWeights(label, found.step, trained, model)
            report = await auditor.run(weights)
        await auditor.forget()
        self._context.console.phase("audit", 1, 1)
        return report

    def queues(self) -> Queues:
        """Work that waits for the engines. May be called from any thread."""
        engines = [
            EngineQueue(e.name, "asleep" if e.asleep else "evaluating" if e.held else e.state.value, e.outstanding)
            for e in list(self._pool.engines)
        ]
        return Queues(tuple(engines), tuple(self._pool.starting), self._pool.waiting)

    def listen(self) -> None:
        """Accepts changes of the spec from now on (`troupe scale`, `troupe apply`)."""
        self._control.open()

    async def close(self) -> None:
        """Accepts no more changes and starts no more workers."""
        await self._control.close()
        await self._scaler.close()
        await self._pools.close()

    def evaluator(
        self,
        responses: Path | None = None,
        log: EvaluationLog | None = None,
        sample: Sampler | None = None,
    ) -> Evaluator | None:
        """Held-out evaluation, if the spec has one.

        Args:
            responses: Folder for its samples, or None to write none.
            log: Keeps its results, or None to return them only.
            sample: Samples the prompts from the tables themselves, or None for the engines.
        """
        evaluation = self._spec.evaluation
        if evaluation is None or not self._data.held_out:
            return None
        sets: list[HeldOutSet] = []
        for settings in self._spec.held_out_sets():
            if settings.solved_at is None:
                of = f" of {settings.name}" if settings.name else ""
                where = f"data.{settings.section}" if settings.name else "evaluation"
                hint = f"set {where}.solved_at to the reward of a right response"
                self._context.console.message(f"held-out accuracy{of} is not reported for this reward: {hint}")
            pool = self._data.held_out[settings.section]
            picks = evaluation_picks(pool, self._spec.seed, evaluation.prompts, settings.name)
            table = self._context.cluster.put(pool.table) if sample is None else pool.table
            sets.append(HeldOutSet(settings, picks, table, levels_of(pool, settings.level)))
        return Evaluator(self._spec.seed, sets, sample or engine_sampler(self._pool), self._rewards, responses, log)

    async def _texts(self, policy: PolicyGroup) -> TextOrder | None:
        """The texts of PPO-ptx, tokenized and split once."""
        pool, sources = self._data.texts, self._spec.data.text_sources()
        if pool is None:
            return None
        parts, timeout_s = list(pool.parts.values()) or [pool], self._spec.schedule.train_timeout_s
        cuts = [TextCut(part.rows, own.max_tokens) for part, own in zip(parts, sources.values(), strict=True)]
        texts = self._context.cluster.put(pool.table)
        summaries, table = await policy.cut_texts(texts, cuts, timeout_s=timeout_s)
        for section, part, summary in zip(sources, parts, summaries, strict=True):
            if summary.refused:
                what = f"{summary.refused} of {part.rows} texts cannot be used: {summary.problems[0]}"
                if self._spec.failures.on_bad_row == "stop" or not summary.tokens:
                    raise DataError(f"data.{section}: {what}")
                self._context.console.message(f"data.{section}: {what}")
            if not summary.tokens:
                raise DataError(f"data.{section}: no text has two tokens or more: there is nothing to train on")
        tokens = tuple(count for summary in summaries for count in summary.tokens)
        listed = self._spec.data.ptx if isinstance(self._spec.data.ptx, tuple) else ()  # one source has no parts
        own = tuple(
            SourcePieces(SourceShare(name=source.name, weight=source.texts_per_step), len(summary.tokens), part.digest)
            for source, summary, part in zip(listed, summaries, parts, strict=False)
        )
        per_step = sum(source.texts_per_step for source in sources.values())
        return TextOrder(Pieces(table, tokens, pool.digest, own), per_step, self._spec.seed)

    def _scheduler(
        self,
        ledger: Ledger,
        prompts: PromptOrder,
        curriculum: Curriculum | None,
        done: int,
        settings: RowTable[GroupSettings],
    ) -> RolloutScheduler:
        scorer = Scorer(self._rewards, self._pools.token_scorers())
        table = self._context.cluster.put(self._data.train.table)
        observe = None if curriculum is None else curriculum.observe
        return RolloutScheduler(self._spec, self._pool, scorer, ledger, prompts.next, table, done, observe, settings)

    async def _take_over(self, found: Checkpoint, scheduler: RolloutScheduler) -> None:
        """Makes the scheduler take over the finished samples of groups that were open at the checkpoint."""
        groups = await read_samples(found, self._spec, self._rewards)
        with found.restoring():
            samples = scheduler.restore(found.state["source"].get("scheduler", {}), groups)
        if samples:
            self._context.console.message(f"{samples} finished samples of the checkpoint are not sampled again")

    async def _load(self, found: Checkpoint) -> None:
        """Loads the checkpoint of policy and critic."""
        groups = [group for group in (self._workers.policy, self._workers.critic) if group is not None]
        async with nullcontext() if self._handover is None else self._handover.training():
            for line in await load_checkpoint(found, groups, self._spec.schedule.train_timeout_s):
                self._context.console.message(line)
