"""Training with DeepSpeed: optimizer steps over many micro-batches and ranks, export of weights, checkpoints."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.data.tokenizer import copy_tokenizer, load_tokenizer
from troupe.workers.data.turn_ends import name_end
from troupe.workers.models.adapter_files import DESCRIPTION, as_bytes, as_text
from troupe.workers.models.capabilities import check_deterministic
from troupe.workers.models.cpu import return_large
from troupe.workers.models.digests import tensors_digest
from troupe.workers.models.heads import share_gradient
from troupe.workers.models.modeling import ModelModule
from troupe.workers.models.partitioned import whole_shape
from troupe.workers.training.adapter import ModelAdapter
from troupe.workers.training.background_save import HostCopies, Write
from troupe.workers.training.checkpoint_files import opened, rank_file, rank_files, restrict_loading, save_trained_only
from troupe.workers.training.group import import_deepspeed, within_node
from troupe.workers.training.master_weights import WeightSnapshot, own_part
from troupe.workers.training.model_tensors import divide_experts, layout_of, model_tensors, undivided
from troupe.workers.training.offload import StateOffload, gradient_buffers, optimizer_states
from troupe.workers.training.optimizer import (
    LossScale,
    adamw,
    deepspeed_config,
    engine_clips,
    gradient_norm,
    learning_rate,
)
from troupe.workers.training.resharding import ReshardingLoader, reshard_average

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = TypeVar("Batch")
Forward = Callable[..., Any]
"""The trained module, called with the module's own arguments."""

_PRODUCTS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"),
        *("aten::_grouped_mm", "transformers::grouped_mm_fallback"),
        *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"),
    }
)
"""Operations whose results are kept without `recompute_products`. By name: torch registers some at their first use."""

_TAG = "state"
_ADAM = ("betas", "eps", "weight_decay")
"""Settings of a parameter group of AdamW that the configuration decides; the learning rate is set at every update."""

_GENERATION = "generation_config.json"
_LOSS_SCALE = "loss_scale"
_BASE = "base"
"""Digest of the model that adapters were trained on, in a rank's own file."""

logger = logging.getLogger(__name__)


def recompute(model: PreTrainedModel, config: TrainerConfig, stage: int) -> None:
    """Make the backward pass compute every n-th layer again, all of it or all but its products, under this stage of
    ZeRO."""
    partitioned = stage == 3
    if config.recompute_products:
        # ZeRO-3 frees a parameter between forward and backward, which the checks of non-reentrant checkpointing reject.
        settings: dict[str, Any] = {"use_reentrant": partitioned}
        if partitioned:
            model.enable_input_require_grads()
    else:
        settings = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keeping)}
        if partitioned:
            settings["determinism_check"] = "none"  # it compares the shapes of parameters
    model.gradient_checkpointing_enable(settings, every_n_layers=config.recompute_every)


