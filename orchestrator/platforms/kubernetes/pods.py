"""Worker pods of a run: groups of identical pods, large enough for its placement groups.

A pod is a node to Ray. Ranks of one trainer and engines that exchange weights are fastest inside one pod: NCCL uses
NVLink and shared memory between the GPUs of a pod, and the network between pods, even of one Kubernetes node.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import Node, Placement, fit, place, role_sizes
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.roles import ScaledRole


@dataclass(frozen=True)
class Limits:
    """The largest pods. A worker that needs more gets a pod of that size."""

    gpus: int = 8
    """GPUs of a pod."""
    cpus: int = 16
    """CPUs of a pod without GPUs."""


@dataclass(frozen=True)
class PodGroup:
    """Identical worker pods."""

    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    cpus: int
    gpus: int
    labels: tuple[tuple[str, str], ...] = ()
    """Node labels that the specs of its roles require; they are also Ray's labels of these pods."""
    spread: bool = False
    """Whether the pods go to as many nodes as have room."""

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            bounds = f"between {self.min_replicas} and {self.max_replicas}"
            raise UsageError(f"{self.name}: expected {bounds} pods, got {self.replicas}")


@dataclass(frozen=True)
class Packing:
    """Placement groups of one run in identical pods."""

    placements: tuple[Placement, ...]
    pods: int
    cpus: int
    gpus: int
    pod_of: Mapping[tuple[str, int], int]
    """Number of the pod of each bundle, by placement group and bundle."""


@dataclass(frozen=True)
class Share:
    """What one run needs of one group."""

    group: str
    packing: Packing
    least: int
    """Pods at the role's `min_workers`."""
    most: int
    """Pods at the role's `max_workers`."""


def shares(specs: Sequence[RunSpec], limits: Limits) -> tuple[tuple[Share, ...], ...]:
    """What each run of a file needs of each group of pods: roles with GPUs share pods of whole nodes (`gpu`), others
    `cpu`; other node labels mean separate pods (`gpu-2`), as does a role that scales, one worker each, because
    the autoscaler adds whole pods."""
    names: dict[_Pool, str] = {}
    found: list[tuple[Share, ...]] = []
    for spec in specs:
        pools = _pools(spec)
        for pool in pools:
            same = sum(other.kind == pool.kind for other in names if other != pool)
            names.setdefault(pool, f"{pool.kind}-{same + 1}" if same else pool.kind)
        found.append(tuple(_share(names[pool], pool, placements, limits) for pool, placements in pools.items()))
    return tuple(found)


def pod_groups(specs: Sequence[RunSpec], limits: Limits) -> tuple[PodGroup, ...]:
    """The groups of all runs of a file, which run one after another: each as large as the most demanding stage's."""
    largest: dict[str, PodGroup] = {}
    for group in (_group(share) for of_run in shares(specs, limits) for share in of_run):
        other = largest.get(group.name, group)
        largest[group.name] = replace(
            group,
            replicas=max(group.replicas, other.replicas),
            min_replicas=max(group.min_replicas, other.min_replicas),
            max_replicas=max(group.max_replicas, other.max_replicas),
            cpus=max(group.cpus, other.cpus),
            gpus=max(group.gpus, other.gpus),
            spread=group.spread or other.spread,
        )
    return tuple(largest.values())


@dataclass(frozen=True)
class _Pool:
    kind: str
    """`gpu`, `cpu`, or the name of a role that scales."""
    labels: tuple[tuple[str, str], ...]
    scaled: ScaledRole | None = field(default=None, compare=False)


def _pools(spec: RunSpec) -> dict[_Pool, list[Placement]]:
    roles = spec.roles.present()
    pools: dict[_Pool, list[Placement]] = {}
    for placement in place(role_sizes(spec)):
        role = next(role for name, role in roles.items() if name == placement.role)
        if isinstance(role, ScaledRole) and role.max_workers is not None:
            # The name of a group of pods has no dot, and the role of a named environment has one.
            pool = _Pool(placement.role.replace(".", "-"), placement.labels, role)
        else:
            on_gpus = any(bundle["GPU"] for bundle in placement.bundles)
            pool = _Pool("gpu" if on_gpus else "cpu", placement.labels)
        pools.setdefault(pool, []).append(placement)
    return pools


