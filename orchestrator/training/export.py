"""Models of checkpoints as separate folders: copied, or adapters merged with the model below them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from troupe.orchestrator.training.checkpoint import (
    MODEL,
    CheckpointError,
    CheckpointStore,
    InvalidCheckpoint,
    folder_name,
    verify,
)
from troupe.workers.contract.adapter_config import ADAPTER_CONFIG
from troupe.workers.isolation.probe import ProbeFailed, ask

_MERGE = "troupe.workers.training.adapter:merge"
_MERGE_S = 3600.0


def exported_model(directory: Path, step: int | None = None, model: str = MODEL) -> Path:
    """The policy of a verified checkpoint: a folder with a Hugging Face model. Raises CheckpointError if no such valid
    checkpoint exists, or it lacks the model.

    Args:
        step: Step of the checkpoint; None for the newest valid one.
        model: MODEL for the trained weights, AVERAGE for their moving average.
    """
    path = directory if step is None else directory / folder_name(step)
    if step is not None and not path.is_dir():
        steps = ", ".join(map(str, CheckpointStore(directory, keep=1).steps()))
        raise CheckpointError(errno.ENOENT, f"no such checkpoint; steps with one: {steps or 'none'}", str(path))
    try:
        found = CheckpointStore(directory, keep=1).latest() if step is None else verify(path)
    except InvalidCheckpoint as error:
        raise CheckpointError(errno.EINVAL, f"invalid checkpoint: {error}", str(path)) from error
    if found is None:
        raise CheckpointError(errno.ENOENT, "no valid checkpoint", str(directory))
    source = found.path / model
    if not source.is_dir():
        raise CheckpointError(errno.ENOENT, f"the checkpoint has no folder {model}", str(source))
    return source


def has_adapters(model: Path) -> bool:
    """Whether the folder of a checkpoint's model holds adapters instead of a whole model."""
    return (model / ADAPTER_CONFIG).is_file()


def write_merged(source: Path, target: Path, base: Path | None = None) -> Path:
    """Writes adapters, merged with the model below (`base`, or theirs), to a new folder, which appears when
    complete. Raises CheckpointError if `target` exists or cannot be written, or the model below has changed."""
    below = {} if base is None else {"base": str(base)}
    with _new_folder(target) as scratch:
        try:
            ask(_MERGE, {"adapter": str(source), "target": str(scratch), **below}, _MERGE_S)
        except ProbeFailed as error:
            raise CheckpointError(errno.EINVAL, f"cannot be merged: {error.raised or error}", str(source)) from error
    return target


def write_model(source: Path, target: Path) -> Path:
    """Copies a model to a new folder, which appears when complete, with the access of the umask: safetensors writes
    for the owner alone. Raises CheckpointError."""
    failed: list[OSError] = []

    def copy(file: str, to: str) -> None:
        try:
            shutil.copyfile(file, to)
        except OSError as error:
            failed.append(error)
            raise

    with _new_folder(target) as scratch:
        try:
            shutil.copytree(source, scratch, copy_function=copy)
        except OSError as error:  # it only lists what has failed
            raise (failed[0] if failed else error) from error
    return target


def require_new(target: Path) -> None:
    """Raises CheckpointError if there is something at `target`."""
    if os.path.lexists(target):
        raise CheckpointError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A name beside `target`, for a folder that gets the final name when the block has written it."""
    scratch = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        require_new(target)
        yield scratch
        os.rename(scratch, target)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(error.errno, error.strerror, str(target)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
