"""Memory of each worker of a spec: the spec's settings and model sizes, put into the formulas of `worker_memory`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from troupe.orchestrator.capacity.worker_memory import (
    TRANSFER_BUFFER,
    Cache,
    Part,
    Scoring,
    Training,
    WorkerMemory,
    batch_bytes,
    engine,
    scoring,
    training,
)
from troupe.orchestrator.model_facts.model_size import ModelSize, SizeUnknown, read_size
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.workers.contract.config import ModelConfig
from troupe.workers.contract.offline_config import RewardLossConfig
from troupe.workers.contract.units import MIB

TRAINER_PROCESS = 700 * MIB
"""Host memory of a training rank without a model. `benchmarks.plan_memory` measures 461 MiB after the imports and the
rendezvous, and peaks with 650 to 770 MiB beyond the model once updates have loaded kernels and caches."""
SCORER_PROCESS = 600 * MIB
"""Host memory of a process with torch and transformers (reference, reward model): 437 MiB after the imports, plus
what the first pass loads, as for a trainer."""
ENGINE_PROCESS = 1600 * MIB
"""Host memory of an engine's processes without the model: 1530 MiB on a CPU, with shared pages counted once.
(The sum of their reported peaks is 450 MiB higher.)"""
REWARD_PROCESS = 130 * MIB
"""Host memory of a reward worker without a model: 125 MiB after importing it and Ray."""
FUNCTION_PROCESS = 60 * MIB
"""Host memory of one reward function's process: 15 MiB, plus what the function imports (math-verify)."""


@dataclass(frozen=True)
class Seated:
    """One worker and its place."""

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


