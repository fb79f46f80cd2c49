"""Worker pods of a run: one group per role, sized by its placement groups (`orchestrator/capacity/placement.py`), so
that every bundle fits into a pod."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.capacity.placement import ACCELERATOR, Placement, place, role_sizes
from orchestrator.errors import UsageError
from orchestrator.spec.load import RunSpec
from orchestrator.spec.sections import ScaledRole


@dataclass(frozen=True)
class PodGroup:
    """The identical worker pods of one role."""

    role: str
    replicas: int
    min_replicas: int
    max_replicas: int
    cpus: int
    gpus: int
    labels: tuple[tuple[str, str], ...] = ()
    """Node labels that the role's spec requires; they are also Ray's labels of these pods."""
    spread: bool = False
    """Whether the pods go to as many nodes as have room."""

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            bounds = f"between {self.min_replicas} and {self.max_replicas}"
            raise UsageError(f"{self.role}: expected {bounds} pods, got {self.replicas}")


def pod_groups(specs: Sequence[RunSpec]) -> tuple[PodGroup, ...]:
    """One group for each role that has placement groups of its own.

    The stages of a chain run one after another on the same pods, so each group is as large as its most demanding stage
    requires. A pod holds one bundle, with resources rounded up to whole numbers. Kubernetes allocates whole GPUs only:
    workers that request a fraction of a GPU share a pod, as many as one GPU holds.

    Args:
        specs: Every run of the file.
    """
    largest: dict[str, PodGroup] = {}
    for group in (group for spec in specs for group in _groups(spec)):
        other = largest.get(group.role, group)
        largest[group.role] = PodGroup(
            group.role,
            max(group.replicas, other.replicas),
            max(group.min_replicas, other.min_replicas),
            max(group.max_replicas, other.max_replicas),
            max(group.cpus, other.cpus),
            max(group.gpus, other.gpus),
            tuple(dict((*other.labels, *group.labels)).items()),
            group.spread or other.spread,
        )
    return tuple(largest.values())


def _groups(spec: RunSpec) -> Iterator[PodGroup]:
    """The groups of one run."""
    bundles: dict[str, list[dict[str, float]]] = {}
    first: dict[str, Placement] = {}
    for placement in place(role_sizes(spec)):
        bundles.setdefault(placement.role, []).extend(placement.bundles)
        first.setdefault(placement.role, placement)
    scaled = {name: role for name, role in spec.roles.present().items() if isinstance(role, ScaledRole)}
    for role, requested in bundles.items():
        cpus, gpus = max(bundle["CPU"] for bundle in requested), max(bundle["GPU"] for bundle in requested)
        per_pod = min(len(requested), int(round(1 / gpus, 6))) if 0 < gpus < 1 else 1
        scales = role in scaled and scaled[role].max_workers is not None
        fewest = scaled[role].min_workers if scales else len(requested)
        most = (scaled[role].max_workers if scales else None) or len(requested)
        replicas, least, greatest = (math.ceil(workers / per_pod) for workers in (len(requested), fewest, most))
        # Ray itself labels pods with their GPU type.
        labels = tuple(pair for pair in first[role].labels if pair[0] != ACCELERATOR)
        spread = first[role].strategy == "SPREAD"
        yield PodGroup(role, replicas, least, greatest, _whole(per_pod * cpus), _whole(gpus), labels, spread)


def _whole(number: float) -> int:
    """Round up, ignoring the rounding error of summed fractions."""
    return math.ceil(round(number, 6))
