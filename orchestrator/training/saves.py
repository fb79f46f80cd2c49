"""The checkpoints of a run: when one is due, writing it while the loop waits or in the background, and failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.orchestrator.errors import ExportFailed, TroupeError, WorkerRaised
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.recorder import RunRecorder
from troupe.orchestrator.training.batch import BatchSource, SourceSnapshot
from troupe.orchestrator.training.best_checkpoints import BestCheckpoints
from troupe.orchestrator.training.checkpoint import CheckpointError, CheckpointsTaken, CheckpointStore, trainer_layouts
from troupe.orchestrator.training.parts import FORMAT, Metrics, Moment, RunPart, UpdatedStep
from troupe.orchestrator.training.recovery import TrainerRecovery
from troupe.orchestrator.training.trainer_saves import TrainerSaves, TrainersLost, Written
from troupe.orchestrator.training.updates import Updates

if TYPE_CHECKING:
    from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints

logger = logging.getLogger(__name__)


class Uploads:
    """Uploads one checkpoint at a time in the background."""

    def __init__(self, remote: RemoteCheckpoints | None, tolerated: int, timeout_s: float) -> None:
        self._remote = remote
        self._timeout_s = timeout_s
        self._tolerated = tolerated
        self._failed = 0
        self._running: asyncio.Task[None] | None = None
        self._newest: Path | None = None
        """The checkpoint that is being uploaded, or whose upload failed, if any."""
        self._protected: frozenset[int] = frozenset()

    def start(self, checkpoint: Path, protected: Collection[int] = ()) -> None:
        """Begins to upload a checkpoint; `settle` comes before the next one, and before its folder may change."""
        if self._remote is not None:
            self._newest, self._protected = checkpoint, frozenset(protected)
            self._running = asyncio.create_task(asyncio.to_thread(self._remote.upload, checkpoint, self._protected))

    async def settle(self, *, last: bool = False) -> None:
        """Waits for the upload that is running, and repeats a failed one. Raises CheckpointsTaken; TroupeError if
        too many in a row have failed, or the `last`, or one takes too long."""
        if last and self._running is None and self._newest is not None:
            self.start(self._newest, self._protected)
        running, self._running = self._running, None
        if running is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(running), self._timeout_s)
        except TimeoutError:
            if self._remote is not None:
                self._remote.stop()
            where = f"{self._timeout_s:g} s (schedule.train_timeout_s)"
            raise TroupeError(
                f"the checkpoint is in the run's folder, but its upload takes more than {where}"
            ) from None
        except CheckpointsTaken:
            raise
        except CheckpointError as error:
            self._failed += 1
            if last or self._failed > self._tolerated:
                raise TroupeError(f"the checkpoint is in the run's folder, but was not uploaded: {error}") from error
            tolerated = f"{self._failed} of {self._tolerated} tolerated (failures.failed_saves)"
            logger.warning("a checkpoint was not uploaded: %s; continuing (%s)", error, tolerated)
        else:
            self._failed, self._newest = 0, None


@dataclass(frozen=True)
class SaveContext:
    """The contents of checkpoints, and the places for them and their events."""

    source: BatchSource
    recovery: TrainerRecovery
    store: CheckpointStore
    uploads: Uploads
    recorder: RunRecorder
    console: Console
    best: BestCheckpoints


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written: its content besides the trainers' files."""

    step: int
    """Steps done."""
    parts: Mapping[str, Any]
    """The states of the parts, by name."""
    snapshot: SourceSnapshot
    started: float
    """Time of the event loop, in seconds."""


