"""What a worker does while it starts: its process writes it to a file, and its node's watch reads it.

A worker that loads a model answers no call. The file is in the folder of the stacks (`workers/telemetry/stacks.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from troupe.workers.telemetry.stacks import stacks_folder

_LONGEST = 80
"""Characters of an activity that are read."""


class Activity(StrEnum):
    """What a worker does before it serves, as the console shows it."""

    GROUP = "process group"
    MODEL = "model load"
    TRAINER = "DeepSpeed"
    FUNCTIONS = "reward functions"
    IMPORT = "import of vLLM"
    WARM_UP = "engine warm-up"


def announce(activity: Activity, pid: int | None = None) -> None:
    """Records the activity of this process, or of the worker `pid` that started it. Without a folder, does nothing."""
    if folder := stacks_folder():
        path = _file(Path(folder), pid or os.getpid())
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as stream:
                stream.write(activity)


def read_activities(folder: Path, pids: Iterable[int]) -> dict[int, str]:
    """The activities of these processes, without processes that announced none."""
    found: dict[int, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError), _file(folder, pid).open(encoding="utf-8", errors="replace") as stream:
            if activity := stream.read(_LONGEST).strip():
                found[pid] = activity
    return found


def _file(folder: Path, pid: int) -> Path:
    return folder / f"activity-{pid}.txt"
