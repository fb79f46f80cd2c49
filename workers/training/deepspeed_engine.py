"""Training with DeepSpeed: one optimizer step over many micro-batches and ranks, weights out, checkpoints.

The only file that imports deepspeed, and only once an engine is built: its accelerator is chosen by an environment
variable at import.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

from workers.config import REDUCE_BUCKET, OptimizerConfig, Rendezvous, TrainerConfig
from workers.heap import return_freed
from workers.rank_files import opened, rank_file, rank_files, require
from workers.shards import (
    ZERO_1_2,
    ZERO_3,
    Shapes,
    State,
    cut_groups,
    cut_parameters,
    flattened,
    relaid,
    share,
    unflattened,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = TypeVar("Batch")
Device = Literal["cpu", "cuda"]

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer for another fails: no collective waits for ever."""
_TAG = "state"
_NORM_PIECE = 2**18
"""Numbers of a gradient whose squares are summed at a time."""
_UNCOPIED = {"config.json", "generation_config.json"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on all ranks."""

    grad_norm: float
    """Global norm of the gradient before clipping; inf where the step was skipped."""
    learning_rate: float
    skipped: bool


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """The rate of the `update`-th optimizer update (from 0).

    Warm-up rises linearly and reaches the peak at its last update; after it the schedule starts at the peak and
    is at `min_lr_ratio` of it at update `total_updates` - 1, and stays there.
    """
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    span = total_updates - 1 - config.warmup_updates
    progress = min(1.0, (update - config.warmup_updates) / span) if span > 0 else 0.0
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def rendezvous_store(address: str, port: int, serve: bool) -> TCPStore:
    """The store a training group meets at. With `serve` it is opened here; port 0 takes a free one (`store.port`)."""
    return TCPStore(address, port, is_master=serve, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)


def join_group(rendezvous: Rendezvous, device: Device, store: TCPStore | None = None) -> None:
    """Make this process a rank of the training group. Must come before any `TrainEngine` of the process.

    `store`: the one `rendezvous_store` opened here, if it did.
    """
    os.environ |= {
        "DS_ACCELERATOR": device,
        "RANK": str(rendezvous.rank),
        "WORLD_SIZE": str(rendezvous.world_size),
        # Each rank is an actor that sees its own GPU only, as number 0.
        "LOCAL_RANK": "0",
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
    }
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store or rendezvous_store(rendezvous.address, rendezvous.port, serve=False),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    _import_deepspeed().init_distributed(dist_backend=dist.get_backend(), timeout=COLLECTIVE_TIMEOUT)


def leave_group() -> None:
    """Close the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(values: Mapping[str, float], device: Device, operation: Literal["sum", "max"]) -> dict[str, float]:
    """The named numbers summed (or their maximum) over ranks; every rank passes the same names."""
    names = sorted(values)
    total = torch.tensor([values[name] for name in names], dtype=torch.double, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return dict(zip(names, total.tolist(), strict=True))


def _import_deepspeed() -> ModuleType:
    import deepspeed

    # The shared-memory all-reduce is compiled at first use, for a minute, and only inference calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class TrainEngine:
    """A module under DeepSpeed with AdamW. Every method is collective: all ranks call it in the same order."""

    def __init__(
        self,
        module: nn.Module,
        model: PreTrainedModel,
        config: TrainerConfig,
        total_updates: int,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        """`module`: what is trained, around `model`, the Hugging Face model that is exported and published."""
        self._deepspeed = _import_deepspeed()
        self._config = config
        self._total_updates = total_updates
        self._updates = 0
        self._dtype = dtype
        self._model = model
        self._stage = config.stage_for(dist.get_world_size(), dtype == torch.float32)
        if config.gradient_checkpointing:
            # ZeRO-3 frees a parameter between forward and backward, which the non-reentrant kind takes for an error.
            reentrant = self._stage == 3
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        module.train()
        if device == "cpu" and self._stage == 3:
            return_freed()
        numbers = sum(parameter.numel() for parameter in module.parameters())
        # One of DeepSpeed's optimizers prints its memory use while it is built.
        with contextlib.redirect_stdout(io.StringIO()):
            self._engine, *_ = self._deepspeed.initialize(
                model=module, optimizer=_adamw(module, config), config=_settings(config, self._stage, dtype, numbers)
            )
        if self._stage == 0 and dist.get_world_size() == 1:
            self._engine.enable_backward_allreduce = False  # it would copy all gradients, twice
        self.module: nn.Module = self._engine.module
        # Each rank averages what it holds: under ZeRO-3 its partitions, else the whole parameters.
        self._average = [held.float().clone() for held in self._held()] if config.ema_decay else []
        self.device: torch.device = self._engine.device

    @property
    def rank(self) -> int:
        """This process's number in the training group."""
        return dist.get_rank()

    @property
    def updates(self) -> int:
        """Optimizer updates so far, skipped ones included: the position in the learning-rate schedule."""
        return self._updates

    def update(
        self, micro_batches: Sequence[Batch], loss_fn: Callable[[Callable[..., Any], Batch], torch.Tensor]
    ) -> StepResult:
        """One optimizer step on the sum over micro-batches and ranks of `loss_fn(forward, micro_batch)`.

        Every rank passes the same number of micro-batches. `forward` takes the module's arguments. Where a loss or
        the gradient's norm is not finite on any rank, no rank changes a parameter or an optimizer state.
        Raises ValueError without micro-batches.
        """
        if not micro_batches:
            raise ValueError("an update needs at least one micro-batch, if only an empty one")
        rate = learning_rate(self._config, self._updates, self._total_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for number, micro_batch in enumerate(micro_batches):
            self._engine.set_gradient_accumulation_boundary(number == len(micro_batches) - 1)
            loss = loss_fn(self._engine, micro_batch)
            # An infinite loss may have a finite gradient; NaN times anything tells the other ranks through the norm.
            poison = 1.0 if bool(torch.isfinite(loss)) else math.nan
            # DeepSpeed averages gradients over ranks, and the loss is their sum.
            self._engine.backward(loss * (dist.get_world_size() * poison), scale_wrt_gas=False)
        self._updates += 1
        grad_norm, applied = self._step()
        if not applied:
            logger.warning("update %d skipped: the gradient is not finite", self._updates)
        elif self._average:
            for average, held in zip(self._average, self._held(), strict=True):
                average.lerp_(held.float(), 1.0 - self._config.ema_decay)
        return StepResult(grad_norm, rate, skipped=not applied)

    def _step(self) -> tuple[float, bool]:
        if not _plain(self._stage, self._dtype):
            self._engine.step()
            return float(self._engine.get_global_grad_norm()), self._engine.was_step_applied()
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = _norm(gradients)
        if not math.isfinite(norm):
            self._engine.zero_grad()
            return math.inf, False
        scale = self._config.max_grad_norm / (norm + 1e-6)
        if scale < 1.0:
            for gradient in gradients:
                gradient.mul_(scale)
        self._engine.step()
        return norm, True

    @property
    def gathers(self) -> bool:
        """Whether a whole parameter is only there while it is looked at (ZeRO-3)."""
        return self._stage == 3

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter and saved buffer, tied ones once.

        The tensors are the live ones: copy what must outlast the next update, or, under ZeRO-3, the next item.
        """
        for name, parameter in self._model.named_parameters():
            if self.gathers:
                with self._deepspeed.zero.GatheredParameters([parameter]):
                    yield name, parameter.detach()
            else:
                yield name, parameter.detach()
        saved = self._model.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self._model.named_buffers() if name in saved)

    def _held(self) -> list[torch.Tensor]:
        """What this rank holds of every parameter, live."""
        if self._stage == 3:
            return [getattr(parameter, "ds_tensor").data for parameter in self._model.parameters()]  # noqa: B009
        return [parameter.data for parameter in self._model.parameters()]

    def weight_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, type, whole shape) of everything `named_weights` yields, in its order, without gathering."""
        saved = self._model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if name in saved]
        return [
            # ZeRO-3 leaves a parameter empty and keeps its whole shape beside it.
            (name, tensor.dtype, tuple(getattr(tensor, "ds_shape", tensor.shape)))
            for name, tensor in [*self._model.named_parameters(), *buffers]
        ]

    def save(self, directory: str) -> None:
        """Write everything needed to go on bit by bit: weights, optimizer, schedule position, random state."""
        self._engine.save_checkpoint(directory, tag=_TAG, save_latest=False)
        state = {"updates": torch.tensor([self._updates]), "torch_rng": torch.get_rng_state()}
        state |= {f"average.{number}": average for number, average in enumerate(self._average)}
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state()
        save_file(state, rank_file(directory, dist.get_rank(), dist.get_world_size()))
        dist.barrier()

    def load(self, directory: str) -> int:
        """Take up what `save` wrote, with the same ZeRO stage; returns the number of ranks that wrote it.

        What another number of ranks wrote is laid anew: every rank reads what it will hold from all of their files.
        The same number goes on bit by bit. The files are unpickled: load only what you wrote yourself and have
        verified. Raises FileNotFoundError where a file is missing, ValueError for one that cannot be read or holds
        something else, in both cases before anything is changed where states are laid anew.
        """
        files = rank_files(directory)
        anew = len(files) != dist.get_world_size()
        # All ranks start from one seed: one that was not there goes on with the random state of one that was.
        own = files[self.rank % len(files)]
        with opened(own) as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if self._average and "average.0" not in state:
            raise ValueError(f"{own} holds no moving average of the weights: ema_decay was 0 when it was written")
        if anew:
            averages = self._relaid_average(files)
        else:
            averages = [state[f"average.{number}"] for number in range(len(self._average))]
        folder = Path(directory) / _TAG
        sharded = any(folder.glob("*_optim_states.pt"))  # without ZeRO every rank holds, and rank 0 wrote, the whole
        if sharded != (self._stage > 0) and self._dtype != torch.float32:
            raise ValueError(
                f"{folder} was written {'with' if sharded else 'without'} ZeRO, and zero_stage says otherwise"
            )
        if sharded != (self._stage > 0) or (sharded and anew):
            self._load_relaid(folder, len(files))
        else:
            path, _ = self._engine.load_checkpoint(directory, tag=_TAG)
            if path is None:
                raise FileNotFoundError(f"{directory} holds no DeepSpeed checkpoint")
        self._updates = int(state["updates"])
        torch.set_rng_state(state["torch_rng"])
        for average, saved in zip(self._average, averages, strict=True):
            average.copy_(saved)
        if "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"])
        return len(files)

    def _load_relaid(self, folder: Path, ranks: int) -> None:
        """Take up the weights, the optimizer and the counters that a group laid out in another way wrote."""
        optimizer, rank, world = self._engine.optimizer, dist.get_rank(), dist.get_world_size()
        of_model = folder / f"{'zero_pp_rank_0_' if self._stage == 3 else ''}mp_rank_00_model_states.pt"
        require(of_model, ranks)
        model, now = self._read(of_model), self._shapes()
        if self._stage == 3:
            keys, cut = ZERO_3, cut_parameters(model["param_shapes"], now, rank, world)
        else:
            keys, cut = ZERO_1_2, cut_groups(now, self._widths(now), rank)
        current = optimizer.state_dict()[keys.adam] if self._stage > 0 else optimizer.state_dict()
        try:
            saved = self._saved(folder, ranks, of_model, model, now)
            state = relaid(saved, keys, cut, current["param_groups"])
        except ValueError as error:
            raise ValueError(f"{folder} cannot be laid anew for {world} rank(s): {error}") from error
        # What follows is what DeepSpeed's own loading does.
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()
        self._engine.load_module_state_dict(model)
        if self._stage == 0:
            optimizer.load_state_dict(unflattened(state[keys.adam], now))
        else:
            optimizer.load_state_dict([state] * world, load_from_fp32_weights=True)
        if self._stage == 3:
            optimizer.checkpoint_event_epilogue()
        self._engine.global_steps = model["global_steps"]
        self._engine.global_samples = model["global_samples"]
        self._engine.skipped_steps = model["skipped_steps"]

    def _saved(self, folder: Path, ranks: int, of_model: Path, model: dict[str, Any], now: Shapes) -> list[State]:
        """What each rank saved of the optimizer, as ZeRO lays it out. `model`: the content of `of_model`."""
        whole = model["optimizer"] is not None
        before = _of_module(model["module"], now) if whole else model["param_shapes"]
        if _all(before) != _all(now):
            raise ValueError(f"{of_model} holds other parameters than the model has")
        if whole:
            return [self._engine.optimizer.state_dict() | flattened(model["optimizer"], model["module"], now)]
        kind = "bf16_" if self._dtype == torch.bfloat16 else ""
        files = [folder / f"{kind}zero_pp_rank_{saved}_mp_rank_00_optim_states.pt" for saved in range(ranks)]
        for file in files:
            require(file, ranks)
        return [self._read(file)["optimizer_state_dict"] for file in files]

    def _shapes(self) -> Shapes:
        """Name and whole shape of every parameter of each of the optimizer's groups, as they follow each other."""
        if self._stage > 0:
            return self._engine._get_zero_param_shapes()
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [{names[p]: tuple(p.shape) for p in group["params"]} for group in self._engine.optimizer.param_groups]

    def _widths(self, shapes: Shapes) -> list[int]:
        """Elements that this rank holds of each group, with ZeRO's padding."""
        if self._stage > 0:
            return [group["params"][0].numel() for group in self._engine.optimizer.param_groups]
        return [sum(map(math.prod, group.values())) for group in shapes]

    def _relaid_average(self, files: Sequence[Path]) -> list[torch.Tensor]:
        """What this rank holds of the moving average that other ranks wrote, read one parameter at a time."""
        with contextlib.ExitStack() as stack:
            handles = [stack.enter_context(opened(file)) for file in files]
            names = [f"average.{number}" for number in range(len(self._average))]
            if self._stage < 3:
                return [handles[0].get_tensor(name) for name in names]
            sizes = [getattr(parameter, "ds_numel") for parameter in self._model.parameters()]  # noqa: B009
            return [
                share([file.get_tensor(name) for file in handles], size, self.rank, average.numel())
                for name, size, average in zip(names, sizes, self._average, strict=False)  # none, or all of them
            ]

    def _read(self, file: Path) -> dict[str, Any]:
        """A file of DeepSpeed's, tensors mapped from disk. Raises ValueError where it cannot be read."""
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        try:
            with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
                return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # torch has no one error for a file that is damaged
            raise ValueError(f"{file} cannot be read: {error}") from error

    def export(self, directory: str, source: str) -> None:
        """Write a Hugging Face folder (safetensors, configuration) with the tokenizer files of the folder `source`."""
        weights = {}
        for name, tensor in self.named_weights():
            if dist.get_rank() == 0:
                weights[name] = tensor.to("cpu", copy=True)
        if dist.get_rank() == 0:
            self._model.save_pretrained(directory, state_dict=weights)
            for file in Path(source).iterdir():
                side_file = file.suffix in {".json", ".jinja", ".txt", ".model", ".py"}
                if side_file and file.name not in _UNCOPIED and not file.name.endswith(".index.json"):
                    shutil.copy(file, directory)
        dist.barrier()

    def export_average(self, directory: str, source: str) -> None:
        """As `export`, with the moving average of the weights. Raises RuntimeError where none is kept."""
        if not self._average:
            raise RuntimeError("no average of the weights is kept (ema_decay is 0)")
        held = self._held()
        trained = [tensor.clone() for tensor in held]
        try:
            for tensor, average in zip(held, self._average, strict=True):
                tensor.copy_(average)
            self.export(directory, source)
        finally:
            for tensor, before in zip(held, trained, strict=True):
                tensor.copy_(before)

    def close(self) -> None:
        """Let go of the engine's memory."""
        self._engine.destroy()


def _all(groups: Sequence[Mapping[str, Sequence[int]]]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter, in the order they are flattened in."""
    return [(name, tuple(shape)) for group in groups for name, shape in group.items()]


def _plain(stage: int, dtype: torch.dtype) -> bool:
    """The one case in which DeepSpeed neither reports the gradients' norm nor looks whether it is finite."""
    return stage == 0 and dtype == torch.float32


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    """Norm of all of them together, summed in double in pieces that fit a cache: a copy of a whole one would not."""
    pieces = (piece for gradient in gradients for piece in gradient.flatten().split(_NORM_PIECE))
    norms = [torch.linalg.vector_norm(piece, dtype=torch.double) for piece in pieces]
    return float(torch.stack(norms).norm())


def _of_module(module: Mapping[str, torch.Tensor], names: Shapes) -> Shapes:
    """The shapes that a whole module's tensors have, as far as it has them."""
    return [{name: tuple(module[name].shape) for name in group if name in module} for group in names]


def _adamw(module: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """torch's own AdamW, which compiles nothing; vectors (norm weights, biases) are not decayed."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        fused=True,
    )


def _settings(config: TrainerConfig, stage: int, dtype: torch.dtype, numbers: int) -> dict[str, Any]:
    """The DeepSpeed configuration for a module of so many numbers, which no bucket need be larger than.

    Gradients of several micro-batches add up in float32 from ZeRO-1 on. In plain float32 the engine clips them itself.
    """
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(REDUCE_BUCKET, numbers)}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if _plain(stage, dtype) else config.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    if dtype == torch.bfloat16 and stage > 0:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings
