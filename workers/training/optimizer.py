"""AdamW, its learning-rate schedule, the loss scale of float16, and the DeepSpeed configuration around them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from troupe.workers.contract.config import REDUCE_BUCKET
from troupe.workers.contract.trainer_config import OptimizerConfig, TrainerConfig
from troupe.workers.models.partitioned import whole_shape

INITIAL_SCALE = 2.0**16
_HIGHEST = 2.0**24
"""Gradients of 0 never overflow, and would let the scale rise until it is infinite."""
_GROWS_AFTER = 1000
"""Updates in a row without an overflow after which the scale doubles, as in DeepSpeed."""
_PIECE = 2**18
"""Elements of a gradient whose squares are summed at a time."""


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Learning rate of optimizer update `update`, from 0: it rises linearly to the peak at the last warm-up update;
    then the schedule falls from the peak to `min_lr_ratio` of it at update `total_updates` - 1, and stays."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    span = total_updates - 1 - config.warmup_updates
    progress = min(1.0, (update - config.warmup_updates) / span) if span > 0 else 0.0
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def adamw(module: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """torch's AdamW, without compilation; vectors are not decayed. Its rate is 0 until an update sets it: DeepSpeed
    steps some optimizers once while it wraps them."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if len(whole_shape(p)) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.0, betas=config.adam_betas, eps=config.adam_eps, fused=True
    )


def deepspeed_config(config: TrainerConfig, stage: int, dtype: torch.dtype, numbers: int) -> dict[str, Any]:
    """The DeepSpeed configuration; `numbers` bound the bucket. From ZeRO-1 on gradients add up in float32."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(REDUCE_BUCKET, numbers)}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if engine_clips(stage, dtype) else config.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        # A gradient is added to its float32 sum, and freed, as soon as the backward pass has computed it.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        # A scale other than 0 is fixed to DeepSpeed; `TrainEngine` sets it before every update.
        "fp16": {"enabled": dtype == torch.float16, "loss_scale": INITIAL_SCALE},
    }
    if dtype != torch.float32 and stage > 0:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


@dataclass
class LossScale:
    """A dynamic loss scale (mixed precision training, arXiv 1710.03740, sec. 3.2), a power of two, by which
    DeepSpeed multiplies the loss and divides the gradients. It changes between updates only: DeepSpeed's own
    doubles in the middle of a step, whose gradients are then divided by twice what they were multiplied by."""

    value: float = INITIAL_SCALE
    """The scale of one rank."""
    finite: int = 0
    """Updates in a row without an overflow since the last change."""

    def for_ranks(self, ranks: int) -> float:
        """The scale of so many ranks: DeepSpeed averages gradients, so the loss is multiplied by the ranks besides.
        With one rank's scale, the first gradients of many would overflow."""
        return self.value / 2 ** (ranks - 1).bit_length()

    def overflows(self, skipped: bool) -> bool:
        """Record an update; returns whether a gradient that is not finite is an overflow (never at a scale of 1)."""
        overflowed = skipped and self.value > 1.0
        if skipped:
            self.value, self.finite = max(self.value / 2.0, 1.0), 0
        elif (finite := self.finite + 1) < _GROWS_AFTER:
            self.finite = finite
        else:
            self.value, self.finite = min(self.value * 2.0, _HIGHEST), 0
        return overflowed

    def state(self) -> torch.Tensor:
        """The scale for a checkpoint, float64 [2]."""
        return torch.tensor([self.value, float(self.finite)], dtype=torch.double)

    def restore(self, state: torch.Tensor) -> None:
        """Take over the scale of a checkpoint."""
        self.value, self.finite = float(state[0]), int(state[1])


def engine_clips(stage: int, dtype: torch.dtype) -> bool:
    """Whether `TrainEngine` clips gradients: here DeepSpeed neither reports their norm nor checks that it is finite."""
    return stage == 0 and dtype == torch.float32


def pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The elements in pieces that fit a cache, to be summed in float64: a float64 copy of all of them would not."""
    return tensor.flatten().split(_PIECE)


def gradient_norm(gradients: Sequence[torch.Tensor]) -> float:
    """Global norm of the gradients, in float64."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.double) for gradient in gradients for part in pieces(gradient)]
    return float(torch.stack(norms).norm())
