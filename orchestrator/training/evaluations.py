"""The evaluations of a run: when one is due, making one while the loop waits or in the background, and a lost one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from troupe.orchestrator.errors import EvaluationLost
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.telemetry.sinks import MetricSinks
from troupe.orchestrator.training.batch import EvaluationBesideTraining, HeldOutEvaluation
from troupe.orchestrator.training.parts import Metrics, Moment, RunPart, UpdatedStep
from troupe.orchestrator.training.saves import RunSaves

logger = logging.getLogger(__name__)

_QUIET_METRICS = ("refused", "failed_samples", "truncated")
"""Shown after an evaluation only if they are not 0."""
_IN_REPORT_ONLY = ("_low", "_high", "solved_at")
"""Ends of metrics of an evaluation that only the report and the files show; with those by level."""


class RunEvaluations(RunPart):
    """Makes the evaluations of a run, one at a time. With `evaluation.beside`, a task makes one while the loop
    continues; its result is taken over between two phases (`collect`). The loop waits for it (`settle`) before
    the next one, before the checkpoint of a later step, and at the end."""

    name = "evaluations"

    def __init__(
        self,
        spec: RunSpec,
        evaluator: HeldOutEvaluation | None,
        beside: EvaluationBesideTraining | None,
        saves: RunSaves,
        recorder: RunRecorder,
        console: Console,
        sinks: MetricSinks,
    ) -> None:
        """Evaluates nothing yet; no `evaluator` without held-out data, no `beside` if training waits for it."""
        self._config = spec.evaluation
        self._steps = spec.schedule.steps
        self._evaluator = evaluator
        self._beside = beside
        self._saves = saves
        self._recorder = recorder
        self._console = console
        self._sinks = sinks
        self._running: asyncio.Task[Metrics] | None = None
        self._overdue = False
        """Whether an evaluation was lost: one is due after the next step."""
        self._waited_for: int | None = None
        """The step after which training waits for an evaluation."""
        self.pending: int | None = None
        """The step whose evaluation runs beside training."""
        self.first: Metrics = {}
        """Metrics of the model before training."""
        self.last: Metrics = {}
        """Metrics of the last evaluation."""
        self.last_step: int | None = None
        """The step of the last evaluation, or None before the first."""

    def restore(self, state: Any) -> None:
        self._overdue = bool(state["due"]) and self._config is not None

    def snapshot(self) -> dict[str, Any]:
        """Whether an evaluation was due that has not been made: a resumed run makes it."""
        return {"due": self.pending is not None or self._overdue}

    def is_due(self, step: int) -> bool:
        config = self._config
        if config is None:
            return False
        regular = bool(config.every_steps) and step % config.every_steps == 0
        return regular or self._overdue or (step == self._steps and config.at_end)

    def at_start(self, done: int) -> Coroutine[Any, Any, None] | None:
        """Evaluation of the initial model, or of a checkpoint's step if it had not ended; None if neither is due."""
        initial = self._config is not None and self._config.at_start and not done
        return self._evaluate_first(done) if initial or self._overdue else None

    async def _evaluate_first(self, done: int) -> None:
        await self._begin(done)
        await self.evaluate(done, late=True)

    async def after_update(self, step: UpdatedStep) -> None:
        """Begins an evaluation beside training if one is due: it takes its engine before the next samples do."""
        with nullcontext() if self.pending is None else step.timers.phase("evaluate"):
            await self._begin_if_due(step.number)

    async def _begin_if_due(self, step: int) -> None:
        """Begins it once the previous one has ended, unless the step is the last."""
        if not self.is_due(step):
            return
        await self.settle()
        if step < self._steps:
            await self._begin(step)
        self._waited_for = None if self.pending == step else step

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Evaluates the step, if that was due and has not begun beside training; the metrics for its line."""
        with step.timers.phase("evaluate"):
            await self.collect()
            return await self.evaluate(step.number) if self._waited_for == step.number else {}

    async def end_step(self, now: Moment) -> None:
        """Settles before the checkpoint of a later step: the evaluation decides which checkpoints are kept."""
        if self.pending not in (None, now.step) and self._saves.is_due(now.step):
            with now.timers.phase("evaluate"):
                await self.settle()

    async def evaluate(self, step: int, *, late: bool = False) -> Metrics:
        """Evaluates the served weights while the loop waits, unless an evaluation runs beside it."""
        evaluator = self._evaluator
        if evaluator is None or self.pending == step:
            return {}
        metrics = await evaluator.run(step, partial(self._console.phase, "evaluate", unit="prompts"))
        self._overdue = False
        await self._take(step, metrics, late)
        return metrics

    async def collect(self) -> None:
        if self._running is not None and self._running.done():
            await self.settle()

    async def settle(self) -> None:
        """Waits for the evaluation beside training; a lost one is made up for later. Raises WorkerError."""
        if self._running is None or self.pending is None:
            return
        running, step = self._running, self.pending
        if not running.done():
            self._console.phase("evaluate", waiting_for=f"the evaluation of step {step}")
            await asyncio.wait({running})
        self._set(None, None)
        try:
            metrics = running.result()
        except EvaluationLost as error:
            self._overdue = True
            self._recorder.events.record("evaluation", of=step, ok=False, detail=str(error))
            logger.warning("the evaluation of step %d is lost: %s; evaluating after the next step", step, error)
        else:
            self._recorder.events.record("evaluation", of=step, ok=True)
            await self._take(step, metrics, late=True)

    async def evaluate_end(self, step: int) -> None:
        """Evaluates the step at which the run ends early, if the last one is to be evaluated and it has not been."""
        await self.settle()
        if self._config is not None and self._config.at_end and self.last_step != step:
            await self.evaluate(step, late=True)

    async def leave(self, step: int) -> None:
        """Before the last checkpoint: the evaluated step's checkpoint records that its evaluation is due."""
        await self.collect()
        if self.pending == step:
            await self.cancel()
        await self.settle()

    async def cancel(self) -> None:
        """Gives up the evaluation beside training; it stays due."""
        if self._running is None:
            return
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self._set(None, None)
        self._overdue = True

    def _set(self, running: asyncio.Task[Metrics] | None, step: int | None) -> None:
        self._running = running
        self.pending = step
        self._saves.expect(step)

    async def _begin(self, step: int) -> None:
        work = None if self._beside is None else await self._beside.begin(step)
        if work is not None:
            self._set(asyncio.create_task(work, name=f"evaluate {step}"), step)
            self._overdue = False

    async def _take(self, step: int, metrics: Metrics, late: bool) -> None:
        """Compares and shows an evaluation; one that is `late` is not in the line with the step's other metrics."""
        self.last, self.last_step = metrics, step
        if not step:
            self.first = metrics
        await self._saves.compare(step, metrics)
        if late:
            self._sinks.write(step, metrics)
        shown = ", ".join(f"{k[5:]} {v:.3g}" for k, v in metrics.items() if _is_shown(k) and (v or not _is_quiet(k)))
        self._console.message(f"held-out after step {step}: {shown}")
        if late:
            self._console.evaluation(step, metrics)


def _is_shown(metric: str) -> bool:
    """Whether a metric of an evaluation is shown when it has ended."""
    return "/level/" not in metric and not metric.endswith(_IN_REPORT_ONLY)


def _is_quiet(metric: str) -> bool:
    return metric.endswith(_QUIET_METRICS)
