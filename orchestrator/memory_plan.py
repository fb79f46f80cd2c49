"""What a spec's workers need of the memory of the nodes they are seated on, and the first thing that does not fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.memory import (
    GIB,
    MIB,
    TRANSFER_BUFFER,
    WIDTHS,
    Cache,
    Part,
    Training,
    WorkerMemory,
    batch_bytes,
    engine,
    scoring,
    training,
)
from orchestrator.model_size import ModelSize, SizeUnknown, read_size
from orchestrator.placement import Node
from orchestrator.spec import Spec
from orchestrator.spec_any import AnySpec
from orchestrator.spec_offline import OfflineRoles, OfflineSpec
from workers.config import ModelConfig
from workers.config_offline import RewardLossConfig

TRAINER_PROCESS = 700 * MIB
"""Host memory of a training rank without a model. `benchmarks.plan_memory`: 461 MiB after the imports and the
rendezvous; 650 to 770 are left over of the measured peaks once updates have loaded kernels and caches."""
SCORER_PROCESS = 600 * MIB
"""Host memory of a process with torch and transformers (reference, reward model): 437 MiB after the imports, and room
for what the first pass loads, as for a trainer."""
ENGINE_PROCESS = 1600 * MIB
"""Host memory of an engine's processes without the model: on a CPU 1530 MiB, the pages that they share counted once.
(The peaks that they report of themselves add up to 450 more.)"""
REWARD_PROCESS = 130 * MIB
"""Host memory of a reward worker without a model: 125 MiB after importing it and Ray."""
FUNCTION_PROCESS = 60 * MIB
"""Host memory of one reward function's process: 15 MiB, and room for what the function imports (math-verify)."""
RAY_PROCESSES = 700 * MIB
"""Host memory of Ray's own processes and the controller on the first node. Not measured."""

MOST_WORKERS = 64


@dataclass(frozen=True)
class Seated:
    """One worker and where it sits."""

    worker: str
    group: str
    bundle: int
    gpus: float
    node: str
    """Empty: no room."""

    @property
    def role(self) -> str:
        """`policy` of `policy-0`."""
        return self.worker.rpartition("-")[0]


@dataclass(frozen=True)
class NodeMemory:
    """The host memory of one node."""

    node: str
    parts: tuple[Part, ...]
    """By role, and what is there once for all."""
    capacity: int
    """0: not known."""

    @property
    def total(self) -> int:
        """Every worker at its own peak."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class MemoryPlan:
    """Who needs how much."""

    workers: tuple[WorkerMemory, ...]
    caches: Mapping[str, Cache]
    """KV cache by engine."""
    nodes: tuple[NodeMemory, ...]
    unknown: Mapping[str, str]
    """Model folders whose size is not known, and why: their workers are left out."""
    misfit: str
    """Empty, or the first thing that does not fit and what to change."""


@dataclass
class Sizes:
    """Models' sizes by folder, each read once."""

    known: dict[str, ModelSize] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def of(self, model: ModelConfig) -> ModelSize | None:
        """Size of the model; None where it is not known, which is remembered."""
        path = model.path
        if path not in self.known and path not in self.unknown:
            try:
                self.known[path] = read_size(Path(path))
            except SizeUnknown as error:
                self.unknown[path] = str(error)
        return self.known.get(path)


def memory_plan(spec: AnySpec, seats: Sequence[Seated], nodes: Sequence[Node], sizes: Sizes) -> MemoryPlan:
    """Memory of every worker, engine and node of a spec that is seated."""
    by_name = {node.name: node for node in nodes}
    workers: dict[str, tuple[WorkerMemory, ...]] = {}
    caches: dict[str, Cache] = {}
    for seat in seats:
        gpu = by_name[seat.node].gpu_memory if seat.node in by_name else 0
        workers[seat.worker], cache = _of_worker(spec, seat, gpu, sizes)
        if cache is not None:
            caches[seat.worker] = cache
    node_memories = tuple(_of_node(spec, number, node, seats, workers, sizes) for number, node in enumerate(nodes))
    misfits = (
        *_engines_without_cache(seats, caches, by_name),
        *_full_gpus(spec, seats, workers, by_name, sizes),
        *_full_nodes(spec, node_memories, sizes),
    )
    flat = tuple(memory for memories in workers.values() for memory in memories)
    used = {path: why for path, why in sizes.unknown.items() if path in {model.path for model in _models(spec)}}
    return MemoryPlan(flat, caches, node_memories, used, next(iter(misfits), ""))


