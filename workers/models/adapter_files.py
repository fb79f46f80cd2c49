"""Adapters in peft's folder and in a published version: read, verified, and added to the weights of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from troupe.workers.contract.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_DIGEST,
    parse_settings,
    scaling,
    unsupported_setting,
)
from troupe.workers.models.cpu import use_onednn
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
    weights, factor = dict(model.named_parameters()), scaling(adapter.config)
    factors, whole = _factors(adapter)
    for name, tensor in whole.items():
        _weight(model, weights, name).copy_(tensor)
    for layer, (a, b) in factors.items():
        weight = _weight(model, weights, f"{layer}.weight")
        weight.copy_(weight.float() + factor * (b.float() @ a.float()))
    return len(factors)


class AdapterBeside:
    """A frozen adapter that is computed beside the layers of a model, whose weights and modules stay as they are."""

    def __init__(self, model: PreTrainedModel, adapter: AdapterFolder) -> None:
        """Add nothing yet. The model may train other adapters. Raises ValueError if a layer or tensor is missing,
        if one has another shape, or if the adapter has a module that was trained whole."""
        factors, whole = _factors(adapter)
        if whole:
            raise ValueError(f"{adapter.path} has a module that was trained whole: {min(whole)}")
        self._model, self._scaling = model, scaling(adapter.config)
        modules = dict(model.named_modules())
        self._parts: list[tuple[nn.Module, nn.Sequential]] = []
        for layer, (a, b) in factors.items():
            inputs, outputs = (getattr(modules.get(layer), name, None) for name in ("in_features", "out_features"))
            if (inputs, outputs) != (a.shape[1], b.shape[0]):
                shape = f"{a.shape[1]} to {b.shape[0]}"
                raise ValueError(f"{adapter.path} does not fit {type(model).__name__}: {layer} is not linear, {shape}")
            self._parts.append((modules[layer], nn.Sequential(_linear(a), _linear(b))))

    @contextmanager
    def added(self) -> Iterator[None]:
        """Inside the block the layers return W x + B (scaling A x)."""
        with ExitStack() as stack:
            for layer, part in self._parts:
                use_onednn(part.to(self._model.device, self._model.dtype))
                stack.callback(layer.register_forward_hook(partial(self._add, part)).remove)
            yield

    def _add(
        self, part: nn.Sequential, _: nn.Module, inputs: tuple[torch.Tensor], result: torch.Tensor
    ) -> torch.Tensor:
        a, b = part
        return result + b(a(inputs[0]) * self._scaling)


def _linear(weight: torch.Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _factors(adapter: AdapterFolder) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """((A, B) by layer, tensors of what was trained whole by name), by the model's names. Raises ValueError if a tensor
    is missing or fits no layer."""
    parts, factors, whole = dict(adapter.tensors), dict[str, tuple[torch.Tensor, torch.Tensor]](), {}
    for name in adapter.tensors:
        layer, found, part = name.removeprefix(PREFIX).rpartition(".lora_")
        if not found:
            whole[name.removeprefix(PREFIX)] = parts.pop(name)
        elif part == "A.weight":
            a, b = parts.pop(name), parts.pop(f"{PREFIX}{layer}.lora_B.weight", None)
            if b is None:
                raise ValueError(f"{adapter.path} has only lora_A of {layer}")
            factors[layer] = a, b
    if parts:
        raise ValueError(f"{adapter.path} has tensors that fit no linear layer: {min(parts)}")
    return factors, whole


def _weight(model: PreTrainedModel, weights: Mapping[str, torch.nn.Parameter], name: str) -> torch.Tensor:
    if name not in weights:
        raise ValueError(f"{type(model).__name__} has no layer {name.rpartition('.')[0]}")
    return weights[name]
