"""The parts of a run, in the order in which a step passes them, and the controller that they make."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.orchestrator.controller import Controller, RunComponents, RunParts
from troupe.orchestrator.runs.checkpoints import RunCheckpoints
from troupe.orchestrator.runs.session import Session
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.training import kl_penalty
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.training.best_checkpoints import BestCheckpoints
from troupe.orchestrator.training.evaluations import RunEvaluations
from troupe.orchestrator.training.parts import RunPart, restore_parts
from troupe.orchestrator.training.saves import RunSaves, SaveContext, Uploads
from troupe.orchestrator.training.step_metrics import ChangeEvents, RestartCounts, StepFiles, StepMetrics
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
        saves,
        *(() if components.scaler is None else (components.scaler,)),
        ChangeEvents(components.ledger, recorder.events),
        StepFiles(source, recorder),
        *own,
    )
    if checkpoints.found is not None:
        with checkpoints.found.restoring():
            restore_parts(parts, checkpoints.found.state)
    return RunParts(penalty, best, evaluations, saves, parts)
