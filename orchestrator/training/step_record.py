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

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import xxhash
from pydantic import ConfigDict, ValidationError

from troupe.orchestrator.data.texts import TextPicks
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.base import RESOLVED_SPEC
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.state import PenaltyState
from troupe.workers.contract.config_base import Frozen, first_problem
from troupe.workers.contract.messages import KEPT_BATCH, KEPT_TEXTS, KeptFile, TrainRow, TrainSummary

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
