"""Memory of pods, from the numbers of `troupe plan` (`orchestrator/plan/`).

A pod's limit covers its processes and what they write to /dev/shm, which is memory too: Ray's object store, weight
files, and the segments of NCCL, torch and vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.fit import MemoryPlan, memory_plan
from troupe.orchestrator.plan.memory import PlacedWorker, Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.platforms.kubernetes.options import KubernetesOptions
from troupe.orchestrator.platforms.kubernetes.pods import PodGroup, Share, shares
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.workers.contract.units import GIB

HEAD = "head"
HEAD_CPUS = 4
"""CPUs of the head pod: the controller is one process, the others are Ray's control store, dashboard and autoscaler."""

_HEAD_GIB = 6
"""Memory of the head pod for Ray's control processes and the controller with its data, without the object store."""
_PODS_PER_HEAD_GIB = 32
"""Worker pods whose bookkeeping takes a GiB of the head."""
_LEAST_STORE_GIB = 2
_RAY_GIB = 1
"""Memory of Ray's own processes in a worker pod."""
_SEGMENTS_GIB = 1
"""Segments of NCCL, torch and vLLM in /dev/shm, for each GPU, and once for the pod."""
_HEADROOM = 1.1
"""Ray kills workers when a pod uses 95 % of its memory."""
_GIB_PER_CPU = 4
"""Least memory of a pod without GPUs for each CPU: rewards and environments run the user's code."""
_GIB_PER_GPU = 16
"""Least memory of a pod for each GPU: CUDA's libraries, the compilers of kernels and the page cache of model files,
which the plan does not count."""
_UNKNOWN_GIB_PER_GPU = 64
"""Memory for each GPU if a model's size is not known."""


@dataclass(frozen=True)
class PodMemory:
    """Memory of one pod, in GiB."""

    limit: int
    shm: int
    """Size of /dev/shm, part of the limit."""
    store: int
    """Ray's object store, part of /dev/shm."""


@dataclass(frozen=True)
class Need:
    """What a pod's workers need in one run, in bytes."""

    workers: int
    weight_file: int
    batch: int
    known: bool
    """Whether the sizes of all models are known."""


def memory(runs: Sequence[PlannedRun], groups: Sequence[PodGroup], options: KubernetesOptions) -> dict[str, PodMemory]:
    """Memory of the head pod (`head`) and of each group's, for every run. Raises UsageError if shm does not fit."""
    needs: dict[str, list[Need]] = {}
    for group, need in _needs(runs, options):
        needs.setdefault(group, []).append(need)
    store = max((_store(need) for of_group in needs.values() for need in of_group), default=_LEAST_STORE_GIB)
    pods = sum(group.max_replicas for group in groups)
    head = _HEAD_GIB + math.ceil(pods / _PODS_PER_HEAD_GIB) + store + _SEGMENTS_GIB
    found = {HEAD: PodMemory(head, store + _SEGMENTS_GIB, store)}
    has_gpus = any(group.gpus for group in groups)
    for group in groups:
        override = options.gib_per_node if bool(group.gpus) == has_gpus else None
        found[group.name] = _of_pod(group, needs[group.name], override, options.shm_gib)
    return found


def unplanned(runs: Sequence[PlannedRun], options: KubernetesOptions) -> list[str]:
    """A line with the models of unknown size, so that pods are sized by rule of thumb; empty if all are known."""
    unknown = {model.path: model.why for plan, _ in _plans(runs, options) for model in plan.unknown}
    if options.gib_per_node is not None or not unknown:
        return []
    rule = f"pods have {_UNKNOWN_GIB_PER_GPU} GiB for each GPU (set --gib-per-node, or deploy where the model is)"
    return [f"memory is not planned ({'; '.join(unknown.values())}): {rule}"]


def _of_pod(group: PodGroup, needs: Sequence[Need], limit: int | None, shm: int | None) -> PodMemory:
    store = max(_store(need) for need in needs)
    file = max(need.weight_file for need in needs)
    # The next version is written while engines still read the last one.
    segments = math.ceil(2 * file / GIB) + _SEGMENTS_GIB * (group.gpus + 1)
    workers = max(need.workers for need in needs)
    planned = math.ceil(_HEADROOM * (workers / GIB + _RAY_GIB)) + (shm or store + segments)
    known = all(need.known for need in needs)
    if not known:
        planned = max(planned, _UNKNOWN_GIB_PER_GPU * group.gpus, _GIB_PER_CPU * (group.cpus + 1))
    planned = max(planned, _GIB_PER_GPU * group.gpus if group.gpus else _GIB_PER_CPU * group.cpus)
    total = limit or planned
    shared = shm or max(store + segments, 0 if known else total // 2)  # half of it may be for weight files
    if shared >= total:
        flag = f"--shm-gib {shm}" if shm is not None else f"--gib-per-node {limit}"
        raise UsageError(
            f"{flag}: /dev/shm ({shared} GiB) is part of a pod's memory, and a pod of {group.name} has {total} GiB"
        )
    return PodMemory(total, shared, min(store, shared))


def _store(need: Need) -> int:
    """Size of Ray's object store: a step's tables twice, because a table is copied to its readers' node."""
    return max(_LEAST_STORE_GIB, math.ceil(2 * need.batch / GIB))


def _needs(runs: Sequence[PlannedRun], options: KubernetesOptions) -> Iterator[tuple[str, Need]]:
    for plan, of_run in _plans(runs, options):
        batch = _part(plan, HEAD, "batch")
        sized = {worker.worker for worker in plan.workers}
        for share in of_run:
            nodes = [node for node in plan.nodes if node.node.rpartition("/")[0] == share.group]
            yield (
                share.group,
                Need(
                    workers=max(node.total - _part(plan, node.node, "weight file") for node in nodes),
                    weight_file=max(_part(plan, node.node, "weight file") for node in nodes),
                    batch=batch,
                    known=all(placed.worker in sized for placed in _placed_workers(share)),
                ),
            )


def _plans(runs: Sequence[PlannedRun], options: KubernetesOptions) -> Iterator[tuple[MemoryPlan, tuple[Share, ...]]]:
    """The plan of each run on its own pods; a later stage's model has the size of an earlier one's."""
    sizes = Sizes()
    for run, of_run in zip(runs, shares([run.spec for run in runs], options.limits), strict=True):
        nodes = [Node(HEAD, 0, 0)]
        for share in of_run:
            packing = share.packing
            nodes += [Node(f"{share.group}/{pod}", packing.cpus, packing.gpus) for pod in range(packing.pods)]
        workers = [worker for share in of_run for worker in _placed_workers(share)]
        yield memory_plan(run.spec, workers, nodes, sizes), of_run
        trained = sizes.of(run.spec.model)
        if trained is not None:
            sizes.known[str(run.model)] = trained


def _placed_workers(share: Share) -> Iterator[PlacedWorker]:
    pod_of: Mapping[tuple[str, int], int] = share.packing.pod_of
    for placement in share.packing.placements:
        for placed in placement.workers:
            pod = f"{share.group}/{pod_of[placement.name, placed.bundle]}"
            name = f"{placed.role}-{placed.index}"
            yield PlacedWorker(name, placed.cpus, placed.gpus, placement.name, placed.bundle, pod)


def _part(plan: MemoryPlan, node: str, name: str) -> int:
    return sum(part.bytes for of in plan.nodes if of.node == node for part in of.parts if part.name == name)
