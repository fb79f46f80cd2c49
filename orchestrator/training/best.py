"""The best checkpoint of a run (`checkpoint.best`)."""

from __future__ import annotations

import errno
from pathlib import Path

from troupe.orchestrator.training.checkpoint import CheckpointError, CheckpointStore
from troupe.orchestrator.training.state import ControllerState


def best_step(checkpoints: Path) -> int:
    """The step of the best evaluation of a run, as its newest valid checkpoint names it.

    Args:
        checkpoints: Folder of the run's checkpoints.

    Raises:
        CheckpointError: There is no valid checkpoint, or it names no best one.
    """
    found = CheckpointStore(checkpoints, keep=1).latest()
    if found is None:
        raise CheckpointError(errno.ENOENT, "no valid checkpoint", str(checkpoints))
    with found.restoring():
        steps = ControllerState.model_validate(found.state["memory"]).best.steps
    if not steps:
        raise CheckpointError(errno.ENOENT, "the run keeps no best checkpoint (checkpoint.best)", str(checkpoints))
    return steps[0].step
