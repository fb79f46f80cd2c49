"""float32 linear layers on the CPU with oneDNN, if torch's default library is slow.

torch multiplies float32 matrices with MKL, which uses AVX-512 on Intel processors only. oneDNN, which ships with torch
and is used for bfloat16, uses it on all.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_CPUINFO = Path("/proc/cpuinfo")


class _Linear(torch.autograd.Function):
    """[..., in] @ [out, in]^T + [out], and its derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return product(input, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        grad = grads[0].flatten(0, -2)
        return (
            linear(grads[0], weight.t(), None) if of_input else None,
            linear(grad.t(), input.flatten(0, -2).t(), None) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """`nn.Linear` that multiplies with oneDNN on the CPU; the result differs only by the order of summation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias) if input.is_cpu else super().forward(input)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of float32 on the CPU by oneDNN, with its gradients."""
    result: torch.Tensor = _Linear.apply(input, weight, bias)
    return result


def use_onednn(model: nn.Module) -> None:
    """Make the model's float32 linear layers use oneDNN on the CPU if that is faster, with their names and weights."""
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            module.__class__ = OneDnnLinear


@cache
def onednn_is_faster(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether torch uses MKL for float32 on a processor whose AVX-512 MKL does not use."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpuinfo.is_file()
        and "GenuineIntel" not in cpuinfo.read_text()
    )


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., in] @ [out, in]^T + [out]: torch's name for oneDNN's product without a fused operation.

    A single row is multiplied twice: oneDNN sums the only row of a product in another order, and the result of a token
    would differ in its last bits with the number of tokens that are computed with it.
    """
    if not input.numel():  # a chunk without response tokens; oneDNN does not support empty inputs
        return F.linear(input, weight, bias)
    if input.numel() == input.shape[-1]:
        return product(torch.stack((input, input)), weight, bias)[0]
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt: the most memory free at the end of the heap, and the least size of blocks that are
allocated with mmap, and returned when freed."""
_KEPT_END, _LARGE = 2**25, 2**23


def return_large() -> None:
    """Make glibc return the memory of freed tensors of 8 MiB or more at once, and keep smaller ones: a kept block is
    not zeroed again page by page. By default it returns the end of its heap sooner and keeps blocks of up to 32
    MiB, which leave gaps; keeping all lets a process grow without limit (docs/explanation/profiles.md)."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_END)
