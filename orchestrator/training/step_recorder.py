"""Keeps what the updates of the last steps need, bounded in number and bytes, so that they can be repeated."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import WorkerError
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.telemetry.versions import versions
from troupe.orchestrator.training.parts import RunPart, UpdatedStep
from troupe.orchestrator.training.step_record import (
    REPLAY,
    STEP,
    StepRecord,
    folder_of,
    kept_steps,
    packed_texts,
    size_of,
)
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.contract.units import GIB

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"


class StepRecorder(RunPart):
    """Writes one folder for each step, in the background: a rank writes the tables, this process the rest. The tables
    never come to this process. A step that cannot be kept (disk full, ...) is logged and left out. One that alone is
    larger than all steps may be ends the keeping, as the next ones are about as large."""

    def __init__(self, spec: RunSpec, out: Path, trainers: Sequence[TrainerGroup[Any]]) -> None:
        self._spec = spec
        self._folder = out / REPLAY
        self._most_bytes = int(spec.output.replay_gib * GIB)
        self._keeps = spec.output.replay_steps > 0
        self._text = spec.as_yaml()
        self._software = software() if self._keeps else ()
        self._working_folder = os.getcwd()
        self._trainers = trainers
        self._digests: dict[str, str] = {}
        """Digests of the current weights by role, or empty if unknown."""
        self._writing: asyncio.Task[None] | None = None
        self._failed = False

    def begin(self, done: int) -> None:
        """Removes what was kept after step `done`, which the run repeats, and takes the digest of the weights. In the
        background, as the trainers may have something else to do: `settle` before the weights change."""
        if self._keeps:
            self._writing = asyncio.create_task(self._begin(done), name=f"begin to keep steps after {done}")

    async def _begin(self, done: int) -> None:
        try:
            await asyncio.to_thread(_prepare, self._folder, done)
            self._digests = await self._take_digests()
        except (OSError, WorkerError) as error:
            self._warn(done + 1, error)

    async def before_update(self) -> None:
        """Waits until the previous step is kept."""
        await self.settle()

    async def after_update(self, step: UpdatedStep) -> None:
        """Keeps a step in the background: the digest is the current weights'."""
        if self._keeps:
            self._writing = asyncio.create_task(self._keep(step), name=f"keep step {step.number}")

    async def settle(self) -> None:
        """Waits until what was begun is done: the last step is kept."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def close(self) -> None:
        """Ends a step that is being kept."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _keep(self, trained: UpdatedStep) -> None:
        step, batch = trained.number, trained.batch
        unfinished = self._folder / f"{_UNFINISHED}{step:06d}"
        before, self._digests = self._digests, {}
        try:
            self._digests = await self._take_digests()
            await asyncio.to_thread(_fresh, unfinished)
            texts = batch.texts
            rows, tokens, picks = packed_texts(texts)
            files = await self._trainers[0].keep_batch(
                str(unfinished),
                batch.table,
                None if texts is None else texts.table,
                rows,
                timeout_s=self._spec.schedule.train_timeout_s,
            )
            kept = partial(
                StepRecord,
                step=step,
                software=self._software,
                working_folder=self._working_folder,
                state=trained.before,
                rows=batch.summary.rows,
                units=batch.units,
                text_rows=picks,
                text_tokens=tokens,
                files=files,
                before=before,
                after=self._digests,
                updates=tuple(dict(metrics) for metrics in trained.updates),
            )
            nbytes = await asyncio.to_thread(self._publish, unfinished, step, kept)
            self._failed = False
            if nbytes > self._most_bytes:
                self._keeps = False
                words = f"step {step} alone has {nbytes / GIB:.3g} GiB, more than output.replay_gib"
                logger.warning(
                    "%s (%.3g): no more steps are kept for `troupe replay`", words, self._spec.output.replay_gib
                )
        except (OSError, WorkerError) as error:
            self._warn(step, error)
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)

    async def _take_digests(self) -> dict[str, str]:
        """Digest of the weights of each role; the roles' ranks compute it at the same time."""
        trainers, timeout_s = self._trainers, self._spec.schedule.train_timeout_s
        digests = await asyncio.gather(*(group.digest(timeout_s=timeout_s) for group in trainers))
        return {group.role: digest for group, digest in zip(trainers, digests, strict=True)}

    def _publish(self, unfinished: Path, step: int, kept: Callable[[], StepRecord]) -> int:
        """Adds this process's record, gives the folder its name, and removes the oldest steps beyond the bounds.
        Returns the bytes of the step. One that alone is beyond the bound is removed, and the others stay."""
        write_atomic(unfinished / RESOLVED_SPEC, self._text, PRIVATE)
        (unfinished / STEP).write_text(kept().model_dump_json())
        nbytes = size_of(unfinished)
        if nbytes > self._most_bytes:
            shutil.rmtree(unfinished)
            return nbytes
        os.rename(unfinished, folder_of(self._folder, step))
        sizes = {step: size_of(folder_of(self._folder, step)) for step in kept_steps(self._folder)}
        while sizes and (len(sizes) > self._spec.output.replay_steps or sum(sizes.values()) > self._most_bytes):
            oldest = min(sizes)
            del sizes[oldest]
            shutil.rmtree(folder_of(self._folder, oldest))
        return nbytes

    def _warn(self, step: int, error: Exception) -> None:
        """Logs the first of several failures in a row."""
        if not self._failed:
            logger.warning("step %d is not kept in %s for `troupe replay`: %s", step, self._folder, error)
        self._failed = True


def _prepare(folder: Path, done: int) -> None:
    """Removes what an interrupted run left, and the steps after `done`."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(entry)
    for step in kept_steps(folder):
        if step > done:
            shutil.rmtree(folder_of(folder, step))


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def software() -> tuple[str, ...]:
    """The software and hardware that affect a step's results: versions of the packages, and the processor, each named
    by the first word."""
    return (*versions().splitlines(), f"processor {_processor()}")


def _processor() -> str:
    """Model of the processor: the same code may round differently on another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
