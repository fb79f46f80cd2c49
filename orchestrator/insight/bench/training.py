"""What `troupe bench --train` and `--weights` measured: the trainers alone, and weights on their way to the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from troupe.orchestrator.spec.rollout import RolloutSpec
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
