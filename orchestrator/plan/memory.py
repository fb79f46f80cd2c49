"""Memory of each worker of a spec: the spec's settings and model sizes, put into the formulas of `worker_memory`.

Of workers that share a GPU, each part is held in some periods of a step only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from troupe.orchestrator.model_facts.model_size import ModelSize, SizeUnknown, read_size, tensors_of
from troupe.orchestrator.plan.worker_memory import (
    PERIODS,
    WIDTHS,
    Cache,
    Part,
    Period,
    Scoring,
    Training,
    WorkerMemory,
    adapter_numbers,
    bucket_bytes,
    engine,
    in_engine,
    scoring,
    training,
)
from troupe.orchestrator.roles.names import role_of
from troupe.orchestrator.roles.settings import (
    critic_config,
    judge_config,
    offline_config,
    policy_config,
    reference_engine_config,
    rollout_config,
    scorer_configs,
    teacher_engine_configs,
)
from troupe.orchestrator.roles.table import row_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.derived.sampling import group_settings, reward_functions
from troupe.orchestrator.spec.derived.sizes import longest_sequence
from troupe.orchestrator.spec.derived.training import needs_old_logprobs, old_logprobs_at_batch
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.adapter_config import ADAPTER_WEIGHTS
from troupe.workers.contract.config import GuestEngineConfig, Sleep
from troupe.workers.contract.config_base import Dtype, ModelConfig
from troupe.workers.contract.imports import resolve
from troupe.workers.contract.offline_config import RewardLossConfig
from troupe.workers.contract.trainer_config import LoraConfig
from troupe.workers.contract.units import GIB, MIB
from troupe.workers.contract.weight_backends import BACKENDS

TRAINER_PROCESS = 600 * MIB
"""Host memory of a training rank without a model. `benchmarks.plan_memory` measures 351 MiB after the imports and the
rendezvous, and 550 to 650 MiB beyond the model once updates have loaded kernels and caches."""
SCORER_PROCESS = 600 * MIB
"""Host memory of a process with torch and transformers (reference, reward model): 437 MiB after the imports, plus
what the first pass loads, as for a trainer."""
ENGINE_PROCESS = 1600 * MIB
"""Host memory of an engine's processes without the model: 1530 MiB on a CPU, with shared pages counted once, as
`memory/rollout` does. (The sum of their resident peaks is 450 MiB higher.)"""
REWARD_PROCESS = 130 * MIB
"""Host memory of a reward worker without a model: 125 MiB after importing it and Ray."""
FUNCTION_PROCESS = 60 * MIB
"""Host memory of one reward function's process: 15 MiB, plus what the function imports (math-verify)."""


HEADROOM = 0.1
"""Share of a GPU or of a node's memory that a plan should leave free: estimates can be wrong by as much."""
GRAPHS = GIB
"""Memory of an engine's CUDA graphs, by reports of vLLM's log. Not measured here. They stay while it sleeps."""

_TRAINER: dict[str, tuple[Period, ...]] = {
    "gradients": ("update",),
    "optimizer": ("update",),
    "average": ("update",),
    "gathered": ("update",),
    "activations": ("update",),
    "logits": ("update",),
    "copied heads": ("update",),
    "kept": ("update",),
    "step": ("update",),
    "transfer": ("transfer",),
}
"""Periods of the parts of a trainer that it does not hold always."""
_MOVED = ("optimizer", "average")
"""Parts of a trainer that are in host memory outside of the updates."""
_SLEEPS: dict[Sleep, dict[str, tuple[Period, ...]]] = {
    "none": {},
    "kv_cache": {"kv cache": ("sampling",), "transfer": ("transfer",)},
    "weights": {
        "kv cache": ("sampling",),
        "activations": ("sampling",),
        "weights": ("sampling", "transfer"),
        "transfer": ("transfer",),
    },
}
"""Periods of the parts of an engine, by what it releases. vLLM keeps freed activations until it discards its
weights."""
_SCORES: tuple[Period, ...] = ("sampling", "transfer")
_FROZEN_SLEEPS: dict[Sleep, dict[str, tuple[Period, ...]]] = {
    "none": {},
    "kv_cache": {"kv cache": _SCORES},
    "weights": dict.fromkeys(("kv cache", "activations", "prompt logits", "weights"), _SCORES),
}
"""The same of an engine with frozen weights, which wakes as a whole as soon as the trainer has updated."""
_PINNED = 2
"""Host memory for each byte of weights there, at most: PyTorch makes pinned buffers as large as a power of two."""