def _models(spec: AnySpec) -> Iterator[ModelConfig]:
    """The models that the spec names, its own first."""
    roles = spec.roles
    sections = [roles.reference] if isinstance(roles, OfflineRoles) else [roles.critic, roles.reference, roles.reward]
    yield spec.model
    yield from (role.model for role in sections if role is not None and role.model is not None)


def _of_worker(spec: AnySpec, seat: Seated, gpu: int, sizes: Sizes) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
    """Memory of one worker (none where its model's size is not known), and its cache if it is an engine."""
    if seat.role in ("policy", "critic"):
        told = training_of(spec, seat.role, sizes, first=seat.worker == "policy-0")
        return (() if told is None else training(seat.worker, told)), None
    if seat.role == "reference":
        config = spec.reference_config()
        size = sizes.of(config.model) if config is not None else None
        if config is None or size is None:
            return (), None
        tokens, on_gpu = config.micro_batch_tokens, config.device == "cuda"
        return scoring(seat.worker, size, config.model.dtype, tokens, _longest(spec), on_gpu, SCORER_PROCESS), None
    if not isinstance(spec, Spec):
        return (), None
    if seat.role == "rollout":
        config = spec.rollout_config()
        size = sizes.of(config.model)
        if size is None:
            return (), None
        transfer = 2 * TRANSFER_BUFFER if config.transfer_backend == "nccl" else 0
        on_gpu = gpu if config.device == "cuda" else None
        return engine(seat.worker, size, config.model.dtype, config.engine, on_gpu, ENGINE_PROCESS, transfer)
    return _of_reward(spec, seat, sizes), None


def _of_reward(spec: Spec, seat: Seated, sizes: Sizes) -> tuple[WorkerMemory, ...]:
    role = spec.roles.reward
    functions = Part("functions", len(role.functions) * FUNCTION_PROCESS)
    if role.model is None:
        return (WorkerMemory(seat.worker, "host", (functions, Part("process", REWARD_PROCESS))),)
    size = sizes.of(role.model)
    if size is None:
        return ()
    tokens, on_gpu = role.micro_batch_tokens, role.gpus > 0
    found = scoring(
        seat.worker, size.with_score(), role.model.dtype, tokens, _longest(spec), on_gpu, SCORER_PROCESS, values=True
    )
    return tuple(replace(m, parts=(*m.parts, functions)) if m.where == "host" else m for m in found)


def training_of(spec: AnySpec, role: str, sizes: Sizes, first: bool = False) -> Training | None:
    """What decides over a training rank's memory; None where its model's size is not known. `first`: it is the rank
    that sends weights over NCCL."""
    if isinstance(spec, OfflineSpec):
        config = spec.trainer_config()
        size = sizes.of(config.model)
        if size is None:
            return None
        values = spec.row.trains == "reward_model"
        keeps_language = isinstance(config.loss, RewardLossConfig) and config.loss.lm_coef > 0
        return Training(
            size=size.with_score() if values and not keeps_language else size,
            dtype=config.model.dtype,
            trainer=config.trainer,
            ranks=spec.roles.policy.workers,
            gpu=config.device == "cuda",
            longest=config.examples.max_length,
            values=values and not keeps_language,
            reference=_reference(config.reference_model, sizes),
            process=TRAINER_PROCESS,
        )
    if role == "critic":
        config = spec.critic_config()
        size = sizes.of(config.model) if config is not None else None
        if config is None or size is None or spec.roles.critic is None:
            return None
        return Training(
            size=size.with_score(),
            dtype=config.model.dtype,
            trainer=config.trainer,
            ranks=spec.roles.critic.workers,
            gpu=config.device == "cuda",
            longest=_longest(spec),
            values=True,
            process=TRAINER_PROCESS,
        )
    config = spec.policy_config()
    size = sizes.of(config.model)
    if size is None:
        return None
    buffers = {"shm": 0, "ipc": TRANSFER_BUFFER, "nccl": 2 * TRANSFER_BUFFER if first else 0}
    return Training(
        size=size,
        dtype=config.model.dtype,
        trainer=config.trainer,
        ranks=spec.roles.policy.workers,
        gpu=spec.roles.policy.gpus > 0,
        longest=_longest(spec),
        scaled=config.sampling.temperature != 1.0,
        entropy_grad=config.loss.entropy_coef > 0,
        kept_states=spec.algorithm.kl_states,
        reference=_reference(config.reference_model, sizes),
        process=TRAINER_PROCESS,
        transfer=buffers[config.transfer_backend],
    )


