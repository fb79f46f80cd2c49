"""Output heads that compute in float32 whatever the type of their weights: of values, and of vocabulary logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from troupe.workers.contract.config import LOWEST_LOGIT
from troupe.workers.models.cpu import linear, onednn_is_faster, product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK_NUMBERS = 2**20
"""Numbers of the weight that `float32_logits` holds in float32 at a time: 4 MiB, which a cache holds."""
_TILE_NUMBERS = 2**21
"""Logits of 1024 tokens that `token_logprobs` holds at a time: 8 MiB, which a cache holds from one operation to the
next."""
_FLOAT32_TILE_COLUMNS = 512
"""Columns of a tile of a float32 weight. Every product is new memory: for 1024 tokens 2 MiB, which the C library has at
hand."""


class Float32Head(nn.Linear):
    """A linear layer of few outputs that multiplies in float32 whatever its weights' type: values need it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """float32 [..., out_features] of [..., in_features]. Every row is summed alone: libraries choose how to sum
        a column by the number of rows, and a value would differ in its last bit with its neighbours."""
        values = (input.float()[..., None, :] * self.weight.float()).sum(-1)
        return values if self.bias is None else values + self.bias.float()


class Float32Logits(nn.Linear):
    """An output head with float32 logits, which never exist all at once if only targets are requested. A bfloat16
    logit of 16 to 32 has neighbours 0.125 apart: logits are summed and kept in float32, the weight converted in
    blocks. Gradients are multiplied in the type of the weight."""

    def forward(
        self, input: torch.Tensor, targets: torch.Tensor | None = None, factor: float = 1.0, entropy_grad: bool = False
    ) -> Any:
        """float32 [..., out_features] of [..., in_features]; with `targets`, and no bias, `token_logprobs` instead.
        Both are a call of the module: under ZeRO-3 its hooks gather the weight."""
        if targets is not None:
            return token_logprobs(input, self.weight, targets, factor, entropy_grad)
        if self.weight.dtype == torch.float32:
            by_onednn = input.is_cpu and onednn_is_faster()
            return (linear if by_onednn else F.linear)(input, self.weight, self.bias)
        logits: torch.Tensor = _Product.apply(input, self.weight)
        return logits if self.bias is None else logits + self.bias.float()


def share_gradient(model: PreTrainedModel) -> None:
    """Adds the gradient of an embedding to the tied head's row by row, not as a tensor of mostly 0."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, nn.Embedding) and isinstance(head, Float32Logits) and embedding.weight is head.weight:
        embedding.sparse = True


