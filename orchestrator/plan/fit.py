"""Adds up the memory of a spec's workers by GPU and node, and finds misfits and what is nearly full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from troupe.orchestrator.model_facts.families import undivided
from troupe.orchestrator.model_facts.model_size import ModelSize
from troupe.orchestrator.plan.memory import HEADROOM, Memory, MemoryOf, PlacedWorker, Sizes
from troupe.orchestrator.plan.placement import Node
from troupe.orchestrator.plan.remedies import Misfit
from troupe.orchestrator.plan.worker_memory import PERIODS, WIDTHS, Cache, Part, Period, WorkerMemory, adapter_numbers
from troupe.orchestrator.roles.table import SAMPLERS, row_of, settings_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sizes import batch_bytes
from troupe.orchestrator.spec.derived.training import has_weight_file
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.units import GIB, MIB

_PERIOD_NAMES: dict[Period, str] = {"sampling": "sampling", "update": "updates", "transfer": "the transfer of weights"}
_MOST_IN_A_BYTE = 256
"""Experts of a layer whose numbers vLLM records as bytes."""
RAY_PROCESSES = 700 * MIB
"""Host memory of Ray's processes and the controller, on the first node. Not measured."""


@dataclass(frozen=True)
class NodeMemory:
    """The host memory of one node."""

    node: str
    parts: tuple[Part, ...]
    """The parts by role, then what the roles share."""
    capacity: int
    """0: not known."""

    @property
    def total(self) -> int:
        """Sum of all parts, with every worker at its peak."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class UnknownModel:
    """A model whose size is not known."""

    section: str
    """Dotted path of its section in the spec."""
    path: str
    why: str
    trained: bool
    """Whether an earlier stage trains it: the model of that stage is the one to name."""


@dataclass(frozen=True)
class SharedUse:
    """The memory of one shared GPU in each period of a step."""

    workers: tuple[str, ...]
    periods: Mapping[Period, int]
    alone: int
    """Sum of what each worker needs at its own peak: what the GPU would need if they held all of it at once."""
    capacity: int

    @property
    def most(self) -> int:
        """Bytes of the fullest period."""
        return max(self.periods.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run."""

    workers: tuple[WorkerMemory, ...]
    caches: Mapping[str, Cache]
    """KV cache by engine."""
    nodes: tuple[NodeMemory, ...]
    unknown: tuple[UnknownModel, ...]
    """Models whose size is not known; their workers are not counted."""
    misfit: Misfit | None
    """The first thing that does not fit."""
    warnings: tuple[str, ...]
    """GPUs and nodes that are nearly full."""
    shared: tuple[SharedUse, ...] = ()
    """GPUs whose workers hold parts of their memory in some periods of a step only."""


def memory_plan(spec: RunSpec, everyone: Sequence[PlacedWorker], nodes: Sequence[Node], sizes: Sizes) -> MemoryPlan:
    """Memory of every worker, engine and node of a spec whose workers are placed."""
    by_name = {node.name: node for node in nodes}
    workers: dict[str, tuple[WorkerMemory, ...]] = {}
    caches: dict[str, Cache] = {}
    alike: dict[tuple[str, bool, int], Memory] = {}  # the workers of a role but for the first are
    for placed in everyone:
        gpu = by_name[placed.node].gpu_memory if placed.node in by_name else 0
        kind = placed.role, placed.is_first, gpu
        if kind not in alike:
            memory: MemoryOf = resolve(row_of(spec, placed.role).memory)
            alike[kind] = memory(spec, placed, gpu, sizes)
        estimated, cache = alike[kind]
        workers[placed.worker] = tuple(replace(memory, worker=placed.worker) for memory in estimated)
        if cache is not None:
            caches[placed.worker] = cache
    node_memories = tuple(_of_node(spec, number, node, everyone, workers, sizes) for number, node in enumerate(nodes))
    shared = list(_shared_gpus(everyone, workers, by_name))
    misfits = chain(
        _undivided_engines(spec, sizes),
        _undivided_trainers(spec, sizes),
        _engines_without_cache(everyone, caches, by_name),
        (use.misfit(caches) for use in shared if use.total > use.capacity),
        (_full_node(node) for node in node_memories if node.capacity and node.total > node.capacity),
    )
    flat = tuple(memory for memories in workers.values() for memory in memories)
    warnings = (*_nearly_full_gpus(shared, caches), *_nearly_full_nodes(node_memories))
    return MemoryPlan(
        workers=flat,
        caches=caches,
        nodes=node_memories,
        unknown=_unknown(spec, sizes),
        misfit=next(misfits, None),
        warnings=warnings,
        shared=tuple(use.by_period for use in shared if use.alternates),
    )