def _reference(model: ModelConfig | None, sizes: Sizes) -> tuple[ModelSize, Any] | None:
    size = sizes.of(model) if model is not None else None
    return None if model is None or size is None else (size, model.dtype)


def _longest(spec: AnySpec) -> int:
    if isinstance(spec, OfflineSpec):
        return spec.data.max_length
    return max(spec.roles.rollout.max_model_len, spec.data.ptx.max_tokens if spec.data.ptx is not None else 0)


def _of_node(
    spec: AnySpec,
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
    if isinstance(spec, Spec):
        size = sizes.of(spec.model)
        reads = any(seat.role == "rollout" or seat.worker == "policy-0" for seat in here)
        if spec.resolved_backend() == "shm" and reads and size is not None:
            parts.append(Part("weight file", WIDTHS[spec.model.dtype] * size.parameters))
    if number == 0:
        parts += [Part("batch", step_batch(spec)), Part("ray", RAY_PROCESSES)]
    return NodeMemory(node.name, tuple(parts), node.memory)


def step_batch(spec: AnySpec) -> int:
    """Object store: the most that the tables of one step take, and of those under way beside it."""
    if isinstance(spec, OfflineSpec):
        # EXAMPLE_BATCH: ids, masks and log-probs of two answers at the most, pair by pair.
        return 2 * spec.schedule.examples_per_step * spec.data.max_length * 16
    response = spec.sampling.max_tokens
    prompt = max(1, spec.roles.rollout.max_model_len - response)
    return batch_bytes(spec.samples_per_step, prompt, response, 1 + spec.schedule.max_staleness)


def gib(count: int) -> str:
    """`14.2`: GiB with one digit, two below one."""
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
    spec: AnySpec,
    seats: Sequence[Seated],
    workers: Mapping[str, tuple[WorkerMemory, ...]],
    nodes: Mapping[str, Node],
    sizes: Sizes,
) -> Iterator[str]:
    """GPUs, by bundle: what shares a bundle shares its GPU."""
    bundles: defaultdict[tuple[str, int], list[Seated]] = defaultdict(list)
    for seat in seats:
        if seat.gpus > 0 and seat.node in nodes and nodes[seat.node].gpu_memory:
            bundles[seat.group, seat.bundle].append(seat)
    for sharing in bundles.values():
        needs = {seat: sum(m.total for m in workers[seat.worker] if m.where == "gpu") for seat in sharing}
        capacity = int(min(1.0, sum(seat.gpus for seat in sharing)) * nodes[sharing[0].node].gpu_memory)
        if sum(needs.values()) <= capacity:
            continue
        # An engine takes a share of the GPU by its setting; where another is there it is the other that is too large.
        worst = max(needs, key=lambda seat: (seat.role != "rollout", needs[seat]))
        left = capacity - (sum(needs.values()) - needs[worst])
        beside = (
            f" and {' and '.join(seat.worker for seat in sharing if seat is not worst)}" if len(sharing) > 1 else ""
        )
        yield (
            f"{worst.worker}{beside} need{'' if beside else 's'} {gib(sum(needs.values()))} GiB of a GPU's "
            f"{gib(capacity)}: {_remedy(spec, worst.role, left, 'gpu', sizes)}"
        )


