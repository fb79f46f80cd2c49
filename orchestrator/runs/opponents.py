"""The opponent of games that is an earlier version of the policy (`roles.judge.renew_every`): a checkpoint's model.

Which one plays follows from the steps done and the checkpoints alone, so that a resumed run plays against the same.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import Any, TypeVar

from troupe.orchestrator.launcher import WorkerLauncher
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
from troupe.orchestrator.training.parts import RunPart, UpdatedStep

SpecT = TypeVar("SpecT", bound=RunSpec)


def opponent_step(spec: RunSpec, store: CheckpointStore, done: int) -> int:
    """The step whose model plays after `done` steps: the last multiple of `renew_every` with a checkpoint, or 0."""
    judge = None if spec.rollouts is None else spec.rollouts.roles.judge
    if judge is None or judge.renew_every is None:
        return 0
    every, models = judge.renew_every, (step for step in store.steps() if store.has_model(step))
    return max((step for step in models if step < done and step % every == 0), default=0)


def with_opponent(spec: SpecT, store: CheckpointStore, step: int) -> tuple[SpecT, str]:
    """The spec with judges of a step's checkpoint, and the model's digest. Raises CheckpointError if it changed."""
    folder = store.folder(step)
    try:
        digest = verify_model(folder)
    except InvalidCheckpoint as error:
        why = f"the opponent's model (roles.judge.renew_every): {error}"
        raise CheckpointError(errno.EINVAL, why, str(folder)) from error
    model = spec.models()["roles.judge.model"]
    own = model.model_copy(update={"path": str((folder / MODEL).absolute()), "revision": None})
    return with_sections(spec, {"roles.judge.model": own}), digest


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
