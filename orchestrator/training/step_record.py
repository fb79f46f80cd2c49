"""The record of a step for `troupe replay`, in a separate folder: `replay/step-000003/` in the folder of the run.

| file | content |
|---|---|
| `step.json` | `StepRecord`: what the updates need besides the tables, and digests of the weights before and after |
| `batch.arrow` | the TRAIN or EXAMPLE_BATCH table, an Arrow stream |
| `texts.arrow` | the texts of the step's updates (PPO-ptx) |
| `spec.yaml` | the spec as the step used it |

The plans of the updates are not kept: they follow from the seed and from the rows' scalars.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import xxhash
from pydantic import ConfigDict, ValidationError

from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.data.texts import TextPicks
from troupe.orchestrator.errors import UsageError, WorkerError
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.telemetry.versions import versions
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.parts import RunPart, UpdatedStep
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.contract.atomic_file import PRIVATE, write_atomic
from troupe.workers.contract.config import Frozen, first_problem
from troupe.workers.contract.messages import KEPT_BATCH, KEPT_TEXTS, KeptFile, TrainRow, TrainSummary
from troupe.workers.contract.units import GIB

REPLAY = "replay"
"""Folder of the kept steps in the folder of a run."""
STEP = "step.json"
_PREFIX = "step-"


class StepRecord(Frozen):
    """Inputs of one step's updates besides its tables, and the digests of the resulting weights."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")  # a metric may be NaN

    format: Literal[1] = 1
    step: int
    """Counted from 1, as in metrics.jsonl."""
    software: tuple[str, ...]
    """Versions of the packages, and the processor."""
    working_folder: str
    """Folder that relative paths of the spec refer to."""
    state: PenaltyState
    """Before the updates."""
    rows: tuple[TrainRow, ...]
    units: tuple[tuple[int, ...], ...] | None
    text_rows: tuple[int, ...]
    """Rows of the table of texts, in the order of the updates."""
    text_tokens: tuple[int, ...]
    """Tokens of each text in the table."""
    files: dict[str, KeptFile]
    before: dict[str, str]
    """Digest of the weights before the updates, by role, or empty if unknown."""
    after: dict[str, str]
    """Digest of the weights after the updates, by role."""
    updates: tuple[dict[str, float], ...]
    """Metrics of each update."""


@dataclass(frozen=True)
class Tables:
    """The tables of a kept step, verified."""

    batch: pa.Table
    texts: pa.Table | None


@dataclass(frozen=True)
class RecordedStep:
    """A kept step on disk."""

    path: Path
    kept: StepRecord

    @property
    def spec_file(self) -> Path:
        return self.path / RESOLVED_SPEC

    def tables(self) -> Tables:
        """The tables. Raises UsageError: a file is missing or is not what the run wrote."""
        read = {name: self._table(name, entry) for name, entry in self.kept.files.items()}
        if KEPT_BATCH not in read:
            raise UsageError(f"{self.path / STEP} does not list {KEPT_BATCH}: replay another step")
        return Tables(read[KEPT_BATCH], read.get(KEPT_TEXTS))

    def batch(self, table: Any, texts: Any) -> Batch:
        kept = self.kept
        picks = None if texts is None else TextPicks(texts, kept.text_tokens, kept.text_rows)
        return Batch(TrainSummary(kept.rows), table, kept.units, picks)

    def _table(self, name: str, entry: KeptFile) -> pa.Table:
        path = self.path / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"{path} is missing: replay another step") from None
        found = xxhash.xxh3_128_hexdigest(content)
        if found != entry.digest:
            words = (
                f"it has digest {found} and {len(content)} bytes; the run wrote {entry.digest}, {entry.nbytes} bytes"
            )
            raise UsageError(f"{path} has changed: {words}; replay another step")
        return pa.ipc.open_stream(content).read_all()


def folder_of(root: Path, step: int) -> Path:
    return root / f"{_PREFIX}{step:06d}"


def kept_steps(root: Path) -> list[int]:
    """Steps that are kept in a folder, in ascending order."""
    if not root.is_dir():
        return []
    names = [entry.name.removeprefix(_PREFIX) for entry in root.iterdir() if entry.name.startswith(_PREFIX)]
    return sorted(int(name) for name in names if name.isdecimal())


def size_of(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir())


def read_step(root: Path, step: int) -> RecordedStep:
    """A kept step; its tables are not read. Raises UsageError."""
    path = folder_of(root, step)
    file = path / STEP
    try:
        kept = StepRecord.model_validate(json.loads(file.read_bytes()))
    except FileNotFoundError:
        raise UsageError(f"step {step} is not kept in {root}; {_what_is_kept(root)}") from None
    except ValidationError as error:
        raise UsageError(f"{file} cannot be read: {first_problem(error)}; replay another step") from None
    except ValueError as error:
        raise UsageError(f"{file} cannot be read: {error}; replay another step") from None
    if kept.step != step:
        raise UsageError(f"{file} belongs to step {kept.step}")
    return RecordedStep(path, kept)


def read_steps(root: Path, steps: Iterable[int]) -> list[RecordedStep]:
    return [read_step(root, step) for step in steps]


def packed_texts(picks: TextPicks | None) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Rows of the text table that a step uses, ascending (plans sort by row among equal lengths), the tokens of
    each, and the picks as rows of the kept table."""
    if picks is None:
        return [], (), ()
    rows = sorted(set(picks.rows))
    place = {row: number for number, row in enumerate(rows)}
    return rows, tuple(picks.tokens[row] for row in rows), tuple(place[row] for row in picks.rows)


def _what_is_kept(root: Path) -> str:
    steps: Sequence[int] = kept_steps(root)
    if not steps:
        return "the run has kept no step (output.replay_steps, output.replay_gib)"
    return f"kept are {len(steps)} steps, {steps[0]} to {steps[-1]} (output.replay_steps, output.replay_gib)"


logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"


class StepRecorder(RunPart):
    """Writes one folder for each step in the background: a rank the tables, this process the rest. A step that
    cannot be kept is logged and left out. One that alone is larger than all may be ends the keeping."""

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
        """Removes what was kept after step `done`, and digests the weights in the background until `settle`."""
        if self._keeps:
            self._writing = asyncio.create_task(self._begin(done), name=f"begin to keep steps after {done}")

    async def _begin(self, done: int) -> None:
        try:
            await asyncio.to_thread(_prepare, self._folder, done)
            self._digests = await self._take_digests()
        except (OSError, WorkerError) as error:
            self._warn(done + 1, error)

    async def before_update(self) -> None:
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
        """Names the folder, removes the oldest steps beyond the bounds (or this one); returns its bytes."""
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
    """Versions of the packages, and the processor, each named by the first word: they affect a step's results."""
    return (*versions().splitlines(), f"processor {_processor()}")


def _processor() -> str:
    """Model of the processor: the same code may round differently on another one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
