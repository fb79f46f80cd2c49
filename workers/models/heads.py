"""Output heads that compute in float32 with weights in bfloat16: of values, and of logits over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from troupe.workers.models.cpu import onednn_is_faster, product

_BLOCK_NUMBERS = 2**22
"""Numbers of the weight that are held in float32 at a time: 16 MiB. Smaller and larger blocks are not faster."""


class Float32Head(nn.Linear):
    """A linear layer that multiplies in float32 whatever the type of its weights: values need the precision."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., out_features] of [..., in_features]."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class Float32Logits(nn.Linear):
    """An output head in bfloat16 whose products are summed and kept in float32.

    A logit of 16 to 32 has neighbours 0.125 apart in bfloat16. The head's weight is the largest of a model: in float32
    it exists in blocks only. Gradients are multiplied in bfloat16, like those of every other layer.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., out_features] of bfloat16 [..., in_features]."""
        logits: torch.Tensor = _Product.apply(input, self.weight)
        return logits if self.bias is None else logits + self.bias.float()


class _Product(torch.autograd.Function):
    """float32 [..., in] @ [out, in]^T of bfloat16 factors."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        rows = input.flatten(0, -2)
        if input.is_cuda:
            found = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            found = torch.empty(len(rows), len(weight))
            size = max(1, _BLOCK_NUMBERS // weight.shape[1])
            for columns, block in zip(found.split(size, -1), weight.split(size), strict=True):
                columns.copy_(_multiply()(rows.float(), block.float(), None))
        return found.view(*input.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight = ctx.needs_input_grad
        grad = grads[0].to(weight.dtype)
        return (
            grad @ weight if of_input else None,
            grad.flatten(0, -2).t() @ input.flatten(0, -2) if of_weight else None,
        )


@cache
def _multiply() -> Callable[..., torch.Tensor]:
    """The faster of torch's two ways to multiply float32 matrices on this CPU."""
    return product if onednn_is_faster() else F.linear