@dataclass
class Sizes:
    """Sizes of models by folder, each read once."""

    known: dict[str, ModelSize] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Why each size that is not known is not."""
    trained: set[str] = field(default_factory=set)
    """Models of unknown size that an earlier stage trains, from another one of unknown size."""

    def of(self, model: ModelConfig, *, packed: bool = False) -> ModelSize | None:
        """Size of the model; None where it is not known.

        Args:
            model: The model.
            packed: Whether the role uses quantized weights as they are. All but a judge's engine need plain ones.
        """
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


def worker_memory(spec: RunSpec, seat: Seated, gpu: int, sizes: Sizes) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
    """Memory of one worker (empty where its model's size is not known), and its cache if it is an engine.

    Args:
        spec: The spec that the worker is part of.
        seat: The worker.
        gpu: Memory of one of its GPUs in bytes; 0: not known.
        sizes: Sizes of the models.
    """
    if seat.role in ("policy", "critic"):
        rank = training_of(spec, seat.role, sizes, first=seat.worker == "policy-0")
        return (() if rank is None else training(seat.worker, rank)), None
    if seat.role == "reference":
        return _of_reference(spec, seat, sizes), None

    def on_rollouts(spec: RolloutSpec) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
        if seat.role == "rollout":
            return _of_engine(spec, seat, gpu, sizes)
        if seat.role == "judge":
            return _of_judge(spec, seat, gpu, sizes)
        return _of_environment(seat) if seat.role == "environment" else _of_reward(spec, seat, sizes), None

    return spec.dispatch(on_rollouts, lambda _: ((), None))


def _of_reference(spec: RunSpec, seat: Seated, sizes: Sizes) -> tuple[WorkerMemory, ...]:
    config = spec.reference_config()
    size = sizes.of(config.model) if config is not None else None
    if config is None or size is None:
        return ()
    model = Scoring(
        size=size,
        dtype=config.model.dtype,
        tokens=config.micro_batch_tokens,
        longest=spec.longest_sequence,
        gpu=config.device == "cuda",
        process=SCORER_PROCESS,
    )
    return scoring(seat.worker, model)


def _of_engine(
    spec: RolloutSpec, seat: Seated, gpu: int, sizes: Sizes
) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
    config = spec.rollout_config()
    size = sizes.of(config.model)
    if size is None:
        return (), None
    transfer = 2 * TRANSFER_BUFFER if config.transfer_backend == "nccl" else 0
    on_gpu = gpu if config.device == "cuda" else None
    return engine(seat.worker, size, config.model.dtype, config.engine, on_gpu, ENGINE_PROCESS, transfer)


def _of_judge(spec: RolloutSpec, seat: Seated, gpu: int, sizes: Sizes) -> tuple[tuple[WorkerMemory, ...], Cache | None]:
    config = spec.judge_config()
    size = None if config is None else sizes.of(config.model, packed=True)
    if config is None or size is None:
        return (), None
    on_gpu = gpu if config.device == "cuda" else None
    return engine(seat.worker, size, config.model.dtype, config.engine, on_gpu, ENGINE_PROCESS)


def _of_environment(seat: Seated) -> tuple[WorkerMemory, ...]:
    """Memory of an environment worker, without what its episodes allocate."""
    parts = (Part("functions", FUNCTION_PROCESS), Part("process", REWARD_PROCESS))
    return (WorkerMemory(seat.worker, "host", parts),)


def _of_reward(spec: RolloutSpec, seat: Seated, sizes: Sizes) -> tuple[WorkerMemory, ...]:
    role = spec.roles.reward
    functions = Part("functions", len(role.functions) * FUNCTION_PROCESS)
    if role.model is None:
        return (WorkerMemory(seat.worker, "host", (functions, Part("process", REWARD_PROCESS))),)
    size = sizes.of(role.model)
    if size is None:
        return ()
    model = Scoring(
        size=size.with_score(),
        dtype=role.model.dtype,
        tokens=role.micro_batch_tokens,
        longest=spec.longest_sequence,
        gpu=role.device == "cuda",
        values=True,
        process=SCORER_PROCESS,
    )
    found = scoring(seat.worker, model)
    return tuple(replace(m, parts=(*m.parts, functions)) if m.where == "host" else m for m in found)


def training_of(spec: RunSpec, role: str, sizes: Sizes, first: bool = False) -> Training | None:
    """What determines the memory of a training rank; None where its model's size is not known.

    Args:
        spec: The spec that the rank is part of.
        role: `policy` or `critic`.
        sizes: Sizes of the models.
        first: Whether it is the rank that sends weights over NCCL.
    """

    def on_rollouts(spec: RolloutSpec) -> Training | None:
        return _critic_training(spec, sizes) if role == "critic" else _policy_training(spec, sizes, first)

    return spec.dispatch(on_rollouts, lambda spec: _offline_training(spec, sizes))


def _offline_training(spec: OfflineSpec, sizes: Sizes) -> Training | None:
    config = spec.trainer_config()
    size = sizes.of(config.model)
    if size is None:
        return None
    keeps_language = isinstance(config.loss, RewardLossConfig) and config.loss.lm_coef > 0
    values = spec.trains == "reward_model" and not keeps_language
    return Training(
        size=size.with_score() if values else size,
        dtype=config.model.dtype,
        trainer=config.trainer,
        ranks=spec.roles.policy.workers,
        gpu=config.device == "cuda",
        longest=spec.longest_sequence,
        values=values,
        reference=_reference(config.reference_model, sizes),
        process=TRAINER_PROCESS,
    )


def _critic_training(spec: RolloutSpec, sizes: Sizes) -> Training | None:
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
        longest=spec.longest_sequence,
        values=True,
        process=TRAINER_PROCESS,
    )


def _policy_training(spec: RolloutSpec, sizes: Sizes, first: bool) -> Training | None:
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
        gpu=spec.roles.policy.device == "cuda",
        longest=spec.longest_sequence,
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


def step_batch(spec: RunSpec) -> int:
    """Most bytes of the object store that the tables of one step take, with those of steps in progress beside it."""
    return spec.dispatch(_rollout_batch, _offline_batch)


def _rollout_batch(spec: RolloutSpec) -> int:
    response = spec.sampling.max_tokens
    prompt = max(1, spec.roles.rollout.max_model_len - response)
    return batch_bytes(spec.samples_per_step, prompt, response, 1 + spec.schedule.max_staleness)


def _offline_batch(spec: OfflineSpec) -> int:
    # EXAMPLE_BATCH: ids, masks and log-probs of at most two answers, pair by pair.
    return 2 * spec.schedule.examples_per_step * spec.data.max_length * 16