@dataclass(frozen=True)
class PlacedWorker:
    """One worker, and the bundle and node that it is placed in."""

    worker: str
    cpus: float
    gpus: float
    group: str
    """Its placement group."""
    bundle: int
    node: str
    """Empty if there is no room."""

    @property
    def role(self) -> str:
        """`policy` of `policy-0`."""
        return role_of(self.worker)

    @property
    def is_first(self) -> bool:
        """Whether it is rank 0."""
        return self.worker.rpartition("-")[2] == "0"


@dataclass
class Sizes:
    """Sizes of models by folder, each read once."""

    known: dict[str, ModelSize] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Why each unknown size is unknown."""
    trained: set[str] = field(default_factory=set)
    """Models of unknown size that an earlier stage trains, from another one of unknown size."""

    def of(self, model: ModelConfig, *, packed: bool = False) -> ModelSize | None:
        """Size of the model, or None if unknown. `packed`: a judge's engine uses quantized weights as they are."""
        path = model.path
        if path not in self.known and path not in self.unknown:
            try:
                self.known[path] = read_size(Path(path))
            except SizeUnknown as error:
                self.unknown[path] = str(error)
        size = self.known.get(path)
        if size is not None and size.method and not packed:
            self.unknown[path] = f"its weights are quantized ({size.method}); only a judge uses such weights"
            return None
        return size


Memory = tuple[tuple[WorkerMemory, ...], Cache | None]
"""Memory of one worker (empty if its model's size is unknown), and its cache if it is an engine."""
MemoryOf = Callable[[Any, PlacedWorker, int, Sizes], Memory]
"""Memory of one worker of a spec: the spec, the worker, memory of one of its GPUs in bytes (0 if unknown), and the
sizes of models."""


def of_scorer(spec: RunSpec, placed: PlacedWorker, _gpu: int, sizes: Sizes) -> Memory:
    config = scorer_configs(spec).get(role_of(placed.worker))
    size = sizes.of(config.model) if config is not None else None
    if config is None or size is None:
        return (), None
    model = Scoring(
        size=size,
        dtype=config.model.dtype,
        tokens=config.micro_batch_tokens,
        longest=longest_sequence(spec) if config.prompt is None else config.micro_batch_tokens,
        gpu=config.device == "cuda",
        process=SCORER_PROCESS,
        ranks=config.shards,
        whole_logits=config.top_k > 0,
    )
    return scoring(placed.worker, model), None


def of_engine(spec: RolloutSpec, placed: PlacedWorker, gpu: int, sizes: Sizes) -> Memory:
    config = rollout_config(spec)
    size = sizes.of(config.model)
    if size is None:
        return (), None
    transfer = BACKENDS[config.transfer_backend].engine_buckets * bucket_bytes(size, config.model.dtype)
    adapters = 0
    if config.lora is not None:
        adapters = WIDTHS[config.model.dtype] * adapter_numbers(size, in_engine(config.lora), config.lora.reserved_rank)
    on_gpu = gpu if config.device == "cuda" else None
    shared = spec.roles.rollout.colocate_with == "policy"

    def taking(share: float | None) -> Memory:
        """Memory of the engine with this share of its GPU."""
        settings = config.engine.model_copy(update={"gpu_memory_utilization": share})
        memories, cache = engine(
            placed.worker,
            size,
            config.model.dtype,
            settings,
            on_gpu,
            process=ENGINE_PROCESS,
            transfer=transfer,
            adapters=adapters,
            graphs=GRAPHS if shared and not settings.enforce_eager else 0,
        )
        return tuple(_asleep(memories, _SLEEPS[config.sleep])), cache

    share = spec.roles.rollout.gpu_memory_utilization
    if share is not None or not shared or not on_gpu:
        return taking(share)
    others = [name for name in spec.roles.guests() if name != "rollout"]
    held = [memory for name in ("policy", *others) for memory in _of_first(name, spec, gpu, sizes)[0]]
    reserved = spec.roles.policy.gpus + sum(role.gpus for role in spec.roles.guests().values())
    shares = _engine_shares(held, taking(0.0)[0], config.sleep, on_gpu, int(min(1.0, reserved) * gpu))
    found = [taking(each) for each in shares]
    return next((memory for memory in found if memory[1] is not None and memory[1].sequences), found[-1])


