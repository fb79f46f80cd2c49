"""The training loop. Every algorithm, synchronous or asynchronous, runs through `Controller.step`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from troupe.orchestrator.cluster.event_loop import rare_collections
from troupe.orchestrator.errors import StopRequested, TroupeError, WorkerError
from troupe.orchestrator.live.scaling import WorkerScaler
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.orchestrator.rollouts.held_out import held_out_lines
from troupe.orchestrator.rollouts.run_weights import RunWeights
from troupe.orchestrator.rollouts.weight_sync import WeightSync
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import probe_interval_s
from troupe.orchestrator.spec.derived.training import overlaps_steps
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import Ended, EventLog
from troupe.orchestrator.telemetry.metrics import PeakMemory, PhaseTimers
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.telemetry.timeline import CallLog
from troupe.orchestrator.training.batch import (
    Batch,
    BatchSource,
    EvaluationBesideTraining,
    HeldOutEvaluation,
    SourceSnapshot,
    unless_failed,
    unless_stopped,
)
from troupe.orchestrator.training.best_checkpoints import BestCheckpoints
from troupe.orchestrator.training.evaluations import RunEvaluations
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import Metrics, Moment, RunPart, UpdatedStep, close_parts
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.saves import RunSaves
from troupe.orchestrator.training.state import BestState
from troupe.orchestrator.training.step_recorder import StepRecorder
from troupe.orchestrator.training.updates import Penalty, Updates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunComponents:
    """The parts that a run assembles for the controller."""

    source: BatchSource
    updates: Updates
    recovery: TrainerRecovery
    """Restarts the trainers in place when one of them is lost."""
    sync: WeightSync | None
    """None if no engine serves the trained weights."""
    evaluator: HeldOutEvaluation | None
    ledger: Ledger
    step_recorder: StepRecorder
    """Keeps what the last steps trained on, for `troupe replay`."""
    scaler: WorkerScaler | None = None
    """Scales roles while the run is running, or None if the number of workers is fixed."""
    budgets: Sequence[RestartBudget] = ()
    """Restarts of the other roles."""
    peaks: PeakMemory = field(default_factory=PeakMemory)
    """Peak memory as reported by the workers."""
    data: Mapping[str, float] = field(default_factory=dict)
    """Counts of the data's rows, a metric of every step."""
    recorder: RunRecorder = field(default_factory=lambda: RunRecorder(CallLog(), EventLog()))
    """Records events and the timeline."""
    held_out_rows: str = ""
    """Digest of the rows that are evaluated, or empty if there are none."""
    beside: EvaluationBesideTraining | None = None
    """Evaluates while training continues (`evaluation.beside`), or None if training waits."""