def _full_nodes(spec: AnySpec, nodes: Sequence[NodeMemory], sizes: Sizes) -> Iterator[str]:
    for node in nodes:
        if not node.capacity or node.total <= node.capacity:
            continue
        most = max(node.parts, key=lambda part: part.bytes)
        told = ", ".join(f"{part.name} {gib(part.bytes)}" for part in sorted(node.parts, key=lambda p: -p.bytes)[:3])
        yield (
            f"{node.node} needs {gib(node.total)} GiB of host memory and has {gib(node.capacity)} ({told}, ...): "
            f"{_remedy(spec, most.name, 0, 'host', sizes)}"
        )


def _remedy(spec: AnySpec, role: str, room: int, where: str, sizes: Sizes) -> str:
    """What to change about a role that is too large; `room`: bytes that one worker may take, where that is a GPU's."""
    told = training_of(spec, role, sizes, first=role == "policy") if role in ("policy", "critic") else None
    if told is not None and where == "gpu":
        found = list(remedies(role, told, room))
        return ", or ".join(found[:2]) if found else "no setting makes it fit; take larger GPUs or a smaller model"
    if role == "rollout":
        # On a GPU it is its setting that takes the room, and a buffer for new weights comes on top.
        return f"lower roles.rollout.{'gpu_memory_utilization' if where == 'gpu' else 'kv_cache_gib, or its workers'}"
    if told is not None and told.gpu:
        return f"seat fewer of roles.{role}.workers on a node, or take nodes with more memory"
    if role in ("policy", "critic", "reference", "reward"):
        return f"lower roles.{role}.micro_batch_tokens or roles.{role}.workers, or take a smaller model"
    return "take a smaller model, or smaller steps"


def remedies(role: str, told: Training, room: int) -> Iterator[str]:
    """Changes of a training role after each of which a rank fits into `room` bytes of its GPU; the least first."""

    def fits(workers: int, **changes: Any) -> bool:
        changed = replace(told, ranks=workers, trainer=told.trainer.model_copy(update=changes))
        return sum(memory.total for memory in training(role, changed) if memory.where == "gpu") <= room

    trainer = told.trainer
    cheap: list[dict[str, Any]] = [
        *([{"gradient_checkpointing": True}] if not trainer.gradient_checkpointing else []),
        *([{"zero_stage": 3}] if trainer.zero_stage < 3 and told.ranks > 1 else []),
    ]
    if len(cheap) == 2:
        cheap.append(cheap[0] | cheap[1])
    found = next((changes for changes in cheap if fits(told.ranks, **changes)), None)
    if found is not None:
        yield _set(role, found)
    for workers in _doublings(told.ranks):
        changes = next((c for c in ({}, *cheap, {"zero_stage": 3}) if fits(workers, **c)), None)
        if changes is not None:
            with_stage = f" with {_listed(changes)}" if changes else ""
            yield f"raise roles.{role}.workers to {workers}{with_stage}"
            break
    tokens = _halved(trainer.micro_batch_tokens, told.longest, lambda n: fits(told.ranks, micro_batch_tokens=n))
    if tokens:
        yield f"lower roles.{role}.micro_batch_tokens to {tokens}"
    offloaded = {"offload_optimizer": True, "zero_stage": max(1, trainer.zero_stage)}
    if not trainer.offload_optimizer and fits(told.ranks, **offloaded):
        yield _set(role, {name: value for name, value in offloaded.items() if dict(trainer)[name] != value})


def _set(role: str, changes: Mapping[str, Any]) -> str:
    return " and ".join(f"set roles.{role}.{name}: {_yaml(value)}" for name, value in changes.items())


def _listed(changes: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} {_yaml(value)}" for name, value in changes.items())


def _yaml(value: Any) -> str:
    return str(value).lower()


def _doublings(workers: int) -> Iterator[int]:
    while (workers := 2 * workers) <= MOST_WORKERS:
        yield workers


def _halved(tokens: int, least: int, good: Callable[[int], bool]) -> int:
    """The first half, quarter, ... of `tokens` that is good and still holds the longest sequence; 0: none."""
    while (tokens := tokens // 2) >= max(least, 8):
        if good(tokens):
            return tokens
    return 0
