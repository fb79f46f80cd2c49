"""`troupe bench --train` and `--weights`: the trainers of a spec alone, and its weights on their way to the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import StopRequested, TroupeError
from troupe.orchestrator.hub.resolve import fetch
from troupe.orchestrator.insight.bench.engine_runs import explained, measured_run
from troupe.orchestrator.insight.bench.results import Result
from troupe.orchestrator.insight.bench.sequences import GroupLengths, train_batch
from troupe.orchestrator.insight.bench.training import (
    TrainedStep,
    TrainResult,
    Transfer,
    TransferMeasures,
    TransferResult,
    by_backend,
    trainer_measures,
    transfer_measures,
)
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.roles.table import SAMPLERS, TRAINERS
from troupe.orchestrator.rollouts.handover import MemoryHandover
from troupe.orchestrator.rollouts.weight_sync import weight_sync
from troupe.orchestrator.runs.context import RunContext
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.session import RunRequest, open_run
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import Batch, unless_stopped
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.contract.measurements import MeasuredEngine, UpdateParts

_PARTS_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TrainingRequest:
    """What to measure besides the rollouts."""

    fastest: Result
    """Its spec is measured, on sequences of its lengths."""
    repeats: int
    """Measured steps, and updates of the weights."""
    address: str | None
    """Ray cluster to join, or None to start one on this machine."""


def measure_trainers(request: TrainingRequest, console: Console) -> TrainResult:
    """Measures the trainers of a spec without engines. Raises StopRequested."""
    try:
        return asyncio.run(_trainers(request, console))
    except StopRequested:
        raise
    except TroupeError as error:
        return TrainResult(problem=explained(error))


def measure_transfers(request: TrainingRequest, console: Console) -> Iterator[TransferResult]:
    """Measures every back-end that can bring the spec's weights to its engines. Raises StopRequested."""
    for backend, spec in by_backend(request.fastest.point.spec).items():
        console.message(f"measuring updates of the weights through {backend}")
        try:
            yield TransferResult(backend, asyncio.run(_transfers(request, spec, console)))
        except StopRequested:
            raise
        except TroupeError as error:
            yield TransferResult(backend, None, explained(error))


async def _trainers(request: TrainingRequest, console: Console) -> TrainResult:
    spec, groups = _without_records(request.fastest.point.spec), request.fastest.groups
    local = fetch(spec, console)
    async with open_run(
        RunRequest(spec, Path(), False, request.address), local, console, frozenset(TRAINERS)
    ) as context:
        training = _Training(local.spec, context, groups)
        steps = [await unless_stopped(context.stop, training.step()) for _ in range(1 + request.repeats)][1:]
        peaks = context.cluster.peaks
        return TrainResult(
            steps=len(steps),
            step_s=median(step.seconds for step in steps),
            sequences=sum(len(group.responses) for group in groups),
            tokens=sum(group.tokens for group in groups),
            trainers=tuple(
                trainer_measures(group.role, group.ranks, steps, peaks.of(group.role)) for group in training.groups
            ),
        )


async def _transfers(request: TrainingRequest, spec: RolloutSpec, console: Console) -> TransferMeasures:
    spec = _without_records(spec)
    local = fetch(spec, console)
    run = measured_run(spec, request.address)
    async with open_run(run, local, console, frozenset({spec.trainer, *SAMPLERS})) as context:
        sending = _Sending(local.spec, context, request.fastest.groups)
        updates = [await unless_stopped(context.stop, sending.update(n)) for n in range(1, 2 + request.repeats)]
        return transfer_measures(updates[1:])


def _without_records(spec: RolloutSpec) -> RolloutSpec:
    """The spec of a policy without records for trajectories, which are not written here."""
    return spec.model_copy(update={"output": spec.output.model_copy(update={"trajectories": False})})


class _Training:
    """Trains on one batch again and again."""

    def __init__(self, spec: RolloutSpec, context: RunContext, groups: Sequence[GroupLengths]) -> None:
        workers = context.workers
        self._updates = RolloutUpdates(spec, workers.require_policy(), workers.critic, context.console)
        summary, table = train_batch(groups, read_size(Path(spec.model.path)).vocabulary, spec.seed)
        self._batch = Batch(summary, context.cluster.put(table))
        self._step, self._state = spec.critic_warmup, PenaltyState()
        self.groups = self._updates.trainers

    async def step(self) -> TrainedStep:
        """The updates of one step. Raises TroupeError."""
        began = time.monotonic()
        updates, self._state = await self._updates.run(self._step, self._batch, self._state)
        self._step += 1
        return TrainedStep(time.monotonic() - began, updates)


class _Sending:
    """Sends one version of the weights after another, each with the policy after a small update."""

    def __init__(self, spec: RolloutSpec, context: RunContext, groups: Sequence[GroupLengths]) -> None:
        policy, timeout_s = context.workers.require_policy(), spec.schedule.sync_timeout_s
        pool = RunPools(spec, context).engines
        self._training = _Training(spec, context, groups[:1])
        self._sync = weight_sync(spec, policy, pool, context.cluster)
        self._handover = MemoryHandover(pool, policy, timeout_s) if spec.resolved_sleep != "none" else None
        self._meters = [cast("WorkerHandle[MeasuredEngine]", engine.handle) for engine in pool.engines]

    async def update(self, version: int) -> Transfer:
        """Trains and sends. Raises TroupeError."""
        async with nullcontext() if self._handover is None else self._handover.training():
            await self._training.step()
        began = time.monotonic()
        report = await self._sync.push(version)
        seconds = time.monotonic() - began
        slowest = max(await self._parts(), key=lambda parts: parts.verify_s + parts.load_s)
        return Transfer(seconds, report.publish_s, slowest.verify_s, slowest.load_s, report.nbytes)

    async def _parts(self) -> Sequence[UpdateParts]:
        """What every engine spent on updates since the last call."""
        return await gather_all(meter.call(MeasuredEngine.read_update, _PARTS_TIMEOUT_S) for meter in self._meters)