def shared_engines(spec: RolloutSpec, gpu: int, sizes: Sizes) -> dict[str, tuple[int, float]]:
    """(KV cache of a GPU in bytes, share) of an engine of each role on policy GPUs of so many bytes; a role whose
    model is unknown has none."""
    found = dict[str, tuple[int, float]]()
    for name, role in spec.roles.guests().items():
        memories, cache = _of_first(name, spec, gpu, sizes)
        if cache is not None:
            share = role.gpu_memory_utilization or _held_by_engine(memories) / gpu
            found[name] = cache.bytes // role.tensor_parallel_size, share
    return found


def _of_first(role: str, spec: RolloutSpec, gpu: int, sizes: Sizes) -> Memory:
    """Memory of the first worker of a role."""
    memory: MemoryOf = resolve(row_of(spec, role).memory)
    return memory(spec, PlacedWorker(f"{role}-0", 0.0, spec.roles.present()[role].gpus, "", 0, ""), gpu, sizes)


def of_judge(spec: RolloutSpec, placed: PlacedWorker, gpu: int, sizes: Sizes) -> Memory:
    config = judge_config(spec)
    size = None if config is None else sizes.of(config.model, packed=True)
    if config is None or size is None:
        return (), None
    on_gpu = gpu if config.device == "cuda" else None
    return engine(placed.worker, size, config.model.dtype, config.engine, on_gpu, ENGINE_PROCESS)


def of_reference_engine(spec: RolloutSpec, placed: PlacedWorker, gpu: int, sizes: Sizes) -> Memory:
    config = reference_engine_config(spec)
    return ((), None) if config is None else _frozen_guest(spec, config, placed, gpu, sizes)


def of_teacher_engine(spec: RolloutSpec, placed: PlacedWorker, gpu: int, sizes: Sizes) -> Memory:
    config = teacher_engine_configs(spec)[placed.role]
    return _frozen_guest(spec, config, placed, gpu, sizes, config.batch_tokens)


def _frozen_guest(
    spec: RolloutSpec, config: GuestEngineConfig, placed: PlacedWorker, gpu: int, sizes: Sizes, scored: int = 0
) -> Memory:
    """Memory of an engine with frozen weights, maybe on the policy's GPU. `scored`: most tokens of a batch that it
    returns log-probs of."""
    size = sizes.of(config.model)
    if size is None:
        return (), None
    on_gpu, dtype = gpu if config.device == "cuda" else None, config.model.dtype
    graphs = GRAPHS if placed.role in spec.roles.guests() and not config.engine.enforce_eager else 0
    memories, cache = engine(placed.worker, size, dtype, config.engine, on_gpu, ENGINE_PROCESS, graphs=graphs)
    # vLLM computes the logits of a whole prompt, their log-probs and a sorted copy, beyond its share of a GPU.
    logits = Part("prompt logits", 12 * scored * size.vocabulary, "pass")
    more = {"host" if on_gpu is None else "gpu": [logits] if scored else []}
    if config.sleep == "weights":
        more["host"] = [Part("weights", _PINNED * WIDTHS[dtype] * size.parameters)]
    whole = [replace(one, parts=(*one.parts, *more.get(one.where, ()))) for one in memories]
    return tuple(_asleep(whole, _FROZEN_SLEEPS[config.sleep])), cache


def of_process(_spec: RunSpec, placed: PlacedWorker, _gpu: int, _sizes: Sizes) -> Memory:
    """Memory of a worker without a model, and of one process with the user's code, without what that allocates."""
    parts = (Part("functions", FUNCTION_PROCESS), Part("process", REWARD_PROCESS))
    return (WorkerMemory(placed.worker, "host", parts),), None


