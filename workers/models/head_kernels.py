"""The output head's log-probs on a GPU: Triton kernels that read every tile of logits once, forward and backward.

`heads.token_logprobs` imports them only if tensors are on a GPU. Tests run them in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from troupe.workers.contract.config import GPU_TILE_COLUMNS, LOWEST_LOGIT

_BLOCK = 2048
"""Columns that a program holds at a time."""
_WARPS = 8


@triton.jit
def accumulate_rows(logits, columns, factor, targets, start, highest, total, weighted, chosen, BLOCK: tl.constexpr):
    """Add a tile of logits [T, columns] to the sums of one row; see `sums`."""
    row = tl.program_id(0).to(tl.int64)
    peak, power_sum, weighted_sum = tl.load(highest + row), tl.load(total + row), tl.load(weighted + row)
    target = tl.load(targets + row) - start
    if (target >= 0) & (target < columns):
        tl.store(chosen + row, tl.load(logits + row * columns + target) * factor)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        tile = tl.load(logits + row * columns + at, mask=inside, other=float("-inf")) * factor
        before, peak = peak, tl.maximum(peak, tl.max(tile, 0))
        shifted = tile - peak
        powers = tl.exp(shifted)
        change = before - peak
        scale = tl.exp(change)
        products = tl.where(inside, shifted * powers, 0.0)
        weighted_sum = (weighted_sum + change * power_sum) * scale + tl.sum(products, 0)
        power_sum = power_sum * scale + tl.sum(powers, 0)
    tl.store(highest + row, peak)
    tl.store(total + row, power_sum)
    tl.store(weighted + row, weighted_sum)


@triton.jit
def differentiate_rows(
    logits, columns, factor, targets, start, log_sums, entropies, of_logprob, of_entropy, gradient,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient by one block of a row's logits; see `gradients`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    own = tl.load(of_logprob + row)
    shifted = tl.load(logits + row * columns + at, mask=inside, other=float("-inf")) * factor - tl.load(log_sums + row)
    powers = tl.exp(shifted)
    found = -own * powers
    if ENTROPY:
        found -= tl.load(of_entropy + row) * powers * (shifted + tl.load(entropies + row))
    found += tl.where(at == tl.load(targets + row) - start, own, 0.0)
    tl.store(gradient + row * columns + at, found.to(gradient.dtype.element_ty), mask=inside)


def sums(
    input: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor, factor: float
) -> tuple[torch.Tensor, ...]:
    """float32 [T] each, over the vocabulary, for logits z of `factor` * input [T, in] @ weight [V, in]^T, or `factor` *
    input [T, V] without a weight: the highest z, the sums of exp(z - highest) and of (z - highest) exp(z - highest),
    and the targets' logits."""
    highest, total, weighted, chosen = torch.zeros(4, len(input), device=input.device).unbind()
    highest.fill_(LOWEST_LOGIT)
    for start, logits in _tiles(input, weight):
        accumulate_rows[(len(logits),)](
            logits, logits.shape[1], factor, targets, start, highest, total, weighted, chosen,
            BLOCK=_BLOCK,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]: Triton reads it
        )  # fmt: skip
    return highest, total, weighted, chosen


def gradients(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    factor: float,
    log_sums: torch.Tensor,
    entropies: torch.Tensor,
    of_logprob: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(columns, gradient by their logits before `factor`, in the type of the weight) of each tile, overwritten by
    the next. `of_logprob`, `of_entropy` (or None): float32 [T], times `factor`."""
    most = input.numel() if weight is None else len(input) * min(GPU_TILE_COLUMNS, len(weight))
    found = (input if weight is None else weight).new_empty(most)
    for start, logits in _tiles(input, weight):
        (rows, columns), grad = logits.shape, found[: logits.numel()].view(logits.shape)
        differentiate_rows[(rows, triton.cdiv(columns, _BLOCK))](
            logits, columns, factor, targets, start, log_sums, entropies, of_logprob,
            of_logprob if of_entropy is None else of_entropy, grad,
            ENTROPY=of_entropy is not None, BLOCK=_BLOCK,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]: Triton reads it
        )  # fmt: skip
        yield slice(start, start + columns), grad


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right, summed in float32; rounded once to the type of `out`, if it is given."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    if out is not None and out.dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    found = torch.mm(left, right, out_dtype=torch.float32)
    return found if out is None else out.copy_(found)


def add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to float32 `into`, without another tensor of its size."""
    if left.dtype == torch.float32:
        into.addmm_(left, right)
    else:
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)


def _tiles(input: torch.Tensor, weight: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, float32 [T, columns]) of input @ weight^T, each overwritten by the next; none without rows. Logits
    without a weight are a tile."""
    if not len(input):
        return
    if weight is None:
        yield 0, input.contiguous()
        return
    found = torch.empty(len(input) * min(GPU_TILE_COLUMNS, len(weight)), device=input.device)
    for start in range(0, len(weight), GPU_TILE_COLUMNS):
        part = weight[start : start + GPU_TILE_COLUMNS]
        yield start, product(input, part.t(), out=found[: len(input) * len(part)].view(len(input), len(part)))
