"""Restarts the trainers in place when one of their ranks is lost, and repeats the updates since the last checkpoint.

Engines, reward workers and finished rollouts stay as they are. The batches of the steps since the last checkpoint are
kept in the object store; the restarted trainers load the checkpoint (or start from the initial model) and train on
these batches again, with the same seeds and in the same order, so that their weights equal the lost ones: bit for
bit on the CPU, to rounding on a GPU. Policy and critic are restarted together: a step that was interrupted between
their updates is repeated by both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from troupe.orchestrator.cluster.recoverable_calls import RecoverableCalls
from troupe.orchestrator.cluster.worker_group import TrainerGroup
from troupe.orchestrator.errors import WorkerDied, WorkerError, WorkerTimeout
from troupe.orchestrator.pools.replicas import RestartBudget
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import probe_interval_s
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.checkpoint import CheckpointStore, load_checkpoint
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import Metrics, Updates

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_S = 5.0
"""Longest interval between two probes of trainers that have no call."""

Push = Callable[[int], Awaitable[object]]
"""Loads the policy's weights into every engine as this version."""
HoldMemory = Callable[[], AbstractAsyncContextManager[None]]
"""Gives the trainers the memory of GPUs that they share with engines. Engines that slept need weights afterwards."""
RestartGroups = Callable[[Sequence[TrainerGroup[Any]]], Awaitable[None]]
"""Ends the processes of these groups, and starts the same ranks with their initial model."""


@dataclass(frozen=True)
class _Trained:
    step: int
    batch: Batch
    state: PenaltyState
    """Before the updates."""


class TrainerRecovery:
    """The restorer of a run's trainers (`RecoverableCalls`). Keeps what has to be repeated to restore their state."""

    def __init__(
        self,
        spec: RunSpec,
        calls: RecoverableCalls,
        updates: Updates,
        push: Push | None,
        store: CheckpointStore,
        restart: RestartGroups,
        console: Console,
        done: int = 0,
        hold_memory: HoldMemory | None = None,
    ) -> None:
        """Restarts nothing yet. `push`: sends the trained weights, or None without engines; `hold_memory`: entered
        for updates and restarts, or None if the trainers share no GPU with an engine."""
        self.calls = calls
        self._spec = spec
        self._updates = updates
        self._push = push
        self._store = store
        self._restart_groups = restart
        self._console = console
        self._saved = done
        self._shares = hold_memory is not None
        self._hold_memory: HoldMemory = hold_memory or nullcontext
        self._steps: list[_Trained] | None = []
        """Steps since the checkpoint, or None if there were too many to keep."""
        self._later: list[_Trained] | None = []
        """The part of these since the checkpoint that is being written."""
        self._committing = asyncio.Lock()
        self.budget = RestartBudget.of_role(spec, "policy")

    async def train(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        """All updates of a step on this batch (`Updates.run`)."""
        done = await self.calls.retry(lambda: self._run(step, batch, state))
        trained = _Trained(step, batch, state)
        self._steps, self._later = self._with(self._steps, trained), self._with(self._later, trained)
        return done

    def _with(self, steps: list[_Trained] | None, trained: _Trained) -> list[_Trained] | None:
        """Steps with another one, or None if they are too many to keep."""
        kept = None if steps is None else [*steps, trained]
        return None if kept is None or len(kept) > self._spec.failures.replay_steps else kept

    def begin_save(self) -> None:
        """Notes that the trainers' current state is copied, or written, for the next `commit`."""
        self._later = []

    async def _run(self, step: int, batch: Batch, state: PenaltyState) -> tuple[list[Metrics], PenaltyState]:
        async with self._hold_memory():
            return await self._updates.run(step, batch, state)

    async def commit(self, step: int, write: Callable[[], T]) -> T:
        """Runs `write` in a thread: a valid checkpoint then has the state of the last `begin_save`; later steps
        stay, to be repeated. No restart begins until then: it would look for the previous checkpoint."""
        async with self._committing:
            written = await asyncio.to_thread(write)
            self._saved, self._steps = step, self._later
        return written

    async def watch(self) -> None:
        """Probes the trainers at a fixed interval until the run ends, and restarts them if one has died: a step may
        wait for engines alone, and one that starts needs what a lost policy had published. Raises WorkerError."""
        while True:
            await asyncio.sleep(min(probe_interval_s(self._spec), _PROBE_S))
            await self.calls.retry(self._probe)

    async def _probe(self) -> None:
        for group in self._updates.trainers:
            died = await group.find_dead() if group.idle else None
            if died is not None:
                raise died

    async def find_lost(self, error: WorkerError) -> WorkerError | None:
        """The trainer's loss that explains a failed call, or None; in a collective other ranks may notice it first."""
        workers = {worker.name for group in self._updates.trainers for worker in group.workers}
        if error.worker not in workers:
            return None
        if isinstance(error, WorkerDied | WorkerTimeout):
            return error
        found = await asyncio.gather(*(group.find_dead() for group in self._updates.trainers))
        return next((died for died in found if died is not None), None)

    async def restore(self, lost: WorkerError) -> None:
        async with self._committing:
            await self._restore(lost)

    async def _restore(self, lost: WorkerError) -> None:
        """Restarts and restores the trainers; starts over if one is lost again during it."""
        groups = self._updates.trainers
        while True:
            steps = self._steps
            if steps is None:
                limit = f"failures.replay_steps ({self._spec.failures.replay_steps})"
                why = f"more than {limit} steps since the last checkpoint: resume from it"
                raise WorkerError(lost.worker, lost.method, f"{lost.detail} ({why})") from lost
            if not self.budget.take():
                raise WorkerError(lost.worker, lost.method, f"{lost.detail} ({self.budget})") from lost
            origin = f"the checkpoint of step {self._saved}" if self._saved else "the initial model"
            names = " and ".join(group.role for group in groups)
            logger.warning("%s is lost: %s; restarting %s from %s", lost.worker, lost, names, origin)
            try:
                async with self._hold_memory():
                    await self._restart_groups(groups)
                    await self._load(lost)
                    await self._repeat(steps)
                version = self._saved + len(steps)
                if self._push is not None and (version or self._shares):
                    await self._push(version)
            except WorkerError as error:
                again = await self.find_lost(error)
                if again is None:
                    raise
                lost = again
            else:
                self._console.message(f"{names} restarted from {origin}, {len(steps)} step(s) repeated")
                return

    async def _load(self, lost: WorkerError) -> None:
        """Loads the last checkpoint into the restarted trainers, if the run has one. Raises WorkerError."""
        if not self._saved:
            return
        found = await asyncio.to_thread(self._store.latest)
        if found is None or found.step != self._saved:
            problem = f"the checkpoint of step {self._saved} cannot be used"
            raise WorkerError(lost.worker, lost.method, f"{lost.detail} ({problem})") from lost
        await load_checkpoint(found, self._updates.trainers, self._spec.schedule.train_timeout_s)

    async def _repeat(self, steps: Sequence[_Trained]) -> None:
        """Trains on the batches since the checkpoint again."""
        for number, trained in enumerate(steps):
            self._console.phase("repeat updates", number, len(steps), unit="steps")
            await self._updates.repeat(trained.step, trained.batch, trained.state)
