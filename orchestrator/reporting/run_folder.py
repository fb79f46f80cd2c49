"""Reads what a run has recorded in its folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from orchestrator.errors import DataError, UsageError

_STEP = re.compile(r"step-(\d+)\.parquet")


class RunFolder:
    """The folder of a run, finished or active."""

    def __init__(self, path: str | Path) -> None:
        """Raises UsageError where the folder holds no run."""
        self.path = Path(path)
        if not (self.path / "spec.yaml").is_file() and not (self.path / "metrics.jsonl").is_file():
            raise UsageError(f"{self.path} holds no run: it has neither spec.yaml nor metrics.jsonl")

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The resolved spec as plain data; empty where there is none."""
        try:
            found = yaml.safe_load((self.path / "spec.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line of `metrics.jsonl`."""
        return list(_lines(self.path / "metrics.jsonl"))

    def events(self) -> list[dict[str, Any]]:
        """Every whole line of `events.jsonl`."""
        return list(_lines(self.path / "events.jsonl"))

    def sample_files(self) -> dict[int, Path]:
        """The file of the samples of each step that has one, in order of the steps."""
        return _step_files(self.path / "trajectories")

    def timeline_files(self) -> dict[int, Path]:
        """The file of the timeline of each step that has one, in order of the steps."""
        return _step_files(self.path / "timeline")

    def samples(self, step: int) -> pa.Table:
        """Samples of a step. Raises DataError where the file is missing or damaged."""
        return _read(self.path / "trajectories" / f"step-{step:06d}.parquet")

    def timeline(self, step: int) -> pa.Table:
        """Spans that ended during a step. Raises as `samples` does."""
        return _read(self.path / "timeline" / f"step-{step:06d}.parquet")


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _step_files(folder: Path) -> dict[int, Path]:
    found = ((match, path) for path in folder.glob("step-*.parquet") if (match := _STEP.fullmatch(path.name)))
    return dict(sorted((int(match[1]), path) for match, path in found))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # a line that is being written, or that a kill cut
        if isinstance(value, dict):
            yield value