def of_reward(spec: RolloutSpec, placed: PlacedWorker, _gpu: int, sizes: Sizes) -> Memory:
    role = spec.roles.reward
    functions = Part("functions", sum(map(len, reward_functions(spec).values())) * FUNCTION_PROCESS)
    if not role.reward_models:
        return (WorkerMemory(placed.worker, "host", (functions, Part("process", REWARD_PROCESS))),), None
    found: list[WorkerMemory] = []
    for config in role.reward_models.values():
        if (size := sizes.of(config)) is None:
            return (), None
        model = Scoring(
            size=size.with_score(),
            dtype=config.dtype,
            tokens=role.micro_batch_tokens,
            longest=longest_sequence(spec),
            gpu=role.device == "cuda",
            values=True,
            process=SCORER_PROCESS,
        )
        own = scoring(placed.worker, model)
        found = [_beside(*both) for both in zip(found, own, strict=True)] if found else [*own]
    return tuple(replace(m, parts=(*m.parts, functions)) if m.where == "host" else m for m in found), None


def _beside(one: WorkerMemory, other: WorkerMemory) -> WorkerMemory:
    """Memory of a worker that holds the models of two, and runs one at a time."""
    others = {part.name: part.bytes for part in other.parts}
    pairs = [(part, (part.bytes, others[part.name])) for part in one.parts]
    parts = (replace(part, bytes=sum(both) if part.name == "weights" else max(both)) for part, both in pairs)
    return replace(one, parts=tuple(parts))


def of_offline_trainer(spec: OfflineSpec, placed: PlacedWorker, _gpu: int, sizes: Sizes) -> Memory:
    config = offline_config(spec)
    size = sizes.of(config.model)
    if size is None:
        return (), None
    keeps_language = isinstance(config.loss, RewardLossConfig) and config.loss.lm_coef > 0
    values = spec.trains == "reward_model" and not keeps_language
    of_base = config.lora is not None and config.reference_model == config.model  # the policy without its adapters
    rank = Training(
        size=size.with_score() if values else size,
        dtype=config.model.dtype,
        trainer=config.trainer,
        ranks=spec.roles.policy.workers,
        gpu=config.device == "cuda",
        longest=longest_sequence(spec),
        values=values,
        truncated=spec.algorithm.distillation.coef > 0,  # which compares whole logits
        frozen={} if of_base else {"reference": _frozen(sizes, config.reference_model)},
        process=TRAINER_PROCESS,
        copies_saves=spec.checkpoint.async_save,
        exported=placed.is_first,
        adapters=_adapters(size, config.lora, values=spec.trains == "reward_model"),
    )
    return training(placed.worker, rank), None


def of_critic(spec: RolloutSpec, placed: PlacedWorker, _gpu: int, sizes: Sizes) -> Memory:
    config = critic_config(spec)
    size = sizes.of(config.model) if config is not None else None
    if config is None or size is None or spec.roles.critic is None:
        return (), None
    rank = Training(
        size=size.with_score(),
        dtype=config.model.dtype,
        trainer=config.trainer,
        ranks=spec.roles.critic.workers,
        gpu=config.device == "cuda",
        longest=longest_sequence(spec),
        values=True,
        process=TRAINER_PROCESS,
        copies_saves=spec.checkpoint.async_save,
        exported=False,
        adapters=_adapters(size, config.lora, values=True),
    )
    return training(placed.worker, rank), None


def of_policy(spec: RolloutSpec, placed: PlacedWorker, _gpu: int, sizes: Sizes) -> Memory:
    config = policy_config(spec)
    size = sizes.of(config.model)
    if size is None:
        return (), None
    of_base = config.lora is not None and config.reference_model == config.model  # the policy without its adapters
    backend = BACKENDS[config.transfer_backend]
    buffers = backend.sender_buckets if backend.every_rank_sends or placed.worker == "policy-0" else 0
    whole = config.loss.distill.in_process
    rank = Training(
        size=size,
        dtype=config.model.dtype,
        trainer=config.trainer,
        ranks=spec.roles.policy.workers,
        gpu=spec.roles.policy.device == "cuda",
        longest=longest_sequence(spec),
        scaled=config.sampling.temperature != 1.0,
        truncated=config.sampling.truncates or config.loss.reads_logits,  # which needs whole logits, too
        entropy_grad=config.loss.entropy_coef > 0,
        kept_states=spec.algorithm.kl_states,
        natural_gradient=config.natural_gradient is not None,
        frozen={
            "reference": _frozen(sizes, None if of_base else config.reference_model),
            "teachers": _frozen(sizes, *config.teacher_models.values()),
        },
        copied_heads=sum(whole and one.average for one in config.teachers.values()),
        top_teachers=max(len(one.teachers) for one in group_settings(spec)) if config.loss.distill.stored_k else 0,
        process=TRAINER_PROCESS,
        transfer=buffers * bucket_bytes(size, config.model.dtype),
        copies_saves=spec.checkpoint.async_save,
        exported=placed.is_first,
        adapters=_adapters(size, config.lora, values=False),
        frozen_adapters=sum(map(_numbers_in, config.teacher_adapters.values())),
    )
    memories = training(placed.worker, rank)
    if not spec.roles.sleepers():
        return memories, None
    scores = bool(spec.in_policy) or (needs_old_logprobs(spec) and not old_logprobs_at_batch(spec))
    model = Scoring(size, config.model.dtype, config.trainer.micro_batch_tokens, longest_sequence(spec), gpu=True)
    return tuple(_handing_over(memories, scoring(placed.worker, model) if scores else ())), None