def _unknown(spec: RunSpec, sizes: Sizes) -> tuple[UnknownModel, ...]:
    """The spec's models of unknown size; a model that several sections name has the first of them."""
    found: dict[str, UnknownModel] = {}
    for section, model in spec.models().items():
        if model.path in sizes.unknown:
            why, trained = sizes.unknown[model.path], model.path in sizes.trained
            found.setdefault(model.path, UnknownModel(section, model.path, why, trained))
    return tuple(found.values())


def _of_node(
    spec: RunSpec,
    number: int,
    node: Node,
    everyone: Sequence[PlacedWorker],
    workers: Mapping[str, tuple[WorkerMemory, ...]],
    sizes: Sizes,
) -> NodeMemory:
    """Host memory of a node: its workers, and on some nodes the weight file, the step's batch, and Ray's processes."""
    here = [placed for placed in everyone if placed.node == node.name]
    by_role: defaultdict[str, int] = defaultdict(int)
    for placed in here:
        by_role[placed.role] += sum(m.total for m in workers[placed.worker] if m.where == "host")
    parts = [Part(role, count) for role, count in by_role.items() if count]
    size = sizes.of(spec.model)
    maps_file = any(placed.role in SAMPLERS or placed.worker == "policy-0" for placed in here)
    if maps_file and size is not None and has_weight_file(spec):
        lora = spec.roles.policy.lora
        published = size.parameters if lora is None else adapter_numbers(size, lora)
        parts.append(Part("weight file", WIDTHS[spec.model.dtype] * published))
    if number == 0:
        batch = batch_bytes(spec) + (0 if size is None else _route_bytes(spec, size))
        parts += [Part("batch", batch), Part("ray", RAY_PROCESSES)]
    return NodeMemory(node.name, tuple(parts), node.memory)


def _route_bytes(spec: RunSpec, size: ModelSize) -> int:
    """Bytes of the recorded experts of a step's tokens, in ROLLOUTS of every step in progress and once in TRAIN."""
    if spec.rollouts is None or not spec.rollouts.sampling.router_replay:
        return 0
    tokens = spec.rollouts.sequences_per_step * spec.rollouts.roles.rollout.max_model_len
    tables = spec.rollouts.schedule.max_staleness + 2
    return tables * tokens * size.layers * size.experts * (1 if size.routed <= _MOST_IN_A_BYTE else 2)


def gib(count: int) -> str:
    """GiB with one decimal (`14.2`), or two below 1."""
    return f"{count / GIB:.1f}" if count >= GIB else f"{count / GIB:.2f}"


def _undivided_engines(spec: RunSpec, sizes: Sizes) -> Iterator[Misfit]:
    for role in spec.roles.present():
        row = row_of(spec, role)
        if not row.engine:
            continue
        config = settings_of(spec, role).config
        size, ranks = sizes.of(config.model, packed=row.quantized), config.engine.tensor_parallel_size
        if ranks > 1 and size is not None and (why := undivided(size, ranks)):
            yield Misfit("parallel", role, (role,), f"roles.{role}.tensor_parallel_size: {ranks} {why}")


def _undivided_trainers(spec: RunSpec, sizes: Sizes) -> Iterator[Misfit]:
    for role, trainer in spec.roles.trainers().items():
        size, ranks = sizes.of(settings_of(spec, role).config.model), trainer.sequence_parallel_size
        if size is None or ranks == 1:
            continue
        field = f"roles.{role}.sequence_parallel_size"
        if size.heads % ranks:
            problem = f"{field}: {ranks} does not divide the model's {size.heads} attention heads"
            yield Misfit("parallel", role, (role,), problem)
        elif size.windowed or size.eager:
            what = "sliding windows" if size.windowed else "caps or sinks in its attention"
            yield Misfit("parallel", role, (role,), f"{field}: {ranks} needs a model without {what}")


def _engines_without_cache(
    everyone: Sequence[PlacedWorker], caches: Mapping[str, Cache], nodes: Mapping[str, Node]
) -> Iterator[Misfit]:
    for placed in everyone:
        cache = caches.get(placed.worker)
        if cache is None or cache.sequences:
            continue
        problem = f"{placed.worker}: its KV cache of {gib(cache.bytes)} GiB holds no sequence of {cache.longest} tokens"
        if placed.gpus > 0:
            problem += f" (a GPU has {gib(nodes[placed.node].gpu_memory)} GiB)"
        yield Misfit("cache", placed.worker, (placed.role,), problem)


