"""Stages of a start: a worker's process says what it is doing, in a file that its node's watch reads.

A worker that loads a model answers no call. The file is beside those of the stacks (`workers/telemetry/stacks.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from troupe.workers.telemetry.stacks import stacks_folder

_LONGEST = 80
"""Characters of a stage that are read."""


class Stage(StrEnum):
    """What a worker does before it serves, as the console shows it."""

    GROUP = "process group"
    MODEL = "model load"
    TRAINER = "DeepSpeed"
    FUNCTIONS = "reward functions"
    IMPORT = "import of vLLM"
    WARM_UP = "engine warm-up"


def announce(stage: Stage, pid: int | None = None) -> None:
    """Records the stage of this process, or of the worker `pid` that started it. Without a folder, does nothing."""
    if folder := stacks_folder():
        path = _file(Path(folder), pid or os.getpid())
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as stream:
                stream.write(stage)


def read_stages(folder: Path, pids: Iterable[int]) -> dict[int, str]:
    """The stages of these processes; those that announced none are missing."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError), _file(folder, pid).open(encoding="utf-8", errors="replace") as stream:
            if stage := stream.read(_LONGEST).strip():
                found[pid] = stage
    return found


def _file(folder: Path, pid: int) -> Path:
    return folder / f"stage-{pid}.txt"