def _frozen(sizes: Sizes, *models: ModelConfig | None) -> list[tuple[ModelSize, Dtype]]:
    """Sizes and types of the given models whose sizes are known."""
    given = [model for model in models if model is not None]
    return [(size, model.dtype) for model in given if (size := sizes.of(model)) is not None]


def _numbers_in(adapter: str) -> int:
    """Numbers of an adapter, or 0 if its file is not there: `validate` reports it."""
    with suppress(SizeUnknown):
        return sum(tensor.numbers for tensor in tensors_of(Path(adapter) / ADAPTER_WEIGHTS))
    return 0


def _adapters(size: ModelSize, lora: LoraConfig | None, values: bool) -> int:
    """Numbers that train with adapters; 0: all weights do. `values`: the head, of one number for each state, does."""
    return 0 if lora is None else adapter_numbers(size, lora) + (size.hidden if values else 0)


def _handing_over(memories: Sequence[WorkerMemory], scoring: Sequence[WorkerMemory]) -> Iterator[WorkerMemory]:
    """Memory of a trainer that hands its GPU over: outside of the updates its optimizer is in host memory."""
    for memory in memories:
        if memory.where == "host":
            moved = sum(
                part.bytes for other in memories for part in other.parts if other.where == "gpu" and part.name in _MOVED
            )
            yield replace(memory, parts=(*memory.parts, Part("moved", moved)))
            continue
        periods = _TRAINER | ({"gathered": ("sampling", "update")} if scoring else {})
        parts = [replace(part, periods=periods.get(part.name, PERIODS)) for part in memory.parts]
        passes = [p.bytes for other in scoring if other.where == "gpu" for p in other.parts if p.phase == "pass"]
        if passes:
            parts.append(Part("scoring", sum(passes), "pass", ("sampling",)))
        yield replace(memory, parts=tuple(parts))


def _asleep(memories: Sequence[WorkerMemory], periods: Mapping[str, tuple[Period, ...]]) -> Iterator[WorkerMemory]:
    """Memory of an engine that sleeps while the trainer updates. `periods`: of its parts on the GPU."""
    for memory in memories:
        held = periods if memory.where == "gpu" else {}
        parts = (replace(part, periods=held.get(part.name, PERIODS)) for part in memory.parts)
        yield replace(memory, parts=tuple(parts))


def _engine_shares(
    others: Sequence[WorkerMemory], bare: Sequence[WorkerMemory], sleep: Sleep, gpu: int, reserved: int
) -> tuple[float, ...]:
    """Shares of its GPU that the others leave an engine (`bare`: without a cache): with room to spare, without."""
    held = PERIODS if sleep == "none" else ("sampling",)
    all_there = [memory for memory in (*others, *bare) if memory.where == "gpu"]
    taken = max(sum(memory.during(period) for memory in all_there) for period in held)
    rooms = ((1 - spare) * reserved - taken for spare in (HEADROOM, 0.0))
    return tuple(max(0.0, math.floor(100 * (_held_by_engine(bare) + room) / gpu) / 100) for room in rooms)


def _held_by_engine(memories: Sequence[WorkerMemory]) -> int:
    """Bytes of its share of a GPU that an engine takes: all but the buffers for new weights."""
    parts = [part for memory in memories if memory.where == "gpu" for part in memory.parts]
    return sum(part.bytes for part in parts if part.name != "transfer")
