"""The trainers' part of a checkpoint: state of every rank, and the model as a Hugging Face folder.

It is written while the loop waits, or from a copy while the loop trains (`checkpoint.async_save`). Either way the files
are in a hidden folder until the whole checkpoint is committed.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import WorkerError, WorkerRaised
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.checkpoint import AVERAGE, MODEL, CheckpointError, CheckpointStore, require_files
from troupe.workers.contract.messages import SaveStatus

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""Between two questions whether the ranks have written; each wait is twice as long as the previous one."""


class TrainersLost(CheckpointError):
    """The trainers whose state was being written were restarted or lost, and their copies with them."""


@dataclass(frozen=True)
class Written:
    """Files of the trainers in the folder of a checkpoint that is not committed."""

    folder: Path
    without_model: str = ""
    """Why the model is not among them, or empty if it is."""


class TrainerSaves:
    """Makes the trainers write their part of checkpoints."""

    def __init__(
        self, spec: RunSpec, trainers: Sequence[TrainerGroup[Any]], store: CheckpointStore, console: Console
    ) -> None:
        self._trainers = trainers
        self._store = store
        self._console = console
        self._timeout_s = spec.schedule.train_timeout_s
        self._step_timeout_s = spec.schedule.step_timeout_s
        self._averages = spec.roles.policy.ema_decay > 0

    async def try_all(self) -> None:
        """Makes every trainer write a small part of what the run saves, to know of failures at the start. Raises
        WorkerError if one cannot write or export; CheckpointError if files do not arrive here."""
        folder = self._store.begin_trial()
        try:
            for group in self._trainers:
                await group.try_save(str(folder / group.role), timeout_s=self._timeout_s)
                require_files(folder / group.role, group.ranks)
        finally:
            self._store.discard(folder)

    async def write(self, step: int) -> Written:
        """Writes the state after a step. Raises WorkerError, CheckpointError."""
        folder = self._store.begin(step)
        try:
            for number, group in enumerate(self._trainers):
                self._console.phase("checkpoint", number, len(self._trainers), unit="models")
                await group.save(str(folder / group.role), timeout_s=self._timeout_s)
            return Written(folder, await self._export(self._trainers[0], folder))
        except (WorkerError, asyncio.CancelledError):
            self._store.discard(folder)
            raise

    async def begin(self, step: int) -> Path:
        """Makes the trainers copy the state after a step and begin to write it. Raises WorkerError, CheckpointError."""
        folder = self._store.begin(step)
        average = str(folder / AVERAGE) if self._averages else ""
        try:
            for number, group in enumerate(self._trainers):
                exports = ("", "") if number else (str(folder / MODEL), average)
                await group.begin_save(str(folder / group.role), *exports, timeout_s=self._timeout_s)
        except (WorkerError, asyncio.CancelledError):
            self._store.discard(folder)
            raise
        return folder

    async def written(self, folder: Path) -> Written:
        """Waits until the trainers have written the state that `begin` copied. Waits for each group's ranks in turn,
        which answer between two calls of the loop; `schedule.train_timeout_s` bounds the whole. Raises CheckpointError
        if it could not be written, or takes too long; TrainersLost if they do not write it any more."""
        failed, without_model = "", ""
        try:
            async with asyncio.timeout(self._timeout_s):
                for group in self._trainers:
                    status = await self._finished(group, str(folder / group.role))
                    failed, without_model = failed or status.failed, without_model or status.export_failed
            if failed:
                raise CheckpointError(errno.EIO, failed, str(folder))
        except CheckpointError:
            self._store.discard(folder)
            raise
        except WorkerError as error:
            self._store.discard(folder)
            raise TrainersLost(errno.EIO, f"{error.worker} does not write it any more: {error}", str(folder)) from error
        except TimeoutError:
            self._store.discard(folder)
            problem = f"it takes more than schedule.train_timeout_s ({self._timeout_s:g} s)"
            raise CheckpointError(errno.ETIMEDOUT, problem, str(folder)) from None
        if without_model:
            self._without_model(folder)
        return Written(folder, without_model)

    async def _finished(self, group: TrainerGroup[Any], directory: str) -> SaveStatus:
        pause_s = _FIRST_PAUSE_S
        while True:
            # The ranks answer after the update that they are at.
            status = await group.save_status(directory, timeout_s=self._step_timeout_s)
            if status.done:
                return status
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _export(self, trainer: TrainerGroup[Any], folder: Path) -> str:
        """Writes the model as Hugging Face folders; returns why it failed, or "". Raises WorkerError if one is lost."""
        try:
            await trainer.export(str(folder / MODEL), timeout_s=self._timeout_s)
            if self._averages:
                await trainer.export(str(folder / AVERAGE), average=True, timeout_s=self._timeout_s)
        except WorkerRaised as error:
            if await trainer.find_dead() is not None:  # the other ranks report it first
                raise
            self._without_model(folder)
            return error.detail
        return ""

    def _without_model(self, folder: Path) -> None:
        for name in (MODEL, AVERAGE):
            self._store.discard(folder / name)
