"""An RL run: assembles workers, data and ledger into the controller that every run uses."""

from __future__ import annotations

from troupe.orchestrator.cluster.worker_group import PolicyGroup
from troupe.orchestrator.controller import Controller, RunComponents, RunOutcome
from troupe.orchestrator.data.curriculum import Curriculum
from troupe.orchestrator.data.mixture import curriculum_of, group_settings, prompt_order
from troupe.orchestrator.data.pools import RowTable
from troupe.orchestrator.data.prompts import PromptOrder
from troupe.orchestrator.data.summary import data_metrics
from troupe.orchestrator.data.texts import Pieces, SourcePieces, TextOrder
from troupe.orchestrator.errors import DataError
from troupe.orchestrator.live.control import ControlServer
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.rollouts.evaluation import EvaluationBeside, Evaluator, engine_sampler, sets_of
from troupe.orchestrator.rollouts.evaluation_log import EVALUATIONS, EvaluationLog, described_sets
from troupe.orchestrator.rollouts.scheduler import RolloutScheduler
from troupe.orchestrator.rollouts.scoring import Scorer
from troupe.orchestrator.rollouts.slow_engines import SlowEngines
from troupe.orchestrator.rollouts.source import RolloutComponents, RolloutSource
from troupe.orchestrator.runs.offsets import RewardOffsets
from troupe.orchestrator.runs.opponents import OpponentRenewal
from troupe.orchestrator.runs.parts import controller_of
from troupe.orchestrator.runs.pools import RunPools, load_trainers, open_pools
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.spec.derived.sampling import GroupSettings
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import SourceShare
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.checkpoint import Checkpoint
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import RunPart
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import RolloutUpdates, UpdateProfiles
from troupe.workers.contract.messages import TextCut


async def train_on_rollouts(session: Session) -> RunOutcome:
    request = session.request
    async with open_pools(request.spec.rollouts, session) as pools:
        if session.observer is not None:
            session.observer.follow(pools.engines.queues)
        controller = await RolloutRun(session, pools).controller()
        if session.checkpoints.found is not None:  # the resume stands
            request.spec.write(request.out / RESOLVED_SPEC)
        return await controller.run()


