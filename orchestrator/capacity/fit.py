"""Adds up the memory of a spec's workers by GPU and node, and finds the first that does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.capacity.placement import Node
from orchestrator.capacity.remedies import remedy
from orchestrator.capacity.spec_memory import Seated, Sizes, step_batch, worker_memory
from orchestrator.capacity.worker_memory import GIB, MIB, WIDTHS, Cache, Part, WorkerMemory
from orchestrator.spec.base import RunSpec
from orchestrator.spec.rollout import RolloutSpec

RAY_PROCESSES = 700 * MIB
"""Host memory of Ray's processes and the controller, on the first node. Not measured."""


@dataclass(frozen=True)
class NodeMemory:
    """The host memory of one node."""

    node: str
    parts: tuple[Part, ...]
    """By role, then what the roles share."""
    capacity: int
    """0: not known."""

    @property
    def total(self) -> int:
        """Sum of all parts, with every worker at its peak."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run."""

    workers: tuple[WorkerMemory, ...]
    caches: Mapping[str, Cache]
    """KV cache by engine."""
    nodes: tuple[NodeMemory, ...]
    unknown: Mapping[str, str]
    """Model folders whose size is not known, and why; their workers are not counted."""
    misfit: str
    """Empty, or the first thing that does not fit and what to change."""


def memory_plan(spec: RunSpec, seats: Sequence[Seated], nodes: Sequence[Node], sizes: Sizes) -> MemoryPlan:
    """Memory of every worker, engine and node of a spec whose workers are placed."""
    by_name = {node.name: node for node in nodes}
    workers: dict[str, tuple[WorkerMemory, ...]] = {}
    caches: dict[str, Cache] = {}
    for seat in seats:
        gpu = by_name[seat.node].gpu_memory if seat.node in by_name else 0
        workers[seat.worker], cache = worker_memory(spec, seat, gpu, sizes)
        if cache is not None:
            caches[seat.worker] = cache
    node_memories = tuple(_of_node(spec, number, node, seats, workers, sizes) for number, node in enumerate(nodes))
    misfits = (
        *_engines_without_cache(seats, caches, by_name),
        *_full_gpus(spec, seats, workers, by_name, sizes),
        *_full_nodes(spec, node_memories, sizes),
    )
    flat = tuple(memory for memories in workers.values() for memory in memories)
    used = {
        path: why for path, why in sizes.unknown.items() if path in {model.path for model in spec.models().values()}
    }
    return MemoryPlan(flat, caches, node_memories, used, next(iter(misfits), ""))


def _of_node(
    spec: RunSpec,
    number: int,
    node: Node,
    seats: Sequence[Seated],
    workers: Mapping[str, tuple[WorkerMemory, ...]],
    sizes: Sizes,
) -> NodeMemory:
    """Host memory of a node: its workers, and on some nodes the weight file, the step's batch, and Ray's processes."""
    here = [seat for seat in seats if seat.node == node.name]
    by_role: defaultdict[str, int] = defaultdict(int)
    for seat in here:
        by_role[seat.role] += sum(m.total for m in workers[seat.worker] if m.where == "host")
    parts = [Part(role, count) for role, count in by_role.items() if count]
    size = sizes.of(spec.model)
    maps_file = any(seat.role == "rollout" or seat.worker == "policy-0" for seat in here)
    if maps_file and size is not None and spec.dispatch(_has_weight_file, lambda _: False):
        parts.append(Part("weight file", WIDTHS[spec.model.dtype] * size.parameters))
    if number == 0:
        parts += [Part("batch", step_batch(spec)), Part("ray", RAY_PROCESSES)]
    return NodeMemory(node.name, tuple(parts), node.memory)


def _has_weight_file(spec: RolloutSpec) -> bool:
    return spec.resolved_backend() == "shm"


def gib(count: int) -> str:
    """GiB with one decimal (`14.2`), or two below 1."""
    return f"{count / GIB:.1f}" if count >= GIB else f"{count / GIB:.2f}"


def _engines_without_cache(
    seats: Sequence[Seated], caches: Mapping[str, Cache], nodes: Mapping[str, Node]
) -> Iterator[str]:
    for seat in seats:
        cache = caches.get(seat.worker)
        if cache is None or cache.sequences:
            continue
        room = f"{seat.worker}: its KV cache of {gib(cache.bytes)} GiB holds no sequence of {cache.longest} tokens"
        if seat.gpus > 0:
            gpu = gib(nodes[seat.node].gpu_memory)
            yield (
                f"{room} (a GPU has {gpu} GiB): raise roles.rollout.tensor_parallel_size and .gpus, or lower "
                "roles.rollout.max_model_len"
            )
        else:
            yield f"{room}: raise roles.rollout.kv_cache_gib or lower roles.rollout.max_model_len"


def _full_gpus(
    spec: RunSpec,
    seats: Sequence[Seated],
    workers: Mapping[str, tuple[WorkerMemory, ...]],
    nodes: Mapping[str, Node],
    sizes: Sizes,
) -> Iterator[str]:
    """Overfull GPUs, by bundle: workers that share a bundle share its GPU."""
    bundles: defaultdict[tuple[str, int], list[Seated]] = defaultdict(list)
    for seat in seats:
        if seat.gpus > 0 and seat.node in nodes and nodes[seat.node].gpu_memory:
            bundles[seat.group, seat.bundle].append(seat)
    for sharing in bundles.values():
        needs = {seat: sum(m.total for m in workers[seat.worker] if m.where == "gpu") for seat in sharing}
        capacity = int(min(1.0, sum(seat.gpus for seat in sharing)) * nodes[sharing[0].node].gpu_memory)
        if sum(needs.values()) <= capacity:
            continue
        # An engine takes a fixed share of the GPU, so of two workers on a GPU the other one is too large.
        worst = max(needs, key=lambda seat: (seat.role != "rollout", needs[seat]))
        left = capacity - (sum(needs.values()) - needs[worst])
        beside = (
            f" and {' and '.join(seat.worker for seat in sharing if seat is not worst)}" if len(sharing) > 1 else ""
        )
        yield (
            f"{worst.worker}{beside} need{'' if beside else 's'} {gib(sum(needs.values()))} GiB of a GPU's "
            f"{gib(capacity)}: {remedy(spec, worst.role, left, 'gpu', sizes)}"
        )


def _full_nodes(spec: RunSpec, nodes: Sequence[NodeMemory], sizes: Sizes) -> Iterator[str]:
    for node in nodes:
        if not node.capacity or node.total <= node.capacity:
            continue
        most = max(node.parts, key=lambda part: part.bytes)
        largest = ", ".join(f"{part.name} {gib(part.bytes)}" for part in sorted(node.parts, key=lambda p: -p.bytes)[:3])
        yield (
            f"{node.node} needs {gib(node.total)} GiB of host memory and has {gib(node.capacity)} ({largest}, ...): "
            f"{remedy(spec, most.name, 0, 'host', sizes)}"
        )
