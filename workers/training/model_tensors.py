"""The tensors of a trained model by their Hugging Face names, wherever the ranks hold them.

ZeRO-3 leaves a part of every parameter on each rank. Expert parallelism (DeepSpeed's AutoEP) also replaces each block
of experts by a layer whose parameters have other names and hold one rank's experts only. Engines load, and exports
contain, the tensors of the Hugging Face model: they are assembled here, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from troupe.workers.contract.trainer_config import EXPERT_FAMILIES
from troupe.workers.models.partitioned import whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and whole shape of every parameter of a model by name, tied ones once."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of a model under its Hugging Face name, and what holds it on this rank."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[torch.Tensor, ...]
    """One parameter or buffer; of divided experts, projections that follow each other in dimension 1."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other experts, in the experts' order; None unless experts are divided."""

    @contextmanager
    def gathered(self) -> Iterator[torch.Tensor]:
        """The whole tensor in the block, on every rank; live unless experts are divided. Collective under ZeRO-3."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(self.held):
            if self.group is None:
                yield self.held[0].detach()
                return
            own = torch.cat([part.detach() for part in self.held], dim=1)
        whole = own.new_empty(self.shape)
        dist.all_gather_into_tensor(whole, own, group=self.group)
        yield whole


def undivided(name: str, tensor: torch.Tensor) -> ModelTensor:
    """A tensor that one parameter, partitioned or not, or one buffer holds."""
    return ModelTensor(name, tensor.dtype, whole_shape(tensor), (tensor,))


def layout_of(model: nn.Module) -> Layout:
    """The layout of the model's parameters, before DeepSpeed replaces layers."""
    return {name: (parameter.dtype, whole_shape(parameter)) for name, parameter in model.named_parameters()}


def model_tensors(model: PreTrainedModel, layout: Layout) -> list[ModelTensor]:
    """The parameters of `layout`, in its order, and the saved buffers, as this rank holds them now. Raises ValueError
    if DeepSpeed has replaced a layer whose parameters cannot be assigned to them one to one."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    divided = [(f"{path}.", layer) for path, layer in model.named_modules() if isinstance(layer, AutoEPMoELayer)]
    prefixes = tuple(prefix for prefix, _ in divided)
    named = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(prefixes)]
    tensors = {name: undivided(name, parameter) for name, parameter in named}
    for prefix, layer in divided:
        tensors |= {tensor.name: tensor for tensor in _layer_tensors(prefix, layer)}
    if {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} != layout:
        changed = sorted(layout.keys() ^ tensors.keys()) or ["their shapes"]
        raise ValueError(f"expert_parallel_size: the layers of {type(model).__name__} have others of {changed[0]}")
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return [
        *(tensors[name] for name in layout),
        *(undivided(name, buffer) for name, buffer in buffers),
    ]


def _layer_tensors(prefix: str, layer: Any) -> Iterator[ModelTensor]:
    """The Hugging Face tensors of one of AutoEP's layers, by the names from which AutoEP took them."""
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset

    preset, experts = get_preset(layer.model_family), layer.experts
    names = {
        "router.gate.": f"{preset.router_pattern}.",
        "shared_experts.": f"{preset.shared_experts_pattern}.",
        "shared_experts_gate.": f"{preset.shared_experts_gate_pattern}.",
    }
    for place, source in names.items():
        for name, parameter in layer.named_parameters():
            if name.startswith(place):
                yield undivided(prefix + source + name.removeprefix(place), parameter)
    fused = {preset.expert_w1: (experts.w1, experts.w3), preset.expert_w2: (experts.w2,)}
    for name, held in fused.items():
        first, rows = whole_shape(held[0]), sum(whole_shape(part)[1] for part in held)
        shape = (first[0] * layer.ep_size, rows, *first[2:])
        yield ModelTensor(f"{prefix}{preset.experts_pattern}.{name}", held[0].dtype, shape, held, layer.ep_group)


def divide_experts(model: PreTrainedModel, module: Any, size: int) -> dict[str, Any]:
    """Settings by which DeepSpeed divides the experts of each of a model's blocks among `size` adjacent ranks, when it
    gets `module` around the model. Raises ValueError if the model's family is not known to be computed alike."""
    from deepspeed.module_inject.auto_ep_presets.registry import get_preset, preset_name_for_hf_model_type

    config = model.config.get_text_config()
    family = preset_name_for_hf_model_type(config.model_type)
    if family is None or config.model_type not in EXPERT_FAMILIES:
        known = ", ".join(EXPERT_FAMILIES)
        raise ValueError(f"expert_parallel_size: models of type {config.model_type} are not supported, only {known}")
    module.config = config  # AutoEP reads the family from it, and how the model routes its tokens
    pattern = rf"(.+\.)?{get_preset(family).moe_layer_pattern}"
    # torch's grouped product is for bfloat16 on GPUs.
    grouped = model.device.type == "cuda" and model.dtype == torch.bfloat16
    return {
        "expert_parallel": {
            "enabled": True,
            "autoep_size": size,
            "moe_layer_pattern": pattern,
            "use_grouped_mm": grouped,
        }
    }
