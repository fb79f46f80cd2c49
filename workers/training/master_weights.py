"""The master weights: the optimizer's float32 weights. It rounds them to the model's.

Under ZeRO each rank holds a part of them. The digest of a rank covers its own part, so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def master_weights(engine: Any, stage: int) -> list[torch.Tensor]:
    """This rank's part of the weights, live, as the optimizer of DeepSpeed's `engine` has them."""
    optimizer = engine.optimizer
    if stage == 3:
        return [partition.data for partition in optimizer.fp32_partitioned_groups_flat]
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def own_part(engine: Any, stage: int) -> Iterator[torch.Tensor]:
    """The parts of `master_weights` without the unwritten memory that ZeRO-3 appends to last shares (others: zeros)."""
    flats = master_weights(engine, stage)
    if stage < 3:
        yield from flats
        return
    for flat, parameters in zip(flats, engine.optimizer.fp16_groups, strict=True):
        start = 0
        for parameter in parameters:
            width = parameter.ds_tensor.ds_numel
            held = min(max(parameter.ds_numel - parameter.ds_zero_partition_rank * width, 0), width)
            yield flat[start : start + held]
            start += width


class WeightSnapshot:
    """This rank's part of the weights before a step. Collective: all ranks take and shorten it together. Only the
    weights move: the optimizer's moments keep what they learnt from the step's gradients."""

    def __init__(self, engine: Any, stage: int) -> None:
        self._engine = engine
        self._stage = stage
        self._before = [master.detach().clone() for master in master_weights(self._engine, self._stage)]

    @torch.no_grad()
    def shorten(self, factor: float) -> None:
        """Move the weights to before + `factor` * (now - before); 0 restores the weights of before bit for bit."""
        for master, before in zip(master_weights(self._engine, self._stage), self._before, strict=True):
            # Under a factor of 0 a weight that is not finite must not survive as 0 * inf.
            master.copy_(torch.lerp(before, master, factor) if factor else before)
        self._round()

    def _round(self) -> None:
        """Give the model the changed weights in its own precision, with the steps of DeepSpeed's optimizers."""
        optimizer = self._engine.optimizer
        if self._stage == 3:
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_epilogue()  # gathers the small parameters that every rank keeps whole
        elif self._stage > 0:
            optimizer.update_lp_params()
        elif self._engine.bfloat16_enabled() or self._engine.fp16_enabled():
            for masters, rounded in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, parameter in zip(masters, rounded, strict=True):
                    parameter.data.copy_(master.data)
