"""The training loop. Every algorithm, synchronous or asynchronous, runs through `Controller.step`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from troupe.orchestrator.cluster.event_loop import rare_collections
from troupe.orchestrator.errors import StopRequested, TroupeError, WorkerError
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.pools.restart_budget import RestartBudget
from troupe.orchestrator.rollouts.held_out import held_out_lines
from troupe.orchestrator.rollouts.run_weights import RunWeights
from troupe.orchestrator.rollouts.weight_sync import WeightSync
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.telemetry.call_log import CallLog
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.metrics import PhaseTimers, merge_updates
from troupe.orchestrator.telemetry.peak_memory import PeakMemory
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.sinks.metric_sinks import MetricSinks
from troupe.orchestrator.training.batch import (
    Batch,
    BatchSource,
    EvaluationBesideTraining,
    HeldOutEvaluation,
    SourceSnapshot,
    unless_failed,
    unless_stopped,
)
from troupe.orchestrator.training.checkpoint import CheckpointStore
from troupe.orchestrator.training.evaluations import Evaluated, Evaluators, RunEvaluations
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints, Uploads
from troupe.orchestrator.training.saves import Moment, RunSaves, SaveContext
from troupe.orchestrator.training.state import BestState, ControllerState
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import Updates

logger = logging.getLogger(__name__)

_TRAINER_PROBE_S = 5.0
"""Longest interval between two probes of trainers that have no call."""
_QUIET_METRICS = ("refused", "failed_samples", "truncated")
"""Shown after an evaluation only where they are not 0."""
_IN_REPORT_ONLY = ("_low", "_high", "solved_at")
"""Ends of metrics of an evaluation that only the report and the files show; with those by level."""


@dataclass(frozen=True)
class RunComponents:
    """The parts that a run assembles for the controller."""

    source: BatchSource
    updates: Updates
    recovery: TrainerRecovery
    """Restarts the trainers in place when one of them is lost."""
    sync: WeightSync | None
    """None: no engine serves the trained weights."""
    evaluator: HeldOutEvaluation | None
    ledger: Ledger
    step_recorder: StepRecorder
    """Keeps what the last steps trained on, for `troupe replay`."""
    scaler: WorkerScaler | None = None
    """Scales roles while the run is running; None: the number of workers is fixed."""
    budgets: Sequence[RestartBudget] = ()
    """Restarts of the other roles."""
    peaks: PeakMemory = field(default_factory=PeakMemory)
    """Peak memory as reported by the workers."""
    data: Mapping[str, float] = field(default_factory=dict)
    """Counts of the data's rows, a metric of every step."""
    recorder: RunRecorder = field(default_factory=lambda: RunRecorder(CallLog(), EventLog()))
    """Records events and the timeline."""
    held_out_rows: str = ""
    """Digest of the rows that evaluations are made on; empty: there are none."""
    beside: EvaluationBesideTraining | None = None
    """Evaluates while training continues (`evaluation.beside`); None: training waits."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    steps_done: int
    stopped: bool
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    ledger: dict[str, int]
    drop_reasons: dict[str, int]
    peak_memory: str
    """Per role, in one line."""
    ended_early: str = ""
    """Why the run has ended before its last step; empty: it has not, or was stopped."""
    best: BestState = field(default_factory=BestState)
    """The best evaluations."""

    def summary(self, out: Path) -> dict[str, str]:
        """The lines shown at the end of a run, by label."""
        counts = self.ledger
        note = " (stopped; continue with --resume)" if self.stopped else ""
        note = f" ({self.ended_early})" if self.ended_early else note
        lines = {"steps": f"{self.steps_done}{note}"}
        for name in ("accuracy", "reward", "loss"):
            before, after = self.first_eval.get(f"eval/{name}"), self.last_eval.get(f"eval/{name}")
            if after is not None and self.last_eval is self.first_eval:  # the run was stopped before the next one
                lines[f"held-out {name}"] = f"{after:.3f} before training"
            elif after is not None:
                first = f"{before:.3f} before, " if before is not None else ""
                lines[f"held-out {name}"] = f"{first}{after:.3f} after"
        lines |= held_out_lines(self.first_eval, self.last_eval)
        if self.best.steps:
            first = self.best.steps[0]
            lines["best checkpoint"] = f"step {first.step}, {self.best.metric} {first.value:.4g}"
        lines["samples"] = "{dispatched} dispatched, {trained} trained, {dropped} dropped".format_map(counts)
        lines |= {f"dropped: {reason}": str(count) for reason, count in self.drop_reasons.items()}
        lines["peak memory"] = self.peak_memory
        for name in ("metrics.jsonl", "trajectories", "evaluation", "checkpoints", "tensorboard"):
            if (out / name).exists():
                lines[name] = str(out / name)
        return lines


def _is_shown(metric: str) -> bool:
    """Whether a metric of an evaluation is shown when it has ended."""
    return "/level/" not in metric and not metric.endswith(_IN_REPORT_ONLY)


def _is_quiet(metric: str) -> bool:
    return metric.endswith(_QUIET_METRICS)


class Controller:
    """One process that handles scalars and references to tables, never token tensors."""

    def __init__(
        self,
        spec: RunSpec,
        components: RunComponents,
        store: CheckpointStore,
        sinks: MetricSinks,
        console: Console,
        stop: asyncio.Event,
        done: int = 0,
        state: ControllerState | None = None,
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        """`done` steps and `state` come from the checkpoint that the run resumes from; `remote` gets copies of all."""
        self._spec = spec
        self.components = components
        self.store = store
        self.sinks = sinks
        self.console = console
        self.version = done
        self.stop = stop
        self.state = (state or ControllerState()).for_penalty(spec.kl_penalty)
        self._recorder = components.recorder
        self._recorder.counts("dropped", components.ledger.drop_reasons())
        self._recorder.counts("ledger", components.ledger.counts())
        self._timers = self._new_timers()
        sync, recovery = components.sync, components.recovery
        self._weights = None if sync is None else RunWeights(sync, recovery, self._recorder, self._mark_served)
        targets = SaveContext(
            source=components.source,
            recovery=recovery,
            store=store,
            uploads=Uploads(remote, spec.failures.failed_saves, spec.schedule.train_timeout_s),
            recorder=self._recorder,
            console=console,
            lost=self._without_checkpoint,
        )
        self._saves = RunSaves(spec, components.updates, targets, done)
        self._alarm = ""
        evaluators = Evaluators(components.evaluator, components.beside)
        self._evaluations = RunEvaluations(spec, evaluators, self._recorder, console, self._evaluated)
        self._not_saved: int | None = None
        """The last step whose checkpoint could not be written."""
        best = spec.checkpoint.best
        digests = spec.evaluation_digest(), components.held_out_rows
        self._keep_best(BestState() if best is None else self.state.best.of(best, *digests))
        self._best_before = self.state.best.steps
        """The best steps before the last evaluation: their checkpoints are there."""

    async def run(self) -> RunOutcome:
        """Trains until the last step, or saves and returns after the step during which `stop` was set."""
        try:
            async with rare_collections():
                return await self._run()
        finally:
            await self._saves.cancel()
            self.sinks.close()

    async def _run(self) -> RunOutcome:
        """Consumes batches from the source, one per step.

        Waits for the next batch, for the trainers and for the engines' acknowledgements; each step ends within
        `step_timeout_s`. `stop` interrupts the wait for a batch.
        """
        spec, source = self._spec, self.components.source
        heartbeat, watch = asyncio.create_task(self._heartbeat()), asyncio.create_task(self._watch_trainers())
        try:
            trial = self._saves.begin_trial()  # the trainers have nothing else to do until there is a batch
            if self.version and self._weights is not None:
                await self._weights.push(self.version)
            evaluation = spec.evaluation
            if evaluation is not None and evaluation.at_start and not self.version:
                await unless_stopped(self.stop, unless_failed(trial, self._evaluations.before_training()))
            elif self.state.unevaluated:
                await unless_stopped(self.stop, unless_failed(trial, self._evaluations.again(self.version)))
            self.components.step_recorder.begin(self.version)
            if not self.version:
                await self._recorder.end_step(0)  # start-up; that of a resumed run is part of its first step
            source.start()
            self._timers = self._new_timers()
            while self.version < spec.schedule.steps and not self._alarm_stops() and not self._has_no_gain():
                async with asyncio.timeout(spec.schedule.step_timeout_s):
                    step = self.step(self.version)
                    step = step if self._weights is None else self._weights.guard(step)
                    await unless_failed(trial, unless_failed(watch, step))
            snapshot = await self._settle()
        except StopRequested:
            logger.warning("stopping after step %d", self.version)
            snapshot = await self._settle()
        except WorkerError as error:
            error.locate(self.version + 1, self._timers.failed)
            raise
        except TimeoutError:
            bound = spec.schedule.step_timeout_s
            raise TroupeError(
                f"step {self.version + 1} took longer than schedule.step_timeout_s ({bound:g} s)"
            ) from None
        finally:
            heartbeat.cancel()
            watch.cancel()
            await self._evaluations.cancel()
            if self._weights is not None:
                await self._weights.cancel()
            await source.close()
            await self.components.recovery.close()
            await self.components.step_recorder.close()
            await self._recorder.close()
        await source.flush()
        await self._saves.last(snapshot, self._moment())
        await self._recorder.close()
        ledger = self.components.ledger
        ledger.check()
        early = self.version < spec.schedule.steps and self._has_no_gain()
        how = "finished" if self.version >= spec.schedule.steps or early else "stopped"
        how = "alarm" if how == "stopped" and self._alarm_stops() else how
        self._recorder.events.record("run_ended", how=how, **({"detail": self._no_gain()} if early else {}))
        return RunOutcome(
            self.version,
            how != "finished",
            self._evaluations.first,
            self._evaluations.last,
            ledger.counts(),
            ledger.drop_reasons(),
            self.components.peaks.summary(),
            self._no_gain() if early else "",
            self.state.best,
        )

    async def _settle(self) -> SourceSnapshot:
        """Waits for what runs beside the loop; what to save, before the groups in flight are cancelled."""
        await self._evaluations.leave(self.version)
        if self._weights is not None:
            await self._weights.settle()
        await self.components.step_recorder.settle()
        return await self.components.source.snapshot()

    def _has_no_gain(self) -> bool:
        """Whether the run ends early (`checkpoint.patience`)."""
        return self.state.is_over(self._spec.checkpoint)

    def _no_gain(self) -> str:
        """Why the run ends early."""
        best = self.state.best
        return f"no gain of {best.metric} in {best.without_gain} evaluations (checkpoint.patience)"

    def _keep_best(self, best: BestState) -> None:
        """Protects the checkpoints of the best evaluations from now on."""
        self.state = self.state.model_copy(update={"best": best})
        self.store.protected = best.saved

    def _note_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compares the evaluation of a step with those before it."""
        config = self._spec.checkpoint.best
        if config is None or not metrics:
            return
        value = metrics.get(config.metric)
        if value is None or not math.isfinite(value):
            logger.warning("step %d: the evaluation has no %s: it is not compared", step, config.metric)
            return
        self._best_before = self.state.best.steps
        best = self.state.best.seen(step, value, config.keep)
        self._keep_best(best.keeping(self._best_before) if step == self._not_saved else best)

    def _alarm_stops(self) -> bool:
        """Whether the alarm ends the run. The run is saved as at any other stop."""
        return bool(self._alarm) and self._spec.alarm is not None and self._spec.alarm.action == "stop"

    def _new_timers(self) -> PhaseTimers:
        return PhaseTimers(record=self._recorder.phase)

    async def step(self, step: int) -> None:
        """One step: take a batch, update, sync the weights, account for the samples, report."""
        timers, source = self._timers, self.components.source
        self._recorder.events.step = step + 1
        # 1. A batch, ready to train on.
        batch = await source.next_batch(self.version, timers)
        # 2. Policy and critic learn from it.
        with timers.phase("update"):
            await self._saves.end_trial()
            await self.components.step_recorder.settle()
            before = self.state
            updates, self.state = await self.components.recovery.train(step, batch, before)
        # 3. Every engine loads the new weights and verifies them, beside the next step where samples may be stale.
        if self._weights is not None:
            with timers.phase("sync"):
                self.console.phase("weight sync", 0, 1)
                await (self._weights.publish if self._may_overlap(step + 1) else self._weights.push)(step + 1)
            await asyncio.sleep(0)  # thousands of engines have answered; let the groups that wait for them run first
        self.components.step_recorder.keep(step + 1, batch, before, updates)
        # 4. An evaluation beside training takes its engine; these samples are trained; the next ones may start.
        with nullcontext() if self._evaluations.pending is None else timers.phase("evaluate"):
            await self._evaluations.begin_if_due(step + 1)
        self.version = step + 1
        source.mark_trained(self.version)
        for budget in (self.components.recovery.budget, *self.components.budgets):
            budget.after_step()
        await asyncio.sleep(0)  # dispatch the groups that wait for an engine before computing metrics
        # 5. Evaluation, metrics, checkpoint, trajectories.
        with timers.phase("evaluate"):
            evaluation = await self._evaluations.make_if_due(self.version)
        await self._report(batch, updates, timers, evaluation)
        self._timers = self._new_timers()  # this step's metrics are written: the next step's include the checkpoint
        if self._evaluations.pending not in (None, self.version) and self._saves.is_due(self._moment()):
            with self._timers.phase("evaluate"):
                await self._evaluations.settle()  # no resumed run has its weights; it decides what the commit keeps
        with self._timers.phase("checkpoint"):
            await self._saves.save_if_due(self._moment())
        await source.save_trajectories(self.version)
        await self._recorder.end_step(self.version)

    def _may_overlap(self, version: int) -> bool:
        """Whether the loop may continue before the engines have a version: an evaluation and the end need it."""
        last = version == self._spec.schedule.steps
        return self._spec.overlaps_steps and not last and not self._evaluations.is_due(version)

    def _mark_served(self, version: int) -> None:
        self.components.source.mark_served(version)

    async def _evaluated(self, evaluated: Evaluated) -> None:
        """Compares an evaluation that has ended with those before it, and shows it."""
        step, metrics = evaluated.step, evaluated.metrics
        if self._spec.checkpoint.best is not None:
            await self._saves.settle()  # it may turn out not to be there to be the best one
        self._note_best(step, metrics)
        if evaluated.late:
            self.sinks.write(step, metrics)
        shown = ", ".join(f"{k[5:]} {v:.3g}" for k, v in metrics.items() if _is_shown(k) and (v or not _is_quiet(k)))
        self.console.message(f"held-out after step {step}: {shown}")
        if evaluated.late:
            self.console.evaluation(step, metrics)

    def _moment(self) -> Moment:
        evaluations = self._evaluations
        candidate = self._spec.checkpoint.best is not None and evaluations.pending == self.version
        state = self.state.model_copy(update={"unevaluated": evaluations.open})
        return Moment(self.version, state, self._best_before, candidate)

    def _without_checkpoint(self, step: int) -> None:
        """The best steps stay as they were where the checkpoint of the newest cannot be written."""
        self._not_saved = step
        if step in self.state.best.saved:
            self._keep_best(self.state.best.keeping(self._best_before))

    async def _report(
        self, batch: Batch, updates: Sequence[dict[str, float]], timers: PhaseTimers, evaluation: dict[str, float]
    ) -> None:
        components = self.components
        metrics = components.source.metrics(self.version, timers.total())
        await asyncio.sleep(0)  # aggregating thousands of samples took one iteration of the event loop
        metrics |= batch.summary.metrics
        metrics |= merge_updates(updates)
        metrics |= {"seconds/step": timers.total()}
        metrics |= {f"seconds/{name}": seconds for name, seconds in timers.seconds().items()}
        metrics |= {f"utilisation/{name}": share for name, share in timers.shares().items()}
        metrics |= {f"ledger/{name}": float(count) for name, count in components.ledger.counts().items()}
        metrics |= {"updates": float(len(updates)), "trainer_restarts": float(components.recovery.budget.total)}
        metrics |= components.peaks.metrics()
        metrics |= components.data
        metrics |= evaluation
        metrics |= self._saves.metrics()
        metrics |= self._check_alarm(metrics)
        if components.scaler is not None:
            metrics |= components.scaler.after_step(timers.shares().get("generate", 0.0))
        self.sinks.write(self.version, metrics)
        self._record_changes(metrics)
        self.console.step(self.version, metrics)

    def _record_changes(self, metrics: Mapping[str, float]) -> None:
        """Events for what changed during the step in counts that the run keeps anyway."""
        recorder, ledger = self._recorder, self.components.ledger
        for reason, samples in recorder.counts("dropped", ledger.drop_reasons()).items():
            if samples > 0:  # a retry takes dropped samples back
                recorder.events.record("dropped", reason=reason, samples=int(samples))
        if retries := recorder.counts("ledger", ledger.counts()).get("retries"):
            recorder.events.record("retry", groups=int(retries))
        workers = {name: value for name, value in metrics.items() if name.startswith("workers/")}
        first = not recorder.knows("workers")
        changed = recorder.counts("workers", workers)
        if changed and not first:
            now = {name.removeprefix("workers/"): int(workers[name]) for name in changed}
            recorder.events.record("scaled", workers=now)

    def _check_alarm(self, metrics: dict[str, float]) -> dict[str, float]:
        """Warns where the reward rises while text or policy degenerate: a sign of reward hacking."""
        if self._spec.alarm is None:
            return {}
        self.state, reasons = self.state.check_alarm(metrics, self._spec.alarm)
        if reasons:
            self._alarm = f"step {self.version}: the reward rises while {' and '.join(reasons)} (failures.alarm)"
            logger.warning("%s", self._alarm)
            self._recorder.events.record("alarm", detail=self._alarm)
        return {"alarm/reward_hacking": float(bool(reasons))}

    async def _watch_trainers(self) -> None:
        """Probes the trainers at a fixed interval; runs beside the loop until the run ends.

        A step may wait for engines alone, and an engine that starts needs what a lost policy had published.

        Raises:
            WorkerError: A trainer is lost and cannot be restarted.
        """
        while True:
            await asyncio.sleep(min(self._spec.probe_interval_s, _TRAINER_PROBE_S))
            await self.components.recovery.probe()

    async def _heartbeat(self) -> None:
        """Probes the source's workers at a fixed interval; runs beside the loop until the run ends."""
        while True:
            await asyncio.sleep(self._spec.probe_interval_s)
            try:
                await self.components.source.probe()
            except Exception:
                logger.exception("a round of health probes failed")
