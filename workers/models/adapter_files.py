"""Adapters in peft's folder and in a published version: read, verified, and added to the weights of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from troupe.workers.contract.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_DIGEST,
    parse_settings,
    scaling,
    unsupported_setting,
)
from troupe.workers.models.digests import base_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
"""What peft puts before a parameter's name in a file."""
DESCRIPTION = "adapter"
"""Name of the description among the tensors of a version."""


@dataclass(frozen=True)
class Description:
    """What the tensors of a version mean."""

    base: str
    """Digest of the files of the model below (`troupe.workers.models.digests`)."""
    config: Mapping[str, Any]
    """Contents of peft's `adapter_config.json`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Description:
        """The description in a tensor that `as_bytes` made."""
        return cls(**json.loads(as_text(tensor)))


def as_bytes(text: str) -> torch.Tensor:
    """A text as a tensor, uint8 [bytes]."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def as_text(tensor: torch.Tensor) -> str:
    """The text in a tensor that `as_bytes` made."""
    return bytes(tensor.tolist()).decode()


@dataclass(frozen=True)
class AdapterFolder:
    """What a folder of peft holds."""

    path: Path
    config: Mapping[str, Any]
    """Contents of `adapter_config.json`."""
    tensors: Mapping[str, torch.Tensor]
    """By their names in the file, `base_model.model.NAME.lora_A.weight`."""
    base: str
    """Digest of the model below (`troupe.workers.models.digests`); empty if the file has none."""

    def require_base(self, model: str | Path) -> None:
        """Raises ValueError if the adapter was trained on a different model from the one in this folder."""
        if self.base and self.base != (found := base_digest(model)):
            raise ValueError(
                f"{model} is not the model that the adapter {self.path} was trained on: digest {self.base}, now {found}"
            )


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read peft's folder of an adapter. Raises OSError, and ValueError for what is not supported."""
    path = Path(folder)
    try:
        config = parse_settings((path / ADAPTER_CONFIG).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path / ADAPTER_CONFIG} {error}") from None
    if wrong := unsupported_setting(config):
        raise ValueError(f"{path}: {wrong}")
    with safe_open(path / ADAPTER_WEIGHTS, "pt") as file:
        base = (file.metadata() or {}).get(BASE_DIGEST, "")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return AdapterFolder(path, config, tensors, base)


@torch.no_grad()
def add_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> int:
    """Add an adapter to the weights of a model in place, in float32 before rounding once; what was trained whole
    replaces the model's. Returns the number of adapted layers. Raises ValueError if a layer or tensor is missing."""
    weights, parts = dict(model.named_parameters()), dict(adapter.tensors)
    factor, layers = scaling(adapter.config), 0
    for name in adapter.tensors:
        layer, found, part = name.removeprefix(PREFIX).rpartition(".lora_")
        if not found:
            _weight(model, weights, name.removeprefix(PREFIX)).copy_(parts.pop(name))
        elif part == "A.weight":
            a, b = parts.pop(name), parts.pop(f"{PREFIX}{layer}.lora_B.weight", None)
            if b is None:
                raise ValueError(f"{adapter.path} has only lora_A of {layer}")
            weight = _weight(model, weights, f"{layer}.weight")
            weight.copy_(weight.float() + factor * (b.float() @ a.float()))
            layers += 1
    if parts:
        raise ValueError(f"{adapter.path} has tensors that fit no linear layer: {min(parts)}")
    return layers


def _weight(model: PreTrainedModel, weights: Mapping[str, torch.nn.Parameter], name: str) -> torch.Tensor:
    if name not in weights:
        raise ValueError(f"{type(model).__name__} has no layer {name.rpartition('.')[0]}")
    return weights[name]