class RunSaves(RunPart):
    """Writes checkpoints, at most one at a time. With `checkpoint.async_save`, a task writes one from the trainers'
    copies while the loop continues. It waits for the trainers, the upload before and the disk, and ends when the
    checkpoint is published or given up."""

    def __init__(self, spec: RunSpec, updates: Updates, targets: SaveContext, done: int) -> None:
        """Writes nothing yet; `done`: step of the checkpoint that the run resumes from."""
        self._spec = spec
        self._source = targets.source
        self._recovery = targets.recovery
        self._store = targets.store
        self._uploads = targets.uploads
        self._recorder = targets.recorder
        self._best = targets.best
        self._trainers = TrainerSaves(spec, updates.trainers, targets.store, targets.console)
        self._saved_at = done if targets.store.has_model(done) else None
        """Step of the last complete checkpoint."""
        self._failed = 0
        """Checkpoints in a row that were not written."""
        self._trial: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None
        self._overdue = False
        """Whether a checkpoint was given up with its trainers: the next step is saved."""
        self._times: dict[str, float] = {}
        self._expected: int | None = None
        """A step whose evaluation runs: it may turn out to be one of the best ones."""

    def expect(self, step: int | None) -> None:
        """Notes that an evaluation of this step runs, or None if none does."""
        self._expected = step

    def begin_trial(self) -> asyncio.Task[None]:
        """Begins a trial write of a small part of a checkpoint, during the first samples; it raises TroupeError."""
        self._trial = asyncio.create_task(self._recovery.calls.retry(self._trainers.try_all))
        return self._trial

    async def before_update(self) -> None:
        """Waits until the trainers have written it. Raises TroupeError."""
        if self._trial is not None:
            await asyncio.wait({self._trial})
            self._trial.result()

    async def after_update(self, step: UpdatedStep) -> None:
        """Waits for a checkpoint whose model is to play against the policy, so that the same one does after a resume.
        Raises TroupeError."""
        judge = None if self._spec.rollouts is None else self._spec.rollouts.roles.judge
        if judge is not None and judge.renew_every is not None and (step.number - 1) % judge.renew_every == 0:
            await self.settle()

    async def end_step(self, now: Moment) -> None:
        """Saves the step if due, and reports the last one written. Raises TroupeError after too many failures."""
        with now.timers.phase("checkpoint"):
            if self._running is not None and self._running.done():
                await self.settle()
            if not self.is_due(now.step):
                return
            await self.settle()
            self._overdue = False
            begins = self._spec.checkpoint.async_save
            await self._tolerate(self._begin(now) if begins else self._save_now(now), now.step)

    def is_due(self, step: int) -> bool:
        every = self._spec.checkpoint.every_steps
        regular = bool(every) and step % every == 0
        candidate = self._best.compares and step == self._expected
        return regular or self._overdue or candidate or step in self._best.state.saved

    async def settle(self) -> None:
        """Waits for the checkpoint in the background. Raises TroupeError if too many in a row have failed."""
        if self._running is None:
            return
        if not self._running.done():
            started = _now()
            await asyncio.wait({self._running})
            self._time("wait", started)
        running, self._running = self._running, None
        running.result()

    async def last(self, snapshot: SourceSnapshot, now: Moment) -> None:
        """Saves the end of the run, and waits until it is uploaded. Raises TroupeError, OSError."""
        await self.before_update()
        await self.settle()
        await self._save(snapshot, now)
        await self._uploads.settle(last=True)

    async def close(self) -> None:
        """Gives up the checkpoint that is being written, in a run that has failed."""
        for task in (self._trial, self._running):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def compare(self, step: int, metrics: Metrics) -> None:
        """Compares an evaluation with earlier ones; one of the best is saved. Raises TroupeError as `end_step` does."""
        if self._best.compares:
            await self.settle()  # a checkpoint that failed cannot be the best one
        self._best.seen(step, metrics)

    async def after_step(self, step: UpdatedStep, metrics: Mapping[str, float]) -> Metrics:
        """Seconds of copies, waits and writes since the previous step."""
        times, self._times = self._times, {}
        return times

    def _time(self, part: str, started: float) -> None:
        name = f"seconds/save_{part}"
        self._times[name] = self._times.get(name, 0.0) + _now() - started

    async def _tolerate(self, save: Coroutine[Any, Any, None], step: int) -> None:
        """Awaits the save of a step, which may fail. Raises TroupeError if too many in a row have failed."""
        try:
            await save
        except TrainersLost as error:
            self._overdue = True
            self._note_failure(error, step)
            logger.warning("checkpoint of step %d given up: %s; saving after the next step", step, error)
        except (OSError, WorkerRaised, ExportFailed) as error:
            self._failed += 1
            self._note_failure(error, step)
            limit, why = self._spec.failures.failed_saves, f"{error} ({self._store.free_space()})"
            if self._failed > limit:
                raise TroupeError(f"{self._failed} checkpoints in a row were not written: {why}") from error
            failed = f"{self._failed} of {limit} tolerated (failures.failed_saves)"
            logger.warning("checkpoint of step %d failed: %s; continuing (%s)", step, why, failed)

    def _note_failure(self, error: Exception, step: int) -> None:
        self._recorder.events.record("checkpoint", path=str(self._store.directory), ok=False, detail=str(error))
        self._best.lost(step)

    async def _begin(self, now: Moment) -> None:
        """Makes the trainers copy their state, and writes the checkpoint in the background."""
        saving = _Saving(now.step, now.states(), await self._source.snapshot(), _now())
        folder = await self._recovery.calls.retry(lambda: self._trainers.begin(now.step))
        self._recovery.begin_save()
        self._time("copy", saving.started)
        self._running = asyncio.create_task(self._finish(saving, folder), name=f"save step {now.step}")

    async def _finish(self, saving: _Saving, folder: Path) -> None:
        """Waits for the trainers, writes the rest of the checkpoint and publishes it. Raises TroupeError."""

        async def finish() -> None:
            started = _now()
            await self._commit(saving, await self._trainers.written(folder))
            self._time("write", started)

        await self._tolerate(finish(), saving.step)

    async def _save_now(self, now: Moment) -> None:
        """Saves as `_save` does, with the current state."""
        await self._save(await self._source.snapshot(), now)

    async def _save(self, snapshot: SourceSnapshot, now: Moment) -> None:
        """Writes one atomic checkpoint of everything a resumed run needs. A step that is saved already gets only the
        samples that have been finished since."""
        again = self._saved_at == now.step
        if again and snapshot.write is None:
            return
        saving, recovery = _Saving(now.step, now.states(), snapshot, _now()), self._recovery
        if not again:
            written = await recovery.calls.retry(lambda: self._trainers.write(now.step))
            recovery.begin_save()
            await self._commit(saving, written)
            return
        await self._uploads.settle()  # the commit replaces the folder that is being uploaded
        if (folder := await self._saved_files(now.step)) is not None:
            await self._commit(saving, Written(folder))

    async def _commit(self, saving: _Saving, written: Written) -> None:
        """Adds to the trainers' files what else a resumed run needs, and publishes the checkpoint."""
        await self._uploads.settle()  # a commit may remove the folder that is being uploaded
        step, snapshot, parts = saving.step, saving.snapshot, saving.parts
        if written.without_model:
            self._best.lost(step)  # before the commit removes what is not kept
            parts = {**parts, self._best.name: self._best.snapshot()}  # no evaluation was compared since the moment
        state = {"format": FORMAT, "step": step, "source": snapshot.state, "ledger": snapshot.ledger, "parts": parts}
        state["trainers"] = {role: asdict(layout) for role, layout in trainer_layouts(self._spec).items()}
        samples = 0 if snapshot.write is None else await snapshot.write(written.folder)
        saved = await self._recovery.commit(step, lambda: self._store.commit(written.folder, state))
        seconds = round(_now() - saving.started, 4)
        self._uploads.start(saved.path, self._store.kept)
        if written.without_model:
            raise ExportFailed(
                f"the model cannot be exported: {written.without_model}; {saved.path} holds the trainers' state: "
                "`--resume` continues from it and exports again"
            )
        self._recorder.events.record("checkpoint", path=str(saved.path), ok=True, seconds=seconds, samples=samples)
        self._saved_at, self._failed = step, 0

    async def _saved_files(self, step: int) -> Path | None:
        """A folder with the files of this step's checkpoint, or None if samples cannot be added to them."""
        try:
            return await asyncio.to_thread(self._store.begin_again, step)
        except CheckpointError as error:
            logger.warning("samples finished since the checkpoint of step %d are not kept: %s", step, error)
            return None


def _now() -> float:
    return asyncio.get_running_loop().time()
