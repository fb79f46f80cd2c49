"""The parts of a run, in the order in which a step passes them, and the controller that they make."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from troupe.orchestrator.controller import Controller, RunComponents, RunParts
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.training import kl_penalty
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.telemetry.metrics import PeakMemory, merge_updates
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.training.batch import BatchSource
from troupe.orchestrator.training.best_checkpoints import BestCheckpoints
from troupe.orchestrator.training.evaluations import RunEvaluations
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import Metrics, Moment, RunPart, UpdatedStep, restore_parts
from troupe.orchestrator.training.saves import RunSaves, SaveContext, Uploads
from troupe.orchestrator.training.updates import Penalty


async def controller_of(session: Session, components: RunComponents, own: Sequence[RunPart] = ()) -> Controller:
    """The controller of a run, at step 0 or with the state of the checkpoint that it resumes from. Raises
    CheckpointError if the state has another form; DataError if the order of the data cannot continue."""
    request, checkpoints, console = session.request, session.checkpoints, session.console
    if checkpoints.found is not None and (samples := await components.source.restore(checkpoints.found)):
        console.message(f"{samples} finished samples of the checkpoint are not sampled again")
    sinks = MetricSinks.of_spec(request.spec, request.out, checkpoints.done)
    parts = run_parts(request.spec, components, checkpoints, sinks, console, own)
    return Controller(request.spec, components, parts, sinks, console, session.stop, checkpoints.done)


def run_parts(
    spec: RunSpec,
    components: RunComponents,
    checkpoints: RunCheckpoints,
    sinks: MetricSinks,
    console: Console,
    own: Sequence[RunPart] = (),
) -> RunParts:
    """The parts of a run, with the state of the checkpoint that it resumes from. Raises CheckpointError if the state
    has another form. `own`: further parts of this kind of run, the last ones."""
    source, recorder, recovery = components.source, components.recorder, components.recovery
    best = BestCheckpoints(spec, components.held_out_rows, checkpoints.store)
    targets = SaveContext(
        source=source,
        recovery=recovery,
        store=checkpoints.store,
        uploads=Uploads(checkpoints.remote, spec.failures.failed_saves, spec.schedule.train_timeout_s),
        recorder=recorder,
        console=console,
        best=best,
    )
    saves = RunSaves(spec, components.updates, targets, checkpoints.done)
    evaluators = components.evaluator, components.beside
    evaluations = RunEvaluations(spec, *evaluators, saves, recorder, console, sinks)
    penalty = Penalty(kl_penalty(spec))
    parts = (
        penalty,
        best,
        components.step_recorder,
        evaluations,
        StepMetrics(source, components.ledger, components.peaks, components.data),
        RestartCounts(recovery.budget, components.budgets),
        StepSamples(source),
        saves,
        *(() if components.scaler is None else (components.scaler,)),
        ChangeEvents(components.ledger, recorder.events),
        StepTimeline(recorder),
        *own,
    )
    if checkpoints.found is not None:
        with checkpoints.found.restoring():
            restore_parts(parts, checkpoints.found.state)
    return RunParts(penalty, best, evaluations, saves, parts)


class StepMetrics(RunPart):
    """Collects the metrics of batch, updates, phases and ledger; the evaluation before it is one of the phases."""

    def __init__(self, source: BatchSource, ledger: Ledger, peaks: PeakMemory, data: Mapping[str, float]) -> None:
        """`data`: counts of the data's rows, a metric of every step."""
        self._source = source
        self._ledger = ledger
        self._peaks = peaks
        self._data = data

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        timers = step.timers
        found = self._source.metrics(step.number, timers.total())
        await asyncio.sleep(0)  # aggregating thousands of samples took one iteration of the event loop
        found |= step.batch.summary.metrics
        found |= merge_updates(step.updates)
        found |= {"seconds/step": timers.total()}
        found |= {f"seconds/{name}": seconds for name, seconds in timers.seconds().items()}
        found |= {f"utilisation/{name}": share for name, share in timers.shares().items()}
        found |= {f"ledger/{name}": float(count) for name, count in self._ledger.counts().items()}
        found |= {"updates": float(len(step.updates))}
        return found | self._peaks.metrics() | dict(self._data)


class RestartCounts(RunPart):
    """Gives restarts back for steps without a lost worker, and counts the trainers' restarts."""

    def __init__(self, trainers: RestartBudget, others: Sequence[RestartBudget]) -> None:
        """`others`: the budgets of the other roles."""
        self._trainers = trainers
        self._others = others

    async def after_update(self, step: UpdatedStep) -> None:
        for budget in (self._trainers, *self._others):
            budget.after_step()

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Restarts of the trainers in the whole run."""
        return {"trainer_restarts": float(self._trainers.total)}


class ChangeEvents(RunPart):
    """Records dropped and repeated samples, and changed numbers of workers, as events."""

    def __init__(self, ledger: Ledger, events: EventLog) -> None:
        """Counts from what the ledger has now."""
        self._ledger = ledger
        self._events = events
        self._dropped, self._retries = ledger.drop_reasons(), ledger.counts()["retries"]
        self._workers: dict[str, int] = {}

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        before, self._dropped = self._dropped, self._ledger.drop_reasons()
        for reason, samples in self._dropped.items():
            if (added := samples - before.get(reason, 0)) > 0:  # a retry takes dropped samples back
                self._events.record("dropped", reason=reason, samples=added)
        retries, self._retries = self._retries, self._ledger.counts()["retries"]
        if self._retries != retries:
            self._events.record("retry", groups=self._retries - retries)
        known, self._workers = self._workers, {k[8:]: int(v) for k, v in metrics.items() if k.startswith("workers/")}
        changed = {role: count for role, count in self._workers.items() if count != known.get(role, 0)}
        if known and changed:
            self._events.record("scaled", workers=changed)
        return {}


class StepSamples(RunPart):
    """Writes the samples of every step in the background; the step's checkpoint waits for them."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    async def end_step(self, now: Moment) -> None:
        await self._source.save_trajectories(now.step)


class StepTimeline(RunPart):
    """Writes the timeline of every step, in the background."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    async def end_step(self, now: Moment) -> None:
        await self._recorder.end_step(now.step)
