"""Base of all training workers: joining the training group, checkpoints, metrics, health."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import pyarrow as pa
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

from troupe.workers.algorithms.offline_objectives import ObjectiveOutput
from troupe.workers.algorithms.policy_loss import LossOutput
from troupe.workers.contract.algorithm_config import DistillConfig
from troupe.workers.contract.arrow import pickle_tables
from troupe.workers.contract.config import DISTILL_CHUNKS, RankConfig, Rendezvous
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.messages import (
    KEPT_BATCH,
    KEPT_TEXTS,
    KeptFile,
    Peak,
    RankPlan,
    SaveStatus,
    ScoreSummary,
    UpdateMetrics,
    WorkerHealth,
)
from troupe.workers.contract.rdma import rdma
from troupe.workers.contract.weight_backends import ALLOCATOR_VARIABLES
from troupe.workers.data.kept_tables import picked, write_tables
from troupe.workers.models.capabilities import adapt, use_liger
from troupe.workers.models.distillation import LogitsReader, TopTeacher, WholeTeacher, top_tokens
from troupe.workers.models.modeling import CausalLogprobs, ModelModule, head_chunks, load_causal, score_plan
from troupe.workers.models.sequence_parallel import SequenceGroup
from troupe.workers.models.token_batch import TokenBatch, TokenTable
from troupe.workers.telemetry.peak_memory import resident_peak
from troupe.workers.telemetry.start_activity import Activity, announce
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.training.background_save import BackgroundWriter, whole_files
from troupe.workers.training.deepspeed_engine import Forward, StepResult, TrainEngine
from troupe.workers.training.group import (
    LOOPBACK,
    all_reduce,
    all_reduce_line,
    join_group,
    leave_group,
    open_store,
    own_address,
    sequence_group,
)
from troupe.workers.training.meter import UpdateMeter, profiled
from troupe.workers.training.zero3 import FrozenModule, partitioner_for, place_frozen

if TYPE_CHECKING:
    from transformers import PreTrainedModel


OutputT = TypeVar("OutputT", LossOutput, ObjectiveOutput)
ConfigT = TypeVar("ConfigT", bound=RankConfig)

Work = Callable[[Forward], tuple[TokenBatch, OutputT]]
"""Cuts a micro-batch, so that only one is in memory at a time, and computes its output."""


@dataclass(frozen=True)
class Update(Generic[OutputT]):
    """One optimizer step and what it was computed from."""

    step: StepResult
    outputs: Sequence[OutputT]
    meter: UpdateMeter
    sequences: int

    def metrics(self, sums: dict[str, float], values: dict[str, float], device: Device) -> UpdateMetrics:
        """These metrics of the outputs, and metrics of the step and its speed. Collective."""
        step = self.step
        of_step = {"grad_norm": step.grad_norm, "learning_rate": step.learning_rate}
        if step.loss_scale is not None:
            of_step |= {"loss_scale": step.loss_scale, "overflows": float(step.overflowed)}
        return UpdateMetrics(
            sums=sums | {"sequences": float(self.sequences)},
            values=values | self.meter.metrics() | of_step | dict(step.metrics),
            skipped=step.skipped,
            peak=own_peak(device),
        )


def loss_metrics(update: Update[LossOutput], device: Device) -> UpdateMetrics:
    """Metrics of an update on a TRAIN table: means per loss token, and maxima over all ranks. Collective."""
    terms, sums = added(output.terms for output in update.outputs), added(output.sums for output in update.outputs)
    maxima: dict[str, float] = {}
    for output in update.outputs:
        for name, value in output.maxima.items():
            highest = float(value)
            maxima[name] = max(maxima.get(name, highest), highest)
    totals = all_reduce(sums, device, "sum")
    tokens = totals.pop("tokens")
    means = {name: total / max(tokens, 1.0) for name, total in totals.items()}
    values = means | all_reduce(maxima, device, "max")
    return update.metrics(terms | {"tokens": sums["tokens"]}, values, device)


class TrainingRank(ABC, Generic[ConfigT]):
    """One process of a training group. Methods that use the model are collective: all ranks call them in one order."""

    def __init__(self, config: ConfigT, name: str) -> None:
        pickle_tables()
        self._config = config
        self._name = name
        self._device: Device = config.device
        self._version = 0
        self._packs = False
        self._store: TCPStore | None = None
        self._engine: TrainEngine | None = None
        self._sequence: SequenceGroup | None = None
        self._reference: FrozenModule | None = None
        self._base_of: ModelAdapter | None = None
        """Adapters whose start is the colocated reference."""
        self._writer = BackgroundWriter()

    @property
    def _below(self) -> ModelConfig:
        """The model to load: adapters that train are not added to its weights."""
        source = self._config.model
        return source if self._config.lora is None else source.model_copy(update={"adapter": None})

    @property
    def _distill(self) -> DistillConfig:
        """Divergence from a teacher in the loss."""
        return DistillConfig()

    @property
    def _logits_readers(self) -> int:
        """Number of times that the loss compares more of a token's distribution than the sampled token."""
        return int(self._distill.coef > 0)

    @property
    def engine(self) -> TrainEngine:
        """The training engine. Raises RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError(f"{self._name} has not been started")
        return self._engine

    @property
    def _shares_memory(self) -> bool:
        """Whether another process opens memory that this one has allocated on its GPU."""
        return False

    def host(self) -> str:
        return f"{socket.gethostname()} {own_address()}"

    def rendezvous(self, *, one_host: bool) -> tuple[str, int]:
        """(address, port) of the store, opened on this machine; call it before `start`, on the future rank 0."""
        address = LOOPBACK if one_host else own_address()
        self._store = open_store(address)
        return address, self._store.port

    def join(self, rendezvous: Rendezvous) -> None:
        if self._engine is not None:
            raise RuntimeError(f"{self._name} has already been started")
        prepare_torch(self._config.trainer.threads, deterministic=self._config.deterministic)
        if self._device == "cuda" and not self._shares_memory:
            expand_segments(os.environ)
        torch.manual_seed(self._config.seed)
        announce(Activity.GROUP)
        join_group(rendezvous, self._device, self._store)

    def start(self, rendezvous: Rendezvous) -> WorkerHealth:
        """Join the group and load the models. Raises OSError for a missing model, ValueError for an unsuitable one."""
        self.join(rendezvous)
        network = f"{all_reduce_line(self._device)} ({rdma()})" if rendezvous.address != LOOPBACK else ""
        return replace(self.build(), network=network)

    @abstractmethod
    def build(self) -> WorkerHealth:
        """Load the models, the trained one into DeepSpeed; the process must have joined its group."""

    def _train(self, module: ModelModule, model: PreTrainedModel, dtype: torch.dtype) -> ModelAdapter | None:
        """Put a model into DeepSpeed. Returns its adapters if only they train, else None."""
        config, trainer = self._config, self._config.trainer
        adapter = None if config.lora is None else ModelAdapter(model, config.lora, config.model, config.seed)
        self._sequence = sequence_group(trainer.sequence_parallel_size)
        if trainer.kernels == "liger":
            use_liger(model, self._device)
        self._packs = adapt(module, model, self._device, trainer.packing, self._sequence)
        announce(Activity.TRAINER)
        self._engine = TrainEngine(module, model, trainer, config.total_updates, self._device, dtype, adapter)
        return adapter

    def _train_policy(
        self, reference: ModelConfig | None, temperature: float, entropy_grad: bool = False
    ) -> ModelAdapter | None:
        """Load a causal language model into DeepSpeed, and a frozen reference, with adapters the model below. Returns
        the adapters if only they train, else None."""
        announce(Activity.MODEL)
        model = load_causal(self._below, partitioner_for(self._config.model, self._config.trainer))
        adapter = self._train(self._logprobs(model, temperature, entropy_grad), model, model.dtype)
        if adapter is not None and reference == self._config.model:
            self._base_of = adapter
        elif reference is not None:
            self._reference = self._load_frozen(reference, temperature)
        return adapter

    def _load_frozen(self, config: ModelConfig, temperature: float) -> FrozenModule:
        """Load a causal language model that scores the micro-batches of the trained one."""
        frozen = load_causal(config, partitioner_for(config, self._config.trainer))
        if self._config.trainer.kernels == "liger":
            use_liger(frozen, self._device)
        scores = self._logprobs(frozen, temperature)
        self._packs = adapt(scores, frozen, self._device, self._packs, self._sequence) and self._packs
        return place_frozen(scores, self._config.trainer, self.engine.device)

    def _logprobs(self, model: PreTrainedModel, temperature: float, entropy_grad: bool = False) -> CausalLogprobs:
        return CausalLogprobs(model, temperature, self._head_chunks(model), entropy_grad)

    def _head_chunks(self, model: PreTrainedModel) -> int:
        tokens = self._config.trainer.worker_tokens * max(1, DISTILL_CHUNKS * self._logits_readers)
        return head_chunks(model.config.get_text_config().vocab_size, tokens, self._device)

    def reference_logprobs(self, plan: RankPlan, *tables: pa.Table) -> tuple[ScoreSummary, pa.Table]:
        """(summary, token_scores table): `ref_logprobs` under the colocated reference, which with adapters may be
        the trained model without them, or with the initial ones. Raises RuntimeError without one."""
        how = (self.engine.device, top_tokens(self._distill.stored_k))
        if self._base_of is not None:
            with self._base_of.as_started():
                return score_plan(self.engine.module, plan, tables, "ref_logprobs", *how)
        return score_plan(self._frozen, plan, tables, "ref_logprobs", *how)

    @property
    def _frozen(self) -> ModelModule:
        """The colocated reference. Raises RuntimeError if there is none."""
        if self._reference is None:
            raise RuntimeError(f"{self._name} has no colocated reference")
        return self._reference.module

    def _teacher(self, table: TokenTable, micro_batch: TokenBatch) -> LogitsReader:
        """Reads the divergence from the teacher at a micro-batch's tokens. Raises ValueError without its tokens."""
        if self._distill.in_process:
            return self._whole(self._frozen, micro_batch)
        stored = table.teachers(micro_batch)
        if stored is None:
            raise ValueError("algorithm.distill needs the teacher's tokens, but the batch lacks the column teacher_ids")
        return TopTeacher(*stored, self._distill)

    def _whole(self, frozen: ModelModule, micro_batch: TokenBatch) -> WholeTeacher:
        """A frozen model that teaches with all of its logits."""
        teacher = cast(CausalLogprobs, frozen)
        states = teacher.teacher_states(micro_batch)
        return WholeTeacher(states, teacher.logits_of, teacher.temperature, self._distill)

    def _meter(self) -> UpdateMeter:
        """Measures an update that begins now."""
        return UpdateMeter(cast(ModelModule, self.engine.module), self._device)

    def _update(
        self, plan: RankPlan, work: Sequence[Work[OutputT]], meter: UpdateMeter | None = None
    ) -> Update[OutputT]:
        """Take one optimizer step on the sum of the losses, profiled if the plan asks for it."""
        meter = meter or self._meter()
        outputs: list[OutputT] = []

        def loss_of(forward: Forward, compute: Work[OutputT]) -> torch.Tensor:
            micro_batch, output = compute(forward)
            meter.note(micro_batch)
            # Without the graph of the loss, which may keep activations alive after the backward pass.
            outputs.append(replace(output, loss=output.loss.detach()))
            return output.loss

        with profiled(plan.trace, self._device):
            step = self._step(work, loss_of)
        return Update(step, outputs, meter, sum(map(len, plan.micro_batches)))

    def _step(
        self, work: Sequence[Work[OutputT]], loss_of: Callable[[Forward, Work[OutputT]], torch.Tensor]
    ) -> StepResult:
        return self.engine.update(work, loss_of)

    def packs(self) -> bool:
        return self._packs

    def offload_states(self) -> int:
        """Move what only an update needs to host memory, until the next; returns the bytes that are free on the GPU."""
        return self.engine.offload_states()

    def save(self, directory: str) -> None:
        """Write this rank's part of a resumable checkpoint. Raises RuntimeError as `begin_save`, and OSError."""
        self._require_written()
        with whole_files(directory):
            self.engine.save(directory)

    def begin_save(self, directory: str, model: str = "", average: str = "") -> None:
        """Copy what `save` writes, and begin to write it, and exports into named folders, in the background
        (`save_status`). Raises RuntimeError if some rank is still writing."""
        self._require_written()
        state = self.engine.copy_state(directory)
        exports = self.engine.copy_export(model, self._config.model) if model else []
        exports += self.engine.copy_export(average, self._config.model, average=True) if average else []
        self._writer.start(directory, state, exports)

    def _require_written(self) -> None:
        """Raise RuntimeError on all ranks if one is still writing: the others would wait for it in vain."""
        if all_reduce({"writes": float(self._writer.writes)}, self._device, "max")["writes"]:
            raise RuntimeError("an earlier checkpoint is still being written")

    def save_status(self, directory: str) -> SaveStatus:
        """Whether the save of `begin_save` is written. Raises RuntimeError if another process began it."""
        return self._writer.status(directory)

    def try_save(self, directory: str) -> None:
        self.engine.try_save(directory, self._config.model)

    def load(self, directory: str) -> int:
        """Resume from a checkpoint; returns the number of ranks that wrote it. It is unpickled: verify it first."""
        return self.engine.load(directory)

    def digest(self) -> str:
        return self.engine.digest()

    def keep_batch(
        self, folder: str, batch: pa.Table, texts: pa.Table | None = None, rows: Sequence[int] = ()
    ) -> dict[str, KeptFile]:
        """Write a step's batch, and these rows of its texts, to files. Raises OSError."""
        tables = {KEPT_BATCH: batch} if texts is None else {KEPT_BATCH: batch, KEPT_TEXTS: picked(texts, rows)}
        return write_tables(folder, tables)

    def export(self, directory: str, average: bool = False) -> None:
        self.engine.export(directory, self._config.model, average)

    def health(self) -> WorkerHealth:
        return worker_health(self._name, self._version, self._device)

    def release(self) -> None:
        """Release the models; the process stays in its group. Safe to call more than once."""
        self._reference = self._base_of = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """Release everything and leave the group. Safe to call more than once."""
        self.release()
        leave_group()
        self._store = None