def _keeping(context: object, operation: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Returns whether to keep the result of an operation of a layer, as `create_selective_checkpoint_contexts` asks."""
    return CheckpointPolicy.MUST_SAVE if operation.name() in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _default_generation(model: PreTrainedModel) -> Iterator[None]:
    """Gives a model the default settings of generation inside the block."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on all ranks."""

    grad_norm: float
    """Global norm of the gradient before clipping; inf if the step was skipped."""
    learning_rate: float
    skipped: bool
    loss_scale: float | None = None
    """Loss scale of one rank in this step, or None unless the weights are in float16."""
    overflowed: bool = False
    """Whether it was skipped because the scaled gradient has overflowed; the next step has half the scale."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """More metrics of the step."""


class TrainEngine:
    """A module under DeepSpeed with AdamW. Every method is collective: all ranks call it in the same order."""

    def __init__(
        self,
        module: ModelModule,
        model: PreTrainedModel,
        config: TrainerConfig,
        total_updates: int,
        device: Device,
        dtype: torch.dtype,
        adapter: ModelAdapter | None = None,
    ) -> None:
        """Put a module under DeepSpeed; the process must have joined its group. `total_updates`: what the schedule
        spans; of an adapter alone all is trained and saved. Raises ValueError if the model is random in training
        mode."""
        self._deepspeed = import_deepspeed()
        self._config = config
        self._total_updates = total_updates
        self._updates = 0
        self._dtype = dtype
        self._model = model
        self._adapter = adapter
        self._loss_scale = LossScale() if dtype == torch.float16 else None
        self._stage = config.stage_for(dist.get_world_size(), dtype == torch.float32)
        if config.gradient_checkpointing:
            recompute(model, config, self._stage)
        module.train()
        check_deterministic(module, model, device)
        if device == "cpu":
            return_large()
            share_gradient(model)
        numbers = sum(math.prod(whole_shape(parameter)) for parameter in module.parameters() if parameter.requires_grad)
        layout, settings = layout_of(model), deepspeed_config(config, self._stage, dtype, numbers)
        if config.expert_parallel_size > 1:
            settings |= divide_experts(model, module, config.expert_parallel_size)
        # One of DeepSpeed's optimizers prints its memory use while it is built.
        with contextlib.redirect_stdout(io.StringIO()), within_node(os.environ["MASTER_ADDR"]):
            self._engine, *_ = self._deepspeed.initialize(
                model=module, optimizer=adamw(module, config), config=settings
            )
        if adapter is None:
            self._tensors = model_tensors(model, layout)
        else:
            described = (DESCRIPTION, adapter.description()), *adapter.named_parameters()
            self._tensors = [undivided(name, tensor) for name, tensor in described]
        self._files = restrict_loading(self._engine)
        if adapter is not None:
            save_trained_only(self._engine)
        if self._stage == 0 and dtype != torch.float32:
            # DeepSpeed has stepped it once with gradients of 0. Counted, that step would make the moments of the next
            # steps too small, because AdamW corrects them by the number of steps.
            self._engine.optimizer.optimizer.state.clear()
        # BF16_Optimizer and training without ZeRO find the sums where the backward pass left them. DeepSpeed's other
        # optimizers get them from the reduction, also ZeRO-1's with offload_optimizer.
        in_place = self._stage == 0 or hasattr(self._engine.optimizer, "fp32_groups_gradients_flat")
        if in_place and dist.get_world_size() == 1:
            self._engine.enable_backward_allreduce = False  # it would copy all gradients twice
        self.module: nn.Module = self._engine.module
        # Each rank averages what it holds: its partitions under ZeRO-3, otherwise the whole parameters.
        parts = self._averaged_parts() if config.ema_decay else []
        self._average = [part.data.float().clone() for part in parts]
        self.device: torch.device = self._engine.device
        self._states = StateOffload(self.device)
        self._copies: HostCopies | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def updates(self) -> int:
        """Optimizer updates so far, including skipped ones: the position in the learning-rate schedule."""
        return self._updates

    def update(self, micro_batches: Sequence[Batch], loss_fn: Callable[[Forward, Batch], torch.Tensor]) -> StepResult:
        """One optimizer step on the sum over micro-batches and ranks (equally many) of `loss_fn(forward,
        micro_batch)`. If a loss or the gradient's norm is not finite on any rank, none changes anything. Raises
        ValueError without any."""
        if not micro_batches:
            raise ValueError("an update needs at least one micro-batch; pass an empty one if there are no rows")
        self._states.reload()
        rate = learning_rate(self._config, self._updates, self._total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        # DeepSpeed averages gradients over ranks; the loss here is a sum over ranks. Without ZeRO, it divides the
        # gradients of float16 by the scale, but does not multiply the loss by it.
        factor, scale = float(dist.get_world_size()), None
        if self._loss_scale is not None:
            scale = self._loss_scale.value
            own = self._engine.optimizer.loss_scale = self._loss_scale.for_ranks(dist.get_world_size())
            factor *= own if self._stage == 0 else 1.0
        for number, micro_batch in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = loss_fn(self._engine, micro_batch)
            # An infinite loss may have a finite gradient; a factor of NaN reaches all ranks through the norm. It is
            # computed on the device, which would otherwise wait for the next micro-batch.
            poison = torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
            self._engine.backward(loss * (factor * poison), scale_wrt_gas=False)
        grad_norm, applied = self._step()
        overflowed = self._loss_scale is not None and self._loss_scale.overflows(not applied)
        return self._count(StepResult(grad_norm, rate, not applied, scale, overflowed))

    def move(self, step: Callable[[], StepResult]) -> StepResult:
        """One update by a function that moves the parameters itself, instead of AdamW: each rank must hold them whole,
        and in float32."""
        self._states.reload()
        result = step()
        if self._stage > 0:
            self._engine.optimizer.refresh_fp32_params()
        return self._count(result)

    def _count(self, result: StepResult) -> StepResult:
        self._updates += 1
        if result.skipped:
            logger.warning("update %d skipped: the gradient is not finite", self._updates)
        elif self._average:
            for average, part in zip(self._average, self._averaged_parts(), strict=True):
                average.lerp_(part.data.float(), 1.0 - self._config.ema_decay)
        return result

    def _step(self) -> tuple[float, bool]:
        if not engine_clips(self._stage, self._dtype):
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm())
            if self._stage == 0 and self._loss_scale is not None:
                norm /= self._engine.optimizer.loss_scale  # the other stages report the norm of the unscaled gradient
            return norm, self._engine.was_step_applied()
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = gradient_norm(gradients)
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return math.inf, False
        scale = self._config.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        self._engine.step()
        return norm, True

    def offload_states(self) -> int:
        """Move what only an update needs to host memory, until the next computation; returns the free bytes."""
        if self._states.offloaded:
            return 0
        if self.gathers:
            self._engine.empty_partition_cache()
        kept = (*optimizer_states(self._engine, self._stage), *self._average)
        released = self._states.offload(kept, gradient_buffers(self._engine, self._stage))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return released

    def snapshot_weights(self) -> WeightSnapshot:
        """The weights before a step, so that it can be shortened afterwards. Needs as much memory as the weights."""
        self._states.reload()
        return WeightSnapshot(self._engine, self._stage)

    def digest(self) -> str:
        """Digest of this rank's part of the weights, in the optimizer's precision. Not collective."""
        return tensors_digest(own_part(self._engine, self._stage))

    @property
    def gathers(self) -> bool:
        """Whether parameters are partitioned and gathered one at a time (ZeRO-3)."""
        return self._stage == 3

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter and saved buffer, tied ones once, or of the adapters
        and their description (peft's names). Collective. Tensors are live: copy them to outlast the next update
        or, under ZeRO-3, item."""
        for tensor in self._tensors:
            with tensor.gathered() as whole:
                yield tensor.name, whole

    def _averaged_parts(self) -> list[torch.Tensor]:
        """This rank's part of every parameter that is averaged, live: the parameter, or its partition under ZeRO-3."""
        if self._stage == 3:
            return [getattr(parameter, "ds_tensor") for parameter in self._averaged()]  # noqa: B009
        return [*self._averaged()]

    def _averaged(self) -> list[nn.Parameter]:
        """The parameters that are averaged and exported: all of the model, or its adapters."""
        whole = self._adapter is None
        return [parameter for parameter in self._model.parameters() if whole or parameter.requires_grad]

    def weight_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, type, whole shape) of every item of `named_weights`, in the same order, without gathering."""
        return [(tensor.name, tensor.dtype, tensor.shape) for tensor in self._tensors]

    def save(self, directory: str) -> None:
        """Write what a bitwise resume on the CPU needs: weights, optimizer, schedule position, random state."""
        self._save_shards(directory)
        save_file(self._own_state(), rank_file(directory, dist.get_rank(), dist.get_world_size()))
        dist.barrier()

    def copy_state(self, directory: str) -> list[Write]:
        """Copy what `save` writes to host memory, until the next call. Collective; the returned writers are not."""
        copies = self._copies = self._copies or HostCopies(self.device)
        with self._files.copied(copies.of) as writes:
            self._save_shards(directory)
        file = rank_file(directory, dist.get_rank(), dist.get_world_size())
        return [*writes, partial(save_file, copies.of(self._own_state()), file)]

    def _save_shards(self, directory: str) -> None:
        frozen = self._adapter is not None
        self._engine.save_checkpoint(directory, tag=_TAG, save_latest=False, exclude_frozen_parameters=frozen)

    def _own_state(self) -> dict[str, torch.Tensor]:
        state = {"updates": torch.tensor([self._updates]), "torch_rng": torch.get_rng_state()}
        if self._loss_scale is not None:
            state[_LOSS_SCALE] = self._loss_scale.state()
        if self._adapter is not None:
            state |= {_BASE: as_bytes(self._adapter.base)}
        state |= {f"average.{number}": average for number, average in enumerate(self._average)}
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state()
        return state

    def load(self, directory: str) -> int:
        """Resume from what `save` wrote with the same ZeRO stage; returns the number of ranks that wrote it. With as
        many ranks it is bitwise on the CPU; else every rank reads its part from all files. No code is run from
        the files. Raises FileNotFoundError; ValueError if one has other contents, when resharding before anything
        is changed."""
        self._states.reload()
        files = rank_files(directory)
        resized = len(files) != dist.get_world_size()
        if resized and self._config.expert_parallel_size > 1:
            raise ValueError(f"{directory} is of {len(files)} rank(s): divided experts are not resharded")
        # All ranks start from one seed, so an additional rank can take the random state of any other rank.
        own = files[self.rank % len(files)]
        with opened(own) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if self._average and "average.0" not in state:
            raise ValueError(f"{own} holds no moving average of the weights: ema_decay was 0 when it was written")
        if self._adapter is not None:
            self._require_base(own, state)
        if resized:
            averages = reshard_average(files, self._averaged(), self._average, self._stage)
        else:
            averages = [state[f"average.{number}"] for number in range(len(self._average))]
        folder = Path(directory) / _TAG
        # Without ZeRO every rank holds the whole state, and rank 0 wrote it.
        sharded = any(folder.glob("*_optim_states.pt"))
        if sharded != (self._stage > 0) and self._dtype != torch.float32:
            raise ValueError(
                f"{folder} was written {'with' if sharded else 'without'} ZeRO, but zero_stage is {self._stage}"
            )
        configured = [{name: group[name] for name in _ADAM} for group in self._engine.optimizer.param_groups]
        if sharded != (self._stage > 0) or (sharded and resized):
            loader = ReshardingLoader(self._engine, self._stage, self._dtype, whole=self._adapter is None)
            loader.load(folder, len(files))
        else:
            path, _ = self._engine.load_checkpoint(directory, tag=_TAG, load_module_strict=self._adapter is None)
            if path is None:
                raise FileNotFoundError(f"{directory} holds no DeepSpeed checkpoint")
        # The checkpoint's groups replace the optimizer's, with the settings of the time.
        for group, settings in zip(self._engine.optimizer.param_groups, configured, strict=True):
            group.update(settings)
        self._updates = int(state["updates"])
        if self._loss_scale is not None:
            self._loss_scale.restore(state[_LOSS_SCALE])
        torch.set_rng_state(state["torch_rng"])
        for average, saved in zip(self._average, averages, strict=True):
            average.copy_(saved)
        if "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"])
        return len(files)

    def _require_base(self, file: Path, state: dict[str, torch.Tensor]) -> None:
        """Raise ValueError unless the adapters of a checkpoint were trained on the files of this model."""
        adapter = self._adapter
        trained_on = as_text(state[_BASE]) if _BASE in state else "no adapters"
        if adapter is not None and trained_on != adapter.base:
            raise ValueError(f"{file} belongs to another base model: digest {trained_on}, now {adapter.base}")

    def export(self, directory: str, source: ModelConfig, average: bool = False) -> None:
        """Write a Hugging Face folder (safetensors, configuration) of the weights or their average, with `source`'s
        tokenizer, or peft's of the adapters. Raises RuntimeError for the average if `ema_decay` is 0."""
        writes = self.copy_export(directory, source, average)
        try:
            for write in writes:
                write()
        finally:
            dist.barrier()  # after a failure too: the other ranks wait here, and train on

    def copy_export(self, directory: str, source: ModelConfig, average: bool = False) -> list[Write]:
        """Copy what `export` writes. Collective; the returned functions write it on rank 0, and are not collective."""
        weights = {}
        with self.averaged() if average else contextlib.nullcontext():
            for name, tensor in self.named_weights():
                if self.rank == 0:
                    weights[name] = tensor.to("cpu", copy=True)
        return [partial(self._write_model, Path(directory), source, weights)] if self.rank == 0 else []

    def try_save(self, directory: str, source: ModelConfig) -> None:
        """Write what `save` and `export` write, with one small tensor for the weights, and read it again. Raises
        OSError, RuntimeError if DeepSpeed cannot write its state, ValueError if the model cannot be exported, or
        the state has what a resume does not read."""
        folder = Path(directory) / "export"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self._files.tried():
            self._save_shards(directory)
        save_file({"updates": torch.tensor([self._updates])}, rank_file(directory, self.rank, dist.get_world_size()))
        if self.rank == 0:
            name, dtype, shape = min(self.weight_shapes(), key=lambda weight: math.prod(weight[2]))
            self._write_model(folder, source, {name: torch.zeros(shape, dtype=dtype)})
            if self._adapter is None:  # the folder of adapters has no configuration to load a tokenizer by
                load_tokenizer(source.model_copy(update={"path": str(folder), "chat_template": None}))

    def _write_model(self, folder: Path, source: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        """Write these weights with the model's configuration and `source`'s other files; its
        `generation_config.json` is copied, as transformers refuses to write some that it loads."""
        if self._adapter is not None:
            self._adapter.write(folder, source.path, weights)
            copy_tokenizer(source, folder)
            return
        given = Path(source.path) / _GENERATION
        carried = self._model.can_generate() and given.is_file()
        with _default_generation(self._model) if carried else contextlib.nullcontext():
            self._model.save_pretrained(folder, state_dict=weights)
        if carried:
            shutil.copyfile(given, folder / _GENERATION)
        copy_tokenizer(source, folder)
        name_end(source, folder)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the moving average as its weights in the block. Raises RuntimeError if `ema_decay` is 0."""
        if not self._average:
            raise RuntimeError("there is no moving average of the weights: ema_decay is 0")
        parts = self._averaged_parts()
        trained = [part.data for part in parts]
        try:
            for part, average in zip(parts, self._average, strict=True):
                part.data = average.to(part.device, part.dtype)  # it may be in host memory
            yield
        finally:
            for part, before in zip(parts, trained, strict=True):
                part.data = before

    def close(self) -> None:
        self._engine.destroy()