class _Product(torch.autograd.Function):
    """float32 [..., in] @ [out, in]^T of 16-bit factors."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        rows = input.flatten(0, -2)
        found = torch.mm(rows, weight.t(), out_dtype=torch.float32) if input.is_cuda else float32_logits(rows, weight)
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


def float32_logits(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, V] = input [T, in] @ weight [V, in]^T of 16-bit factors on the CPU, converted in blocks."""
    rows, found = input.float(), torch.empty(len(input), len(weight))
    size = max(1, _BLOCK_NUMBERS // max(rows.shape))
    block = rows.new_empty(min(size, len(weight)), rows.shape[1])
    for columns, part in zip(found.split(size, -1), weight.split(size), strict=True):
        _multiply_exactly(rows, part, block, columns)
    return found


def token_logprobs(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    factor: float = 1.0,
    entropy_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs of the targets int64 [T], entropies), float32 [T], of softmax(factor * input [T, in] @ weight [V,
    in]^T); if `weight` is None, of softmax(factor * input) of float32 logits [T, V], which are one tile. Otherwise
    logits exist in tiles of some columns only, and again in the backward pass. On the CPU a tile stays in the cache
    until it is done with; on a GPU one kernel reads it once. Sums are rescaled whenever a tile
    has a larger logit (Milakov and Gimelshein, arXiv 1805.02867). The gradient by the weight is summed in float32
    and rounded once."""
    logprobs, entropies = _TokenLogprobs.apply(input, weight, targets, factor, entropy_grad)
    return logprobs, entropies if entropy_grad else entropies.detach()


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`. For p = softmax(z) and H its entropy, the gradient by logit j of the log-prob of token i is
    [i = j] - p_j, and of H it is -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        targets: torch.Tensor,
        factor: float,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums, *_ = _functions(input.device)
        highest, total, weighted, chosen = sums(input, weight, targets, factor)
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(input, weight, targets, highest + log_total, entropies)
        ctx.factor, ctx.entropy_grad = factor, entropy_grad
        return chosen - highest - log_total, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        input, weight, targets, log_sums, entropies = ctx.saved_tensors
        of_input, of_weight = ctx.needs_input_grad[:2]
        of_logprob, of_entropy = (grad * ctx.factor for grad in grads)
        _, gradients, multiply, add_product = _functions(input.device)
        chosen_entropy = of_entropy if ctx.entropy_grad else None
        found = gradients(input, weight, targets, ctx.factor, log_sums, entropies, of_logprob, chosen_entropy)
        if weight is None:
            return torch.cat([input[:0], *(grad for _, grad in found)]), None, None, None, None
        input_grad = torch.zeros(input.shape, device=input.device) if of_input else None
        written = torch.empty_like if len(input) else torch.zeros_like
        weight_grad = written(weight) if of_weight else None
        for part, grad in found:
            if input_grad is not None:
                add_product(input_grad, grad, weight[part])
            if weight_grad is not None:
                multiply(grad.t(), input, out=weight_grad[part])
        return None if input_grad is None else input_grad.to(input.dtype), weight_grad, None, None, None


def _sums(
    input: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor, factor: float
) -> tuple[torch.Tensor, ...]:
    """float32 [T] each, over the vocabulary: the highest logit z, the sums of exp(z - highest) and of (z - highest)
    exp(z - highest), and the targets' logits."""
    highest = torch.full((len(input),), LOWEST_LOGIT)
    total, weighted, chosen = torch.zeros(3, len(input)).unbind()
    for start, logits in _logit_tiles(input, weight, factor):
        rows, columns = _inside(targets, start, logits)
        chosen[rows] = logits[rows, columns]
        before, highest = highest, torch.maximum(highest, logits.amax(-1))
        logits.sub_(highest[:, None])
        powers = logits.exp()
        change = before - highest
        scale = change.exp()
        weighted = (weighted + change * total) * scale + logits.mul_(powers).sum(-1)
        total = total * scale + powers.sum(-1)
    return highest, total, weighted, chosen


def _gradients(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    targets: torch.Tensor,
    factor: float,
    log_sums: torch.Tensor,
    entropies: torch.Tensor,
    of_logprob: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(columns, gradient by their logits before `factor`, in the type of the weight) of each tile; see `gradients`."""
    for start, logits in _logit_tiles(input, weight, factor):
        logits.sub_(log_sums[:, None])
        if of_entropy is None:
            logits.exp_().mul_(-of_logprob[:, None])
        else:
            powers = logits.exp()
            logits.add_(entropies[:, None]).mul_(-of_entropy[:, None]).sub_(of_logprob[:, None]).mul_(powers)
        rows, columns = _inside(targets, start, logits)
        logits[rows, columns] += of_logprob[rows]
        yield slice(start, start + logits.shape[1]), logits if weight is None else logits.to(weight.dtype)


def _functions(device: torch.device) -> tuple[Callable[..., Any], ...]:
    """`_sums`, `_gradients`, `_product` and `_add_product`, or a GPU's, for which Triton is imported."""
    if device.type != "cuda":
        return _sums, _gradients, _product, _add_product
    from troupe.workers.models import head_kernels

    return head_kernels.sums, head_kernels.gradients, head_kernels.product, head_kernels.add_product


def _logit_tiles(input: torch.Tensor, weight: torch.Tensor | None, factor: float) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, float32 [T, columns]) of factor * input @ weight^T, overwritten by the next. The columns do not
    depend on T: a token's log-prob is the same to the last bit among any others."""
    if weight is None:
        yield 0, input * factor
        return
    rows = input.float()
    if weight.dtype == torch.float32:
        for start in range(0, len(weight), _FLOAT32_TILE_COLUMNS):
            tile = _product(rows, weight[start : start + _FLOAT32_TILE_COLUMNS].t())
            yield start, tile if factor == 1.0 else tile.mul_(factor)
        return
    size = min(len(weight), max(64, _TILE_NUMBERS // max(1024, rows.shape[1]) // 64 * 64))
    block, found = rows.new_empty(size, rows.shape[1]), rows.new_empty(len(rows) * size)
    for start in range(0, len(weight), size):
        part = weight[start : start + size]
        tile = found[: len(rows) * len(part)].view(len(rows), len(part))
        _multiply_exactly(rows, part, block, tile)
        yield start, tile if factor == 1.0 else tile.mul_(factor)


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """left @ right, by the faster library; into `out`, if it is given."""
    if left.dtype == torch.float32 and onednn_is_faster():
        found = product(left, right.t(), None)
        return found if out is None else out.copy_(found)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to float32 `into`."""
    into += _product(left, right)


def _inside(targets: torch.Tensor, start: int, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns in the tile) of the targets that a tile holds."""
    columns = targets - start
    rows = ((columns >= 0) & (columns < tile.shape[1])).nonzero()[:, 0]
    return rows, columns[rows]


def _multiply_exactly(rows: torch.Tensor, weight: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """out = rows @ weight^T, in float32, by way of `block`, which is overwritten. oneDNN may round bfloat16 factors
    to it: the products are the same, and faster than by the default library but on Intel's processors, where AMX
    makes it as fast as bfloat16. float16 has more digits."""
    matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if weight.dtype == torch.bfloat16 else "ieee"
    try:
        torch.mm(rows, block[: len(weight)].copy_(weight).t(), out=out)
    finally:
        matmul.fp32_precision = before