class RolloutRun:
    """Assembles workers, data and ledger into a controller."""

    def __init__(self, session: Session, pools: RunPools) -> None:
        spec, out = session.request.spec.rollouts, session.request.out
        self._spec = spec
        self._out = out
        self._session = session
        self._workers = session.workers
        self._pools = pools
        self._pool = pools.engines
        self._rewards = pools.rewards
        self.scaler = WorkerScaler(
            spec,
            pools=pools.by_role,
            resources=session.launcher,
            console=session.console,
            save=self._follow,
            file=str(out / RESOLVED_SPEC),
        )

    def _follow(self, changed: RolloutSpec) -> None:
        """Takes over the changed spec of a run that is scaled, and writes it. Raises OSError."""
        self._pool.follow(changed)
        changed.write(self._out / RESOLVED_SPEC)

    async def controller(self) -> Controller:
        spec, policy, data = self._spec, self._workers.require_policy(), self._session.data
        checkpoints, sync = self._session.checkpoints, self._pools.require_sync()
        found, done = checkpoints.found, checkpoints.done
        settings = group_settings(spec, data.train)
        source_of = (lambda row: settings[row].source) if spec.data.mixture else None
        ledger = Ledger(source_of)
        curriculum = curriculum_of(spec, settings)
        prompts = prompt_order(spec, data.train, curriculum)
        profiles = UpdateProfiles(spec.output.profile, self._out)
        updates = RolloutUpdates(spec, policy, self._workers.critic, self._session.console, profiles)
        calls = self._session.launcher.calls
        recovery = self._recovery(updates)
        calls.recover_with(recovery)
        texts = await self._texts(policy)
        if found is not None:
            with found.restoring():
                ledger = Ledger.restore(found.state["ledger"], source_of)
            await calls.retry(lambda: load_trainers(found, spec, self._pools))
        # Engines that sleep wake with weights, and engines without adapters do not sample.
        if spec.trains_adapters or (found is not None and self._pools.trainer_memory is not None):
            await calls.retry(lambda: sync.push(done))
        scheduler = self._scheduler(ledger, prompts, curriculum, done, settings)
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
        cluster = self._session.cluster
        evaluator = self._evaluator(done)
        beside = evaluator is not None and spec.evaluation is not None and spec.evaluation.beside
        source = RolloutSource(spec, self._out, rollouts, self._session.console, self._session.stop)
        components = RunComponents(
            source=source,
            updates=updates,
            recovery=recovery,
            sync=sync,
            step_recorder=StepRecorder(spec, self._out, updates.trainers),
            evaluator=evaluator,
            held_out_rows=data.held_out_digest,
            beside=EvaluationBeside(evaluator, self._pool) if evaluator is not None and beside else None,
            ledger=ledger,
            scaler=self.scaler,
            budgets=[pool.budget for pool in self._pools.by_role.values()],
            peaks=cluster.peaks,
            recorder=RunRecorder(cluster.calls, cluster.events, self._out, done, spec.output.keep_gib),
            data=data_metrics(data.pools, data.refused),
        )
        return await controller_of(self._session, components, self._own_parts(found, source))

    def _recovery(self, updates: RolloutUpdates) -> TrainerRecovery:
        session, checkpoints = self._session, self._session.checkpoints
        return TrainerRecovery(
            spec=self._spec,
            calls=session.launcher.calls,
            updates=updates,
            push=self._pools.require_sync().push,
            store=checkpoints.store,
            restart=session.launcher.restart,
            console=session.console,
            done=checkpoints.done,
            hold_memory=self._pools.trainer_memory,
        )

    def _evaluator(self, done: int) -> Evaluator | None:
        """Evaluates on the held-out sets and logs the results, or None if the spec has none."""
        spec, session, pools = self._spec, self._session, self._session.data.held_out
        if spec.evaluation is None:
            return None
        return Evaluator(
            spec.seed,
            sets_of(spec, pools, session.cluster.put, session.console.message),
            engine_sampler(self._pool),
            self._rewards,
            self._out / "evaluation" if spec.output.trajectories else None,
            EvaluationLog(self._out / EVALUATIONS, described_sets(spec, pools), done),
        )

    def _own_parts(self, found: Checkpoint | None, source: RolloutSource) -> list[RunPart]:
        slow = SlowEngines(source.groups, self._pool.workers, self._session.cluster.events)
        parts: list[RunPart] = [ControlServer(self._out, self.scaler), slow]
        if self._session.data.references:
            parts.append(RewardOffsets(self._session, self._rewards))
        judge = self._spec.roles.judge
        if self._pools.judges is not None and judge is not None and judge.renew_every is not None:
            session, judges = self._session, self._pools.judges
            events, store = session.cluster.events, session.checkpoints.store
            parts.append(OpponentRenewal(session.spec, store, judges, session.launcher, session.console, events))
        if self._spec.audit.at_start:
            from troupe.orchestrator.runs.audit import AuditAtStart, RunAudit

            parts.insert(0, AuditAtStart(RunAudit(self._session, self._pools), found))
        return parts

    async def _texts(self, policy: PolicyGroup) -> TextOrder | None:
        """The texts of PPO-ptx, tokenized and split once."""
        pool, sources = self._session.data.texts, self._spec.data.text_sources()
        if pool is None:
            return None
        parts, timeout_s = list(pool.parts.values()) or [pool], self._spec.schedule.train_timeout_s
        cuts = [TextCut(part.rows, own.max_tokens) for part, own in zip(parts, sources.values(), strict=True)]
        texts = self._session.cluster.put(pool.table)
        summaries, table = await policy.cut_texts(texts, cuts, timeout_s=timeout_s)
        for section, part, summary in zip(sources, parts, summaries, strict=True):
            if summary.refused:
                what = f"{summary.refused} of {part.rows} texts cannot be used: {summary.problems[0]}"
                if self._spec.failures.on_bad_row == "stop" or not summary.tokens:
                    raise DataError(f"data.{section}: {what}")
                self._session.console.message(f"data.{section}: {what}")
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
        table = self._session.cluster.put(self._session.data.train.table)
        observe = None if curriculum is None else curriculum.observe
        return RolloutScheduler(self._spec, self._pool, scorer, ledger, prompts.next, table, done, observe, settings)
