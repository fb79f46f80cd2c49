"""Linear layers in float32 on the CPU, multiplied by oneDNN where torch's own library is slow.

torch multiplies float32 matrices with MKL, which on processors of other makers than Intel leaves AVX-512 aside. oneDNN,
which torch brings along and uses for bfloat16, does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

_CPUINFO = Path("/proc/cpuinfo")


class _Linear(torch.autograd.Function):
    """[..., in] @ [out, in]^T + [out], and its gradients."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)
        return (
            _product(grads[0], weight.t(), None) if of_input else None,
            _product(grad.t(), input.flatten(0, -2).t(), None) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """`nn.Linear` that multiplies by oneDNN on the CPU. Equal to it but for the order of sums."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of [..., in_features]."""
        if not input.is_cpu:
            return super().forward(input)
        result: torch.Tensor = _Linear.apply(input, self.weight, self.bias)
        return result


def use_onednn(model: nn.Module) -> None:
    """Have the model's linear layers in float32 multiply by oneDNN on the CPU, where that is faster.

    They keep their names and their weights.
    """
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            module.__class__ = OneDnnLinear


def onednn_is_faster(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether torch would multiply float32 with MKL, on a processor whose AVX-512 MKL does not use."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpuinfo.is_file()
        and "GenuineIntel" not in cpuinfo.read_text()
    )


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in] @ [out, in]^T + [out]: torch's name for oneDNN's product with nothing after it."""
    if not input.numel():  # a chunk without a response token; oneDNN has no sum over nothing
        return F.linear(input, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
