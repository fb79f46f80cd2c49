"""`troupe bench --train` and `--weights`: the trainers of a spec alone, and its weights on their way to the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import cast

from troupe.orchestrator.cluster.event_loop import gather_all
from troupe.orchestrator.cluster.worker_group import WorkerHandle
from troupe.orchestrator.errors import StopRequested, TroupeError
from troupe.orchestrator.insight.bench.batches import GroupLengths, train_batch
from troupe.orchestrator.insight.bench.engines import explained, measured_run
from troupe.orchestrator.insight.bench.results import Result
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.roles.table import SAMPLERS, TRAINERS, trainer_of
from troupe.orchestrator.runs.pools import RunPools
from troupe.orchestrator.runs.session import RunRequest, Session, open_session
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.contract.measurements import MeasuredEngine, UpdateParts
from troupe.workers.contract.messages import Peak
from troupe.workers.contract.weight_backends import BACKENDS, TransferBackend, backend_problem


@dataclass(frozen=True)
class TrainedStep:
    """The updates of one step."""

    seconds: float
    updates: Sequence[Mapping[str, float]]
    """Metrics of each of them, by `ROLE/METRIC`."""


@dataclass(frozen=True)
class TrainerMeasures:
    """The trainers of one role."""

    role: str
    workers: int
    tokens_per_s: float
    """Computed by all workers, without padding: the median of the steps. Samples that share a copy of their prompt
    compute it once."""
    mfu: float | None
    """Share of the GPUs' peak that the model's products use, or None if no peak is known."""
    padding: float
    """Share of the computed tokens."""
    host_bytes: int
    """Peak of the largest worker."""
    gpu_bytes: int
    """Peak on the GPU; 0 on CPUs."""


@dataclass(frozen=True)
class TrainResult:
    """The trainers alone, on sequences as long as the sampled ones."""

    steps: int = 0
    step_s: float = 0.0
    """All updates of a step: the median."""
    sequences: int = 0
    """Sequences of a step."""
    tokens: int = 0
    """Tokens of these sequences, with their prompts."""
    trainers: tuple[TrainerMeasures, ...] = ()
    problem: str = ""
    """Why nothing was measured; empty if it was measured."""


def trainer_measures(role: str, workers: int, steps: Sequence[TrainedStep], peak: Peak) -> TrainerMeasures:
    """The numbers of a role from the metrics of its updates."""

    def of_steps(name: str) -> list[float]:
        key = f"{role}/{name}"
        return [fmean(u[key] for u in step.updates) for step in steps if all(key in u for u in step.updates)]

    return TrainerMeasures(
        role=role,
        workers=workers,
        tokens_per_s=workers * median(of_steps("tokens_per_s")),
        mfu=median(shares) if (shares := of_steps("mfu")) else None,
        padding=median(of_steps("padding")),
        host_bytes=peak.host,
        gpu_bytes=peak.gpu,
    )


@dataclass(frozen=True)
class Transfer:
    """One version of the weights, from the policy to every engine."""

    seconds: float
    publish_s: float
    verify_s: float
    load_s: float
    nbytes: int


@dataclass(frozen=True)
class TransferMeasures:
    """Medians over the updates of the weights through one back-end."""

    updates: int
    nbytes: int
    seconds: float
    """From the policy's call to the acknowledgement of the last engine."""
    publish_s: float
    """Time in which the policy writes the weights, for back-ends whose engines read what it writes."""
    transfer_s: float
    """What the other parts leave: the way to the engines, and their pause."""
    verify_s: float
    """The slowest engine computes the digest of what it received."""
    load_s: float
    """The slowest engine loads it into its model."""


@dataclass(frozen=True)
class TransferResult:
    """One back-end."""

    backend: str
    measures: TransferMeasures | None
    problem: str = ""
    """Why it was not measured; empty if it was."""


def transfer_measures(transfers: Sequence[Transfer]) -> TransferMeasures:
    """The numbers of a back-end; `transfers`: at least one."""
    return TransferMeasures(
        updates=len(transfers),
        nbytes=transfers[-1].nbytes,
        seconds=median(one.seconds for one in transfers),
        publish_s=median(one.publish_s for one in transfers),
        transfer_s=median(one.seconds - one.publish_s - one.verify_s - one.load_s for one in transfers),
        verify_s=median(one.verify_s for one in transfers),
        load_s=median(one.load_s for one in transfers),
    )


def by_backend(spec: RolloutSpec) -> dict[TransferBackend, RolloutSpec]:
    """The spec with each back-end that its workers can use."""
    url, shared = spec.weight_sync.url, spec.roles.rollout.colocate_with == "policy"
    found: dict[TransferBackend, RolloutSpec] = {}
    for row in BACKENDS.values():
        if backend_problem(row.name, spec.device, shared) is None and (url is not None or not row.stores):
            sync = spec.weight_sync.model_copy(update={"backend": row.name, "url": url if row.stores else None})
            found[row.name] = spec.model_copy(update={"weight_sync": sync})
    return found


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
    run = RunRequest(spec, Path(), False, request.address)
    async with open_session(run, console, roles=frozenset(TRAINERS)) as session:
        training = _Training(session.spec.rollouts, session, groups)
        steps = [await session.unless_stopped(training.step()) for _ in range(1 + request.repeats)][1:]
        peaks = session.cluster.peaks
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
    run = measured_run(spec, request.address)
    async with open_session(run, console, roles=frozenset({trainer_of(spec), *SAMPLERS})) as session:
        sending = _Sending(session.spec.rollouts, session, request.fastest.groups)
        updates = [await session.unless_stopped(sending.update(n)) for n in range(1, 2 + request.repeats)]
        return transfer_measures(updates[1:])


def _without_records(spec: RolloutSpec) -> RolloutSpec:
    """The spec of a policy without records for trajectories, which are not written here."""
    return spec.model_copy(update={"output": spec.output.model_copy(update={"trajectories": False})})


class _Training:
    """Trains on one batch again and again."""

    def __init__(self, spec: RolloutSpec, session: Session, groups: Sequence[GroupLengths]) -> None:
        workers = session.workers
        self._updates = RolloutUpdates(spec, workers.require_policy(), workers.critic, session.console)
        summary, table = train_batch(groups, read_size(Path(spec.model.path)).vocabulary, spec.seed)
        self._batch = Batch(summary, session.cluster.put(table))
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

    def __init__(self, spec: RolloutSpec, session: Session, groups: Sequence[GroupLengths]) -> None:
        pools = RunPools(spec, session)
        self._trainer_memory = pools.trainer_memory or nullcontext
        self._training = _Training(spec, session, groups[:1])
        self._sync = pools.require_sync()
        self._meters = [cast("WorkerHandle[MeasuredEngine]", engine.handle) for engine in pools.engines.workers]

    async def update(self, version: int) -> Transfer:
        """Trains and sends. Raises TroupeError."""
        async with self._trainer_memory():
            await self._training.step()
        began = time.monotonic()
        report = await self._sync.push(version)
        seconds = time.monotonic() - began
        slowest = max(await self._parts(), key=lambda parts: parts.verify_s + parts.load_s)
        return Transfer(seconds, report.publish_s, slowest.verify_s, slowest.load_s, report.nbytes)

    async def _parts(self) -> Sequence[UpdateParts]:
        """What every engine spent on updates since the last call."""
        return await gather_all(meter.call(MeasuredEngine.read_update, _PARTS_TIMEOUT_S) for meter in self._meters)
