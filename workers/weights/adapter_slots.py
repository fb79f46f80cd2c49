"""Whether the memory that an engine multiplies with holds exactly the adapters of a version.

vLLM reports nothing if an adapter's layer has no place in the engine, if an adapter is dropped, or if the buffers
of its layers hold something else. So they are read back and compared with the published adapters, number for number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_LISTED = 3
_ROUNDING = 0.02
"""Relative, of a product in bfloat16."""


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer as it was published."""

    a: torch.Tensor
    """[rank, inputs]."""
    b: torch.Tensor
    """[outputs, rank]."""


def missing_parts(adapters: Mapping[str, Mapping[str, torch.Tensor]], rank: int) -> str:
    """What the tensors `a` and `b` of each layer of a version of this rank lack, or empty if nothing."""
    if not adapters:
        return "the version has no adapter"
    for layer, parts in adapters.items():
        if set(parts) != {"a", "b"}:
            return f"the version has only lora_{next(iter(parts)).upper()} of {layer}"
        ranks = parts["a"].shape[0], parts["b"].shape[1]
        if ranks != (rank, rank):
            return f"the adapter of {layer} has rank {' and '.join(map(str, sorted(set(ranks))))}, not {rank}"
    return ""


def slot_problem(
    layers: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]],
    adapters: Mapping[str, LayerAdapter],
    slot: int,
    scaling: float,
) -> str:
    """Differences between a slot of vLLM's layers and a version's adapters, or empty. `packed`: layers that a layer
    of vLLM multiplies together; it keeps B multiplied with the factor of B A."""
    parts = {name: packed.get(name) or (name,) for name in layers}
    if homeless := sorted(set(adapters) - {part for own in parts.values() for part in own}):
        return f"the engine has no layer for the adapter of {_some(homeless)}"
    for name, layer in layers.items():
        expected = _share(layer, [adapters.get(part) for part in parts[name]])
        for number, (part, own) in enumerate(zip(parts[name], expected, strict=True)):
            a, b = (_memory(of, number, slot) for of in (layer.lora_a_stacked, layer.lora_b_stacked))
            if problem := _difference(part, a, b, own, scaling):
                return problem
    return ""


def _share(layer: Any, adapters: Sequence[LayerAdapter | None]) -> Sequence[LayerAdapter | None]:
    """One engine rank's share of a layer's adapters: vLLM divides them as it divides the layer's weights."""
    present = [one for one in adapters if one is not None]
    if not present or layer.tp_size == 1:
        return adapters
    if len(adapters) == 1:
        return [LayerAdapter(layer.slice_lora_a(present[0].a), layer.slice_lora_b(present[0].b))]
    a = layer.slice_lora_a([one and one.a for one in adapters])
    b = layer.slice_lora_b([one and one.b for one in adapters])
    return [None if one is None else LayerAdapter(*own) for one, *own in zip(adapters, a, b, strict=True)]


def _memory(stacked: torch.Tensor | Sequence[torch.Tensor], number: int, slot: int) -> torch.Tensor:
    """Memory of one factor of an adapter; embeddings and output heads have one tensor and other shapes."""
    memory = (stacked if isinstance(stacked, torch.Tensor) else stacked[number])[slot]
    return memory[0] if memory.dim() == 3 else memory


def _difference(name: str, a: torch.Tensor, b: torch.Tensor, expected: LayerAdapter | None, scaling: float) -> str:
    """Difference between the memory of one layer and its adapter, as text."""
    if expected is None:
        return f"the engine has an adapter of {name}, and the version has none" if bool(b.any()) else ""
    scaled = expected.b.to(b.dtype).clone()
    if scaling != 1.0:
        scaled *= scaling
    if _holds(a, expected.a) and _holds(b, scaled):
        return ""
    if not (a.any() or b.any()):
        return f"the engine holds no adapter of {name}"
    if _holds(a, expected.a) and _proportional(b, scaled):
        return f"the engine scales the adapter of {name} otherwise"
    return f"the engine holds another adapter of {name}"


def _holds(memory: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether memory has the tensor in its corner, and zeros elsewhere."""
    rows, columns = tensor.shape
    if memory.shape[0] < rows or memory.shape[1] < columns:
        return False
    expected = torch.zeros_like(memory, device="cpu")
    expected[:rows, :columns] = tensor.to(memory.dtype)
    return torch.equal(memory.cpu(), expected)


def _proportional(memory: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether memory is a multiple of the tensor, to rounding."""
    rows, columns = tensor.shape
    found, expected = memory[:rows, :columns].cpu().double(), tensor.double()
    if found.shape != expected.shape or not expected.any():
        return False
    factor = float((found * expected).sum() / expected.square().sum())
    other = factor != 0.0 and abs(factor - 1.0) > _ROUNDING
    return other and bool(torch.allclose(found, factor * expected, rtol=_ROUNDING, atol=1e-12))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
