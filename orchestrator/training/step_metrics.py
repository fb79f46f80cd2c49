"""The metrics of a step besides its evaluation, and the files of its samples and timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.orchestrator.telemetry.metrics import PeakMemory, merge_updates
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.batch import BatchSource
from troupe.orchestrator.training.ledger import Ledger
from troupe.orchestrator.training.parts import Metrics, Moment, RunPart, UpdatedStep


class StepMetrics(RunPart):
    """Collects the metrics of batch, updates, phases and ledger; the evaluation before it is one of the phases."""

    def __init__(self, source: BatchSource, ledger: Ledger, peaks: PeakMemory, data: Mapping[str, float]) -> None:
        """`data`: counts of the data's rows, a metric of every step."""
        self._source = source
        self._ledger = ledger
        self._peaks = peaks
        self._data = data

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """The metrics of the step."""
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
        """Counts a trained step."""
        for budget in (self._trainers, *self._others):
            budget.after_step()

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Restarts of the trainers in the whole run."""
        return {"trainer_restarts": float(self._trainers.total)}


class StepFiles(RunPart):
    """Writes the samples and the timeline of every step, in the background."""

    def __init__(self, source: BatchSource, recorder: RunRecorder) -> None:
        self._source = source
        self._recorder = recorder

    async def end_step(self, now: Moment) -> None:
        """Begins to write the step's files."""
        await self._source.save_trajectories(now.step)
        await self._recorder.end_step(now.step)
