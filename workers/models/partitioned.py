"""Models whose parameters are partitioned over the ranks of their group (ZeRO-3), each rank holding a part of each.

Such a model runs under DeepSpeed only, on all ranks at once. What it can do is tried out on a proxy (`proxy.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Partitioner(Protocol):
    """Partitions a model while it is loaded, so that no rank ever holds all of it. Every method is collective."""

    def reading(self, folder: str, vocabulary: int) -> AbstractContextManager[None]:
        """Partition every parameter that transformers reads inside the block at once, but embeddings and output
        heads (`vocabulary` rows) in `finish`: transformers compares them to find out whether they are tied."""
        ...

    def finish(self, model: PreTrainedModel) -> None:
        """Partition the remaining parameters, and move the buffers to the device of the rank."""
        ...


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed has partitioned the parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a parameter or buffer; a partitioned parameter is itself empty."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
