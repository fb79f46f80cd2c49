"""The checkpoints of a run: the ones in its folder, their copies in an object store, and the one to resume from."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from troupe.orchestrator.data.mixture import prompts_drawn
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from troupe.orchestrator.training.parts import states_of
from troupe.orchestrator.training.state import BestState

if TYPE_CHECKING:
    from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints


SpecT = TypeVar("SpecT", bound=RunSpec)


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of a run."""

    store: CheckpointStore
    found: Checkpoint | None = None
    """The one that the run resumes from, or None if it starts from the beginning."""
    remote: RemoteCheckpoints | None = None
    """The copies in an object store, if the spec has one."""

    @property
    def done(self) -> int:
        return 0 if self.found is None else self.found.step


@dataclass(frozen=True)
class SavedRun:
    """Progress of a run, from the checkpoints in its folder."""

    step: int
    """Step of the newest one, or 0 without one."""
    complete: bool
    """Whether it is the last step of the spec, or the one at which the run has ended early, valid, and has the exported
    model."""
    ended_early: str = ""
    """Why it has ended before the last step; empty if it has not."""


def folder_checkpoints(spec: RunSpec, out: Path) -> RunCheckpoints:
    """The checkpoints in a run folder, the newest valid one to resume from."""
    store = CheckpointStore(out / "checkpoints", spec.checkpoint.keep)
    store.prepare()
    return RunCheckpoints(store, store.latest())


def open_checkpoints(spec: RunSpec, out: Path, resume: bool) -> RunCheckpoints:
    """The checkpoints of a run that starts or resumes. Raises UsageError if it has some and does not resume, or none
    is valid; CheckpointError if the object store cannot be reached, or holds another run's under this name."""
    here, remote = folder_checkpoints(spec, out), _remote(spec)
    store, found = here.store, here.found
    if found is not None and not resume:
        raise UsageError(f"{out} already contains a run (step {found.step}): use --resume or another --out")
    if remote is not None:
        fetched = _newer(remote, here, resume)
        remote.claim(store.directory, resumed=fetched is not None)
        found = fetched or found
    if found is None and (saved := store.steps()):
        raise UsageError(
            f"{store.directory}: none of the checkpoints ({len(saved)}) is valid; "
            "move the folder away to start from the beginning"
        )
    if found is None and remote is not None and (saved := remote.steps()):
        raise UsageError(
            f"{remote.url}: none of the checkpoints ({len(saved)}) is valid; use another name to start anew"
        )
    return RunCheckpoints(store, found, remote)


def saved_run(spec: RunSpec, out: Path) -> SavedRun:
    """The state of a run folder. A checkpoint that would make the run complete is verified."""
    store = CheckpointStore(out / "checkpoints", spec.checkpoint.keep)
    checkpoint, steps = spec.checkpoint, spec.schedule.steps
    newest, remote = max(store.steps(), default=0), _remote(spec)
    copied = 0 if remote is None else max(remote.steps(), default=0)
    if copied > newest or (newest < steps and checkpoint.patience is None):
        return SavedRun(max(newest, copied), False)
    found = store.latest()
    if found is None:
        return SavedRun(0, False)
    early = "" if found.step >= steps else _best(found).no_gain(checkpoint)
    return SavedRun(found.step, (found.step >= steps or bool(early)) and found.exported, early)


def after_round(spec: SpecT, before: Path) -> SpecT:
    """The spec of a stage in a further round: it skips what its run in the round before, in this folder, has drawn.
    Raises CheckpointError if the newest checkpoint there has another kind of state."""
    found = CheckpointStore(before / "checkpoints", keep=1).latest()
    if found is None:
        return spec
    with found.restoring():
        source = found.state["source"]
        drawn = prompts_drawn(source.get("prompts", source))
    return spec if drawn is None else spec.model_copy(update={"data": spec.data.model_copy(update={"skip": drawn})})


def best_step(checkpoints: Path) -> int:
    """The step of the best evaluation of a run, as its newest valid checkpoint names it. Raises CheckpointError if
    there is no valid checkpoint, or it names no best one."""
    found = CheckpointStore(checkpoints, keep=1).latest()
    if found is None:
        raise CheckpointError(errno.ENOENT, "no valid checkpoint", str(checkpoints))
    steps = _best(found).steps
    if not steps:
        raise CheckpointError(errno.ENOENT, "the run keeps no best checkpoint (checkpoint.best)", str(checkpoints))
    return steps[0].step


def _best(found: Checkpoint) -> BestState:
    """The best evaluations as a checkpoint names them. Raises CheckpointError."""
    with found.restoring():
        return BestState.model_validate(states_of(found.state)["best"])


def _remote(spec: RunSpec) -> RemoteCheckpoints | None:
    """The copies of the run's checkpoints in an object store, if the spec has one. Raises CheckpointError."""
    section = spec.checkpoint
    if section.path is None:
        return None
    from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints

    return RemoteCheckpoints(section.path, spec.name, section.keep)


def _newer(remote: RemoteCheckpoints, here: RunCheckpoints, resume: bool) -> Checkpoint | None:
    """The newest valid checkpoint of the object store, fetched, if it is newer than the folder's."""
    store, done = here.store, here.done
    newest = max(remote.steps(), default=0)
    if newest > done and not resume:
        where = f"{remote.url} (checkpoint.path)"
        raise UsageError(f"{where} already contains the run (step {newest}): use --resume or another name")
    fetched = remote.fetch(store, done) if newest > done else None
    if fetched is not None:
        if not (file := store.directory.parent / RESOLVED_SPEC).exists():
            remote.fetch_spec(file)
        best, there = _best(fetched).saved, remote.steps()
        for step in best - set(store.steps()):
            if step in there:
                remote.fetch_step(store, step)
    return fetched
