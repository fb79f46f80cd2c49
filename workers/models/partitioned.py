"""Models whose parameters are partitioned over the ranks of their group (ZeRO-3), each rank holding a part of each.

Such a model runs under DeepSpeed only, on all ranks at once. What a model can do is tried out on a small copy instead.
"""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from troupe.workers.contract.config import Device
from troupe.workers.models.dropout import disable_dropout
from troupe.workers.models.small_copy import VOCABULARY, randomize, small_copies

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)


class Partitioner(Protocol):
    """Partitions a model while it is loaded, so that no rank ever holds all of it. Every method is collective."""

    def reading(self, folder: str, vocabulary: int) -> AbstractContextManager[None]:
        """Partition every parameter that transformers reads inside the block as soon as it is read.

        Args:
            folder: Folder of the model.
            vocabulary: Rows of the model's embeddings. Embeddings and output heads stay whole until `finish`:
                transformers compares them to find out whether they are tied.
        """
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


def runnable(model: PreTrainedModel, small: bool = False, device: Device | None = None) -> PreTrainedModel | None:
    """A model to try out what this one can do: the model itself, or a small copy of it if it is partitioned or will
    run on another device, where its kernels are others and a large model is fast.

    A copy is of the same class, type and attention, has random weights and is on the model's target device;
    windows of its attention are short. If no copy can be built and run, the result is the model itself, or None if that
    is partitioned: the caller then assumes the least.

    Args:
        model: The model.
        small: Whether a copy is preferred in any case. A copy amplifies rounding little: in bfloat16 two ways to
            compute the states of a trained model can differ by more than their length, if its tokens are rare.
        device: Where the model will run, or None if it stays.
    """
    whole = not any(is_partitioned(parameter) for parameter in model.parameters())
    elsewhere = device is not None and device != model.device.type
    if whole and not small and not elsewhere:
        return model
    place = torch.device(device) if device is not None and elsewhere else model.device
    config = model.config
    if config.get_text_config() is config and hasattr(config, "num_attention_heads"):
        for smaller in small_copies(config):
            try:
                return _copy(model, smaller, place)
            except Exception as error:  # an architecture may refuse the sizes in any way
                logger.info("no small copy of %s: %s", type(model).__name__, error)
    if whole:
        return model
    logger.warning("%s is not tried out, as it has no small copy: it is assumed to do the least", type(model).__name__)
    return None


def _copy(model: PreTrainedModel, small: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # all ranks must come to the same result
        tried: PreTrainedModel = type(model)._from_config(
            copy.deepcopy(small), dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
        randomize(tried)
        disable_dropout(tried)
        nn.Module.to(tried.eval(), device)
        tried.base_model(input_ids=torch.arange(VOCABULARY // 2, device=device)[None], use_cache=False)
    return tried
