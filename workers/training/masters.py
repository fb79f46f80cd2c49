"""The weights that the optimizer changes, in its own precision: their digest, and the whole of them by name.

Under ZeRO each rank holds a part of them. The digest of a rank covers its own part, so that nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import nn

from troupe.workers.models.checksum import checksum

_WORD = 4
"""Bytes of a word of a checksum."""


def masters(engine: Any, stage: int) -> list[torch.Tensor]:
    """This rank's part of the weights, live, as the optimizer of DeepSpeed's `engine` has them."""
    optimizer = engine.optimizer
    if stage == 3:
        return [partition.data for partition in optimizer.fp32_partitioned_groups_flat]
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def own_part(engine: Any, stage: int, rank: int) -> Iterator[torch.Tensor]:
    """The parts of `masters` without the unwritten memory that ZeRO-3 appends to the last shares of a parameter.

    (ZeRO-1 and ZeRO-2 append zeros.)
    """
    flats = masters(engine, stage)
    if stage < 3:
        yield from flats
        return
    for flat, parameters in zip(flats, engine.optimizer.fp16_groups, strict=True):
        start = 0
        for parameter in parameters:
            width = parameter.ds_tensor.ds_numel
            held = min(max(parameter.ds_numel - rank * width, 0), width)
            yield flat[start : start + held]
            start += width


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """xxh3-128 of the bytes of the tensors, one after another; of a GPU's tensors, of two checksums of each.

    A copy to the host, hashed by one thread, took 1.2 s of 1.5 billion weights of an H200, next to an update of 3.2 s.
    The digests of a GPU and of a CPU are not comparable.
    """
    state = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        state.update((flat if flat.device.type == "cpu" else summed(flat).cpu()).numpy().data)
    return state.hexdigest()


def summed(flat: torch.Tensor) -> torch.Tensor:
    """int64 [3], on the device of uint8 [n]: its length, and the checksums of its words (`checksum`).

    Up to three zeros are appended to fill the last word.
    """
    padded = F.pad(flat, (0, -len(flat) % _WORD)) if len(flat) % _WORD or flat.storage_offset() % _WORD else flat
    sums = checksum(padded.view(torch.int32))
    return torch.cat((sums.new_tensor([len(flat)]), sums))


def whole(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every parameter that trains. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param

    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        full = safe_get_full_fp32_param(parameter)
        # Without ZeRO and in float32 the optimizer changes the parameter itself.
        yield name, parameter.detach() if full is None else full.detach()


class HeldStep:
    """This rank's part of the weights before a step. Collective: all ranks hold and shorten together.

    Only the weights move: the optimizer's moments keep what they learnt from the step's gradients.
    """

    def __init__(self, engine: Any, stage: int) -> None:
        """Hold the weights that DeepSpeed's `engine` has now.

        Args:
            engine: DeepSpeed's engine.
            stage: Its ZeRO stage.
        """
        self._engine = engine
        self._stage = stage
        self._before = [master.detach().clone() for master in masters(self._engine, self._stage)]

    @torch.no_grad()
    def shorten(self, factor: float) -> None:
        """Move the weights to before + `factor` * (now - before); 0 restores the held weights bit for bit."""
        for master, before in zip(masters(self._engine, self._stage), self._before, strict=True):
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
        elif self._engine.bfloat16_enabled():
            for masters, rounded in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
                for master, parameter in zip(masters, rounded, strict=True):
                    parameter.data.copy_(master.data)