@dataclass(frozen=True)
class RunParts:
    """The parts of a run: those on which the loop depends, and all in the order in which a step passes them."""

    penalty: Penalty
    best: BestCheckpoints
    evaluations: RunEvaluations
    saves: RunSaves
    all: tuple[RunPart, ...]

    def states(self) -> dict[str, Any]:
        return {part.name: part.snapshot() for part in self.all if part.name}


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run."""

    steps_done: int
    stopped: bool
    first_eval: dict[str, float]
    last_eval: dict[str, float]
    """Of the step `evaluated`."""
    ledger: dict[str, int]
    drop_reasons: dict[str, int]
    peak_memory: str
    """Per role, in one line."""
    ended_early: str = ""
    """Why the run has ended before its last step, or empty if it has not or was stopped."""
    best: BestState = field(default_factory=BestState)
    """The best evaluations."""
    interrupted: bool = False
    """Whether it was asked to stop, if only while its workers were closed: verdicts are left to `troupe report`."""
    evaluated: int | None = None
    """The step that was evaluated last, or None if none was."""

    @property
    def how(self) -> Ended:
        return "stopped" if self.stopped else "finished"

    def summary(self, out: Path) -> dict[str, str]:
        """The lines shown at the end of a run, by label."""
        counts = self.ledger
        note = " (stopped; continue with --resume)" if self.stopped else ""
        note = f" ({self.ended_early})" if self.ended_early else note
        lines = {"steps": f"{self.steps_done}{note}"}
        when = "after" if self.evaluated == self.steps_done else f"after step {self.evaluated}"
        for name in ("accuracy", "reward", "loss"):
            before, after = self.first_eval.get(f"eval/{name}"), self.last_eval.get(f"eval/{name}")
            if after is not None and self.evaluated == 0:  # the run was stopped before the next one
                lines[f"held-out {name}"] = f"{after:.3f} before training"
            elif after is not None:
                first = f"{before:.3f} before, " if before is not None else ""
                lines[f"held-out {name}"] = f"{first}{after:.3f} {when}"
        lines |= held_out_lines(self.first_eval, self.last_eval)
        if self.best.steps:
            first = self.best.steps[0]
            lines["best checkpoint"] = f"step {first.step}, {self.best.metric} {first.value:.4g}"
        lines["samples"] = "{dispatched} dispatched, {trained} trained, {dropped} dropped".format_map(counts)
        if open_samples := counts.get("in_flight", 0):
            again = ", which --resume samples again" if self.stopped else ""
            lines["samples"] += f", {open_samples} in flight{again}"
        lines |= {f"dropped: {reason}": str(count) for reason, count in self.drop_reasons.items()}
        lines["peak memory"] = self.peak_memory
        for name in ("metrics.jsonl", "trajectories", "evaluation", "checkpoints", "tensorboard"):
            if (out / name).exists():
                lines[name] = str(out / name)
        return lines


class Controller:
    """Runs the training loop. Handles scalars and references to tables, never token tensors."""

    def __init__(
        self,
        spec: RunSpec,
        components: RunComponents,
        parts: RunParts,
        sinks: MetricSinks,
        console: Console,
        stop: asyncio.Event,
        done: int = 0,
    ) -> None:
        """`done`: steps that the run has completed; the parts have their state."""
        self._spec = spec
        self.components = components
        self.parts = parts
        self.sinks = sinks
        self.console = console
        self.version = done
        self.stop = stop
        self._recorder = components.recorder
        self._timers = self._new_timers()
        sync, calls, source = components.sync, components.recovery.calls, components.source
        self._weights = None if sync is None else RunWeights(sync, calls, self._recorder, source.mark_served)

    async def run(self) -> RunOutcome:
        """Trains until the last step, or saves and returns after the step during which `stop` was set."""
        how: Ended = "failed"
        try:
            async with rare_collections():
                for part in self.parts.all:
                    await part.open()
                outcome = await self._run()
            how = outcome.how
            return outcome
        except StopRequested:
            how = "stopped"
            raise
        finally:
            await close_parts(self.parts.all)
            self.sinks.close(how)

    async def _run(self) -> RunOutcome:
        """Consumes batches from the source, one per step. Waits for the next batch, for the trainers and for the
        engines' acknowledgements; each step ends within `step_timeout_s`. `stop` interrupts the wait for a batch."""
        spec, source = self._spec, self.components.source
        heartbeat, watch = asyncio.create_task(self._heartbeat()), asyncio.create_task(self.components.recovery.watch())
        try:
            trial = self.parts.saves.begin_trial()  # the trainers have nothing else to do until there is a batch
            if self.version and self._weights is not None:
                await self._weights.push(self.version)
            if (evaluation := self.parts.evaluations.at_start(self.version)) is not None:
                await unless_stopped(self.stop, unless_failed(trial, evaluation))
            for part in self.parts.all:
                part.begin(self.version)
            if not self.version:
                await self._recorder.end_step(0)  # start-up; a resumed run's is part of its first step
            source.start()
            self._timers = self._new_timers()
            while self.version < spec.schedule.steps and not await self._is_over(watch):
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
            bound = f"schedule.step_timeout_s ({spec.schedule.step_timeout_s:g} s)"
            raise TroupeError(f"step {self.version + 1} took longer than {bound}") from None
        finally:
            heartbeat.cancel()
            watch.cancel()
            await self.parts.evaluations.cancel()
            if self._weights is not None:
                await self._weights.cancel()
            await source.close()
            await self.components.recovery.calls.close()
            await self._recorder.close()
        return await self._end(snapshot)

    async def _end(self, snapshot: SourceSnapshot) -> RunOutcome:
        await self.components.source.flush()
        await self.parts.saves.last(snapshot, self._moment())
        await self._recorder.close()
        ledger, steps = self.components.ledger, self._spec.schedule.steps
        ledger.check()
        early = self.parts.best.no_gain if self.version < steps else ""
        outcome = RunOutcome(
            self.version,
            not (self.version >= steps or early),
            self.parts.evaluations.first,
            self.parts.evaluations.last,
            ledger.counts(),
            ledger.drop_reasons(),
            self.components.peaks.summary(),
            early,
            self.parts.best.state,
            evaluated=self.parts.evaluations.last_step,
        )
        self._recorder.events.record("run_ended", how=outcome.how, **({"detail": early} if early else {}))
        return outcome

    async def _is_over(self, watch: asyncio.Task[None]) -> bool:
        """Whether the run ends early (`checkpoint.patience`): not if its newest model, evaluated then, is a gain."""
        if self.parts.best.no_gain:
            if self._weights is not None:
                await self._weights.settle()
            evaluation = self.parts.evaluations.evaluate_end(self.version)
            await unless_stopped(self.stop, unless_failed(watch, evaluation))
        return bool(self.parts.best.no_gain)

    async def _settle(self) -> SourceSnapshot:
        """Waits for background work; returns what to save, before the groups in flight are cancelled."""
        await self.parts.evaluations.leave(self.version)
        if self._weights is not None:
            await self._weights.settle()
        await self.components.step_recorder.settle()
        return await self.components.source.snapshot()

    def _new_timers(self) -> PhaseTimers:
        return PhaseTimers(record=self._recorder.phase)

    async def step(self, step: int) -> None:
        """One step: take a batch, update, sync the weights, account for the samples, let the parts follow."""
        self._recorder.events.step = step + 1
        batch = await self.components.source.next_batch(self.version, self._timers)
        trained = await self._update(step, batch)
        await self._sync(step + 1)
        await self._account(trained)
        await self._follow(trained)

    async def _update(self, step: int, batch: Batch) -> UpdatedStep:
        with self._timers.phase("update"):
            for part in self.parts.all:
                await part.before_update()
            before = self.parts.penalty.state
            updates, self.parts.penalty.state = await self.components.recovery.train(step, batch, before)
        return UpdatedStep(step + 1, batch, before, updates, self._timers)

    async def _sync(self, version: int) -> None:
        """Every engine loads and verifies the weights, during the next step if samples may be stale."""
        if self._weights is None:
            return
        with self._timers.phase("sync"):
            self.console.phase("weight sync")
            await (self._weights.publish if self._may_overlap(version) else self._weights.push)(version)
        await asyncio.sleep(0)  # thousands of engines have answered; let the groups that wait for them run first

    async def _account(self, step: UpdatedStep) -> None:
        """The step's samples are trained; the next ones may start."""
        for part in self.parts.all:
            await part.after_update(step)
        self.version = step.number
        self.components.source.mark_trained(self.version)
        await asyncio.sleep(0)  # dispatch the groups that wait for an engine before computing metrics

    def _may_overlap(self, version: int) -> bool:
        """Whether the loop may continue before the engines have a version: an evaluation and the end need it."""
        last = version == self._spec.schedule.steps
        return overlaps_steps(self._spec) and not last and not self.parts.evaluations.is_due(version)

    async def _follow(self, step: UpdatedStep) -> None:
        """Evaluates if that is due, writes the step's metrics, and then a checkpoint if one is due."""
        metrics: Metrics = {}
        for part in self.parts.all:
            metrics |= await part.after_step(step, metrics)
        self.sinks.write(step.number, metrics)
        self.console.step(step.number, metrics)
        self._timers = self._new_timers()  # this step's metrics are written: the next step's include the checkpoint
        now = self._moment()
        for part in self.parts.all:
            await part.end_step(now)

    def _moment(self) -> Moment:
        return Moment(self.version, self._timers, self.parts.states)

    async def _heartbeat(self) -> None:
        """Probes the source's workers at a fixed interval; runs as a task until the run ends."""
        while True:
            await asyncio.sleep(probe_interval_s(self._spec))
            try:
                await self.components.source.probe()
            except Exception:
                logger.exception("a round of health probes failed")