@dataclass(frozen=True)
class _SharedGpu:
    """What the workers of one bundle need of their GPU, or each of their GPUs."""

    memories: Mapping[PlacedWorker, Sequence[WorkerMemory]]
    capacity: int

    @cached_property
    def needs(self) -> Mapping[PlacedWorker, int]:
        """What each needs in the fullest period."""
        return max(map(self._during, PERIODS), key=lambda needs: sum(needs.values()))

    @property
    def total(self) -> int:
        return sum(self.needs.values())

    @property
    def alternates(self) -> bool:
        return any(part.periods != PERIODS for held in self.memories.values() for m in held for part in m.parts)

    @property
    def by_period(self) -> SharedUse:
        periods: dict[Period, int] = {period: sum(self._during(period).values()) for period in PERIODS}
        alone = sum(memory.total for held in self.memories.values() for memory in held)
        return SharedUse(tuple(placed.worker for placed in self.memories), periods, alone, self.capacity)

    def _during(self, period: Period) -> Mapping[PlacedWorker, int]:
        return {placed: sum(memory.during(period) for memory in held) for placed, held in self.memories.items()}

    @property
    def names(self) -> str:
        return " and ".join(placed.worker for placed in self.memories)

    def misfit(self, caches: Mapping[str, Cache]) -> Misfit:
        # An engine takes a fixed share of the GPU, so of two workers on a GPU the other one is too large.
        needs = self.needs
        roles = [s.role for s in sorted(needs, key=lambda placed: (placed.worker in caches, -needs[placed]))]
        need = "need" if len(needs) > 1 else "needs"
        problem = f"{self.names} {need} {gib(self.total)} GiB of a GPU's {gib(self.capacity)}"
        if self.alternates:
            period = max(PERIODS, key=self.by_period.periods.__getitem__)
            problem += f" during {_PERIOD_NAMES[period]}"
        return Misfit("gpu", self.names, tuple(dict.fromkeys(roles)), problem)


def _shared_gpus(
    everyone: Sequence[PlacedWorker], workers: Mapping[str, tuple[WorkerMemory, ...]], nodes: Mapping[str, Node]
) -> Iterator[_SharedGpu]:
    """Use of GPUs of known size, by bundle: its workers share its GPU, an engine of several one with each rank."""
    bundles: defaultdict[tuple[str, int], list[PlacedWorker]] = defaultdict(list)
    for placed in everyone:
        if placed.gpus > 0 and placed.node in nodes and nodes[placed.node].gpu_memory:
            bundles[placed.group, placed.bundle].append(placed)
    for together in bundles.values():
        wide = [placed for placed in together if placed.gpus > 1]
        apart = [[placed, *wide] for placed in together if placed not in wide]
        for sharing in apart if wide and apart else [together]:
            memories = {placed: [m for m in workers[placed.worker] if m.where == "gpu"] for placed in sharing}
            capacity = int(min(1.0, sum(placed.gpus for placed in sharing)) * nodes[sharing[0].node].gpu_memory)
            yield _SharedGpu(memories, capacity)


def _full_node(node: NodeMemory) -> Misfit:
    parts = sorted(node.parts, key=lambda part: -part.bytes)
    largest = ", ".join(f"{part.name} {gib(part.bytes)}" for part in parts[:3])
    problem = f"{node.node} needs {gib(node.total)} GiB of host memory and has {gib(node.capacity)} ({largest}, ...)"
    return Misfit("host", node.node, tuple(part.name for part in parts), problem)


def _nearly_full_gpus(shared: Sequence[_SharedGpu], caches: Mapping[str, Cache]) -> Iterator[str]:
    """One line for all workers that leave as little. An engine alone is no reason: its cache takes the rest."""
    alike: dict[tuple[tuple[str, ...], int, int], list[_SharedGpu]] = {}
    for use in shared:
        roles = tuple(placed.role for placed in use.memories)
        others = any(placed.worker not in caches for placed in use.memories)
        if use.total <= use.capacity < use.total / (1 - HEADROOM) and others:
            alike.setdefault((roles, use.total, use.capacity), []).append(use)
    for (_, total, capacity), uses in alike.items():
        more = f" (and {len(uses) - 1} more)" if len(uses) > 1 else ""
        yield f"{uses[0].names}{more}: {_left(total, capacity)} of a GPU"


def _nearly_full_nodes(nodes: Sequence[NodeMemory]) -> Iterator[str]:
    for node in nodes:
        if node.total <= node.capacity < node.total / (1 - HEADROOM):
            yield f"{node.node}: {_left(node.total, node.capacity)} of host memory"


def _left(total: int, capacity: int) -> str:
    return f"only {100 * (capacity - total) / capacity:.0f}% ({gib(capacity - total)} of {gib(capacity)} GiB) are left"