def _share(name: str, pool: _Pool, placements: Sequence[Placement], limits: Limits) -> Share:
    if pool.scaled is None:
        packing = pack(placements, limits)
        return Share(name, packing, packing.pods, packing.pods)
    single = Limits(gpus=1, cpus=1)
    most = [replace(placements[0], name=f"{name}-{i}") for i in range(pool.scaled.max_workers or len(placements))]
    least = pack(placements[: max(1, pool.scaled.min_workers)], single).pods
    return Share(name, pack(placements, single), least, pack(most, single).pods)


def _group(share: Share) -> PodGroup:
    packing = share.packing
    return PodGroup(
        name=share.group,
        replicas=packing.pods,
        min_replicas=min(share.least, packing.pods),
        max_replicas=max(share.most, packing.pods),
        cpus=packing.cpus,
        gpus=packing.gpus,
        labels=packing.placements[0].labels,
        spread=any(placement.strategy == "SPREAD" for placement in packing.placements),
    )


def pack(placements: Sequence[Placement], limits: Limits) -> Packing:
    """Packs placement groups into the fewest identical pods; among these, prefers the ranks of a trainer in the
    fewest pods, then the smallest. Eight engines and four ranks become two pods of six GPUs; four and eight, two
    pods of eight: in pods of six, two ranks would be apart. CPUs of a pod with GPUs are what its workers ask for."""
    whole = [_whole_gpus(placement) for placement in placements]
    kind = "GPU" if any(bundle["GPU"] for placement in whole for bundle in placement.bundles) else "CPU"
    asked = [bundle[kind] for placement in whole for bundle in placement.bundles]
    greatest = max(limits.gpus if kind == "GPU" else limits.cpus, _up(max(asked)))

    def shapes(pods: int) -> list[Packing]:
        sizes = range(max(1, _up(max(*asked, sum(asked) / pods))), greatest + 1)
        return [packing for size in sizes if (packing := _packed(whole, pods, size, kind)) is not None]

    counts = itertools.count(max(1, _up(sum(asked) / greatest)))  # one pod for each bundle always fits
    fitting = next(found for found in map(shapes, counts) if found)
    best = min(fitting, key=lambda packing: (_spans(packing), packing.gpus, packing.cpus))
    return replace(best, placements=tuple(placements))


def _packed(placements: Sequence[Placement], pods: int, size: int, kind: str) -> Packing | None:
    """The bundles in `pods` pods with `size` GPUs or CPUs each, or None if they do not fit."""
    cpus, gpus = (math.inf, float(size)) if kind == "GPU" else (float(size), 0.0)
    fitted = fit(placements, [Node(str(pod), cpus, gpus) for pod in range(pods)])
    if fitted.missing is not None:
        return None
    pod_of = {bundle: int(pod) for bundle, pod in fitted.node_of.items()}
    used = dict.fromkeys(range(pods), 0.0)
    for placement in placements:
        for index, bundle in enumerate(placement.bundles):
            used[pod_of[placement.name, index]] += bundle["CPU"]
    return Packing(tuple(placements), pods, max(1, _up(max(used.values()))), size if kind == "GPU" else 0, pod_of)


def _spans(packing: Packing) -> int:
    """Pods that the placement groups lie in, each counted on its own."""
    return len({(name, pod) for (name, _), pod in packing.pod_of.items()})


def _whole_gpus(placement: Placement) -> Placement:
    """The placement group with the GPU share that each worker really takes: of 0.4 GPU two fit on one, as of 0.5."""

    def taken(gpus: float) -> float:
        # Rounded down, so that all shares of a GPU add up to one at most.
        return math.floor(1e6 / math.floor(round(1 / gpus, 6))) / 1e6 if 0 < gpus < 1 else gpus

    bundles = tuple(bundle | {"GPU": taken(bundle["GPU"])} for bundle in placement.bundles)
    return replace(placement, bundles=bundles)


def _up(number: float) -> int:
    """Round up, ignoring the rounding error of summed fractions."""
    return math.ceil(round(number, 4))
