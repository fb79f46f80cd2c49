"""`troupe bench --train`: the trainers of a spec alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from troupe.orchestrator.errors import StopRequested, TroupeError
from troupe.orchestrator.insight.bench.batches import GroupLengths, train_batch
from troupe.orchestrator.insight.bench.engines import BenchRequest, explained
from troupe.orchestrator.insight.bench.results import Result
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.roles.table import TRAINERS
from troupe.orchestrator.runs.session import RunRequest, Session, open_session
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.telemetry.console import Console
from troupe.orchestrator.training.batch import Batch
from troupe.orchestrator.training.state import PenaltyState
from troupe.orchestrator.training.updates import RolloutUpdates
from troupe.workers.contract.messages import Peak


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
    gpu_bytes: int


@dataclass(frozen=True)
class TrainResult:
    """The trainers alone, on sequences as long as the sampled ones."""

    steps: int = 0
    step_s: float = 0.0
    sequences: int = 0
    tokens: int = 0
    """Tokens of these sequences, with their prompts."""
    trainers: tuple[TrainerMeasures, ...] = ()
    problem: str = ""


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


def measure_trainers(fastest: Result, request: BenchRequest, console: Console) -> TrainResult:
    """Measures the trainers of the fastest point on sequences of its lengths, without engines. Raises StopRequested."""
    try:
        return asyncio.run(_trainers(fastest, request, console))
    except StopRequested:
        raise
    except TroupeError as error:
        return TrainResult(problem=explained(error))


async def _trainers(fastest: Result, request: BenchRequest, console: Console) -> TrainResult:
    spec, groups = fastest.point.spec, fastest.groups
    # Trajectories are not written here: the policy keeps no records for them.
    spec = spec.model_copy(update={"output": spec.output.model_copy(update={"trajectories": False})})
    run = RunRequest(spec, Path(), False, request.address)
    async with open_session(run, console, roles=frozenset(TRAINERS)) as session:
        training = _Training(session.spec.rollouts, session, groups)
        steps = [await session.unless_stopped(training.step()) for _ in range(1 + request.batches)][1:]
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
