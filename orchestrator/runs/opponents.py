"""The opponent of games that is an earlier version of the policy (`roles.judge.renew_every`): a checkpoint's model.

Which one plays follows from the steps done and the checkpoints alone, so that a resumed run plays against the same.
Adapters are merged with the model below them. Every engine that loads the model answers with the digest of its weights
(`VerifiedModel`), also one that replaces another.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from troupe.orchestrator.launcher import WorkerLauncher
from troupe.orchestrator.model_facts.model_size import tensors_of
from troupe.orchestrator.pools.replicas import ReplicaPool
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.paths import with_sections
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.telemetry.event_log import EventLog
from troupe.orchestrator.training.checkpoint import (
    MODEL,
    CheckpointError,
    CheckpointStore,
    InvalidCheckpoint,
    verify_model,
)
from troupe.orchestrator.training.export import has_adapters, write_merged
from troupe.orchestrator.training.parts import RunPart, UpdatedStep
from troupe.workers.contract.config_base import VerifiedModel
from troupe.workers.contract.model_files import tensors_digest_of, weight_files

if TYPE_CHECKING:
    from troupe.orchestrator.training.remote_checkpoints import RemoteCheckpoints

_MERGED = "opponent"
"""Folder of the run with the opponent's model, if checkpoints hold adapters."""

SpecT = TypeVar("SpecT", bound=RunSpec)


def _every(spec: RunSpec) -> int | None:
    """Steps after which the opponent changes, or None if it stays."""
    judge = None if spec.rollouts is None else spec.rollouts.roles.judge
    return None if judge is None else judge.renew_every


def opponent_step(spec: RunSpec, store: CheckpointStore, done: int) -> int:
    """The step whose model plays after `done` steps: the last multiple of `renew_every` with a checkpoint, or 0."""
    if (every := _every(spec)) is None:
        return 0
    models = (step for step in store.steps() if store.has_model(step))
    return max((step for step in models if step < done and step % every == 0), default=0)


def fetch_opponent(spec: RunSpec, store: CheckpointStore, remote: RemoteCheckpoints, done: int) -> None:
    """Copies the checkpoint whose model plays after `done` steps into the run's folder if it is not there. Raises
    CheckpointError."""
    if (every := _every(spec)) is None:
        return
    candidates = [step for step in remote.steps() if step % every == 0 and step < done]
    for step in reversed(candidates):
        if store.has_model(step) or (remote.fetch_step(store, step) and store.has_model(step)):
            return


def with_opponent(spec: SpecT, store: CheckpointStore, step: int) -> tuple[SpecT, str]:
    """The spec with judges of a step's checkpoint, and the digest of its weights. Raises CheckpointError if the
    checkpoint has changed, or its adapters cannot be merged."""
    folder = store.folder(step)
    try:
        verify_model(folder)
    except InvalidCheckpoint as error:
        why = f"the opponent's model (roles.judge.renew_every): {error}"
        raise CheckpointError(errno.EINVAL, why, str(folder)) from error
    path = (folder / MODEL).absolute()
    if has_adapters(path):
        path = _merged(path, store.directory.parent.absolute() / _MERGED / folder.name)
    digest = weights_digest(path)
    changed = {"path": str(path), "revision": None, "weights_digest": digest}
    own = VerifiedModel(**(dict(spec.models()["roles.judge.model"]) | changed))
    return with_sections(spec, {"roles.judge.model": own}), digest


def weights_digest(folder: Path) -> str:
    """`tensors_digest_of` a model's files, as an engine that loads them computes it. Raises OSError; SizeUnknown or
    ValueError if a file is not valid."""
    digests = dict[str, str]()
    for path in weight_files(folder):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            header = 8 + int.from_bytes(content[:8], "little")
            for tensor in tensors_of(path):
                end = header + tensor.end
                with memoryview(content)[end - tensor.bytes : end] as data:
                    digests[tensor.name] = xxhash.xxh3_128_hexdigest(data)
    return tensors_digest_of(digests)


def _merged(adapters: Path, target: Path) -> Path:
    """The adapters merged with the model below. The last opponent stays: it may play until the next one does."""
    target.parent.mkdir(exist_ok=True)
    earlier = sorted(path for path in target.parent.iterdir() if path != target)
    for path in (*earlier[:-1], target):
        shutil.rmtree(path, ignore_errors=True)
    return write_merged(adapters, target)


@dataclass(frozen=True)
class OpponentRenewal(RunPart):
    """Gives the judges the next opponent. A step's games begin before the checkpoint of the step before is written."""

    spec: RunSpec
    store: CheckpointStore
    judges: ReplicaPool[Any]
    launcher: WorkerLauncher
    console: Console
    events: EventLog

    async def after_update(self, step: UpdatedStep) -> None:
        """Starts the judges with another model if one is due, before the next games begin. Raises WorkerError or
        TimeoutError if one does not start; CheckpointError."""
        found = opponent_step(self.spec, self.store, step.number)
        if found <= self.store.in_use:
            return
        self.store.use(found)
        if step.number == self.spec.schedule.steps:  # a longer run that resumes from here needs it
            return
        self.console.phase("renew the opponent")
        with step.timers.phase("sync"):
            spec, digest = await asyncio.to_thread(with_opponent, self.spec, self.store, found)
            self.launcher.follow(spec, self.judges.names)
            await self.judges.renew()
        self.events.record("opponent", of=found, digest=digest)
        self.console.message(f"the opponent is the model of step {found}, digest {digest[:16]}")