def added(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The sums of scalars by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def worker_health(name: str, version: int, device: Device) -> WorkerHealth:
    return WorkerHealth(
        name=name,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version,
        in_flight=0,
        gpu_memory=torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0,
        gpu_ids=os.environ.get("CUDA_VISIBLE_DEVICES", "") if device == "cuda" else "",
        peak=own_peak(device),
    )


def own_peak(device: Device) -> Peak:
    """Peak memory of this process, including what torch allocated on its GPU."""
    return Peak(resident_peak(), torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def prepare_torch(threads: int, *, deterministic: bool = False) -> None:
    """Set torch's compute threads on the CPU (0 keeps the setting), before it computes, flush denormal numbers to 0
    (a confident policy has many gradients below 1e-38, each fifty times as slow), and choose algorithms. With
    `deterministic` sums have a fixed order, and torch raises if it has none; NVLS promises none."""
    if deterministic:  # read when cuBLAS and NCCL start
        os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(deterministic)
    torch.set_flush_denormal(True)
    if threads:
        torch.set_num_threads(threads)


def expand_segments(environment: Mapping[str, str]) -> None:
    """Let torch extend the segments of a GPU's memory, which batches of many lengths fragment if their size is fixed,
    unless the environment configures its allocator. Not for memory that another process opens."""
    if environment.keys().isdisjoint(ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
