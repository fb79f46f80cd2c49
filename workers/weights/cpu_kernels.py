"""Faster products on vLLM's CPU build: the float32 output head of a 16-bit model, adapters, and experts.

For such a head vLLM converts the whole weight to float32 in every step, the largest one of a model, and multiplies it
with torch's default library. For adapters its kernels copy the matrices of each token's adapter before they multiply,
which takes several times as long as the model below. An engine of Troupe has memory for one adapter, so that all of
these copies are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from vllm import _custom_ops
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from troupe.workers.models.cpu import product
from troupe.workers.models.heads import float32_logits


def logits_in_blocks() -> None:
    """Make vLLM in this process compute the logits of such a head as the trainer does, in blocks of the weight."""
    apply = LogitsProcessor._apply_head

    @wraps(apply)
    def apply_head(self: Any, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: Any) -> torch.Tensor:
        weight: torch.Tensor = lm_head.weight
        both = hidden_states.dtype == weight.dtype and weight.dtype in (torch.bfloat16, torch.float16)
        plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        if not (hidden_states.is_cpu and self.head_dtype == torch.float32 and both and plain):
            return apply(self, lm_head, hidden_states, embedding_bias)
        logits = float32_logits(hidden_states.flatten(0, -2), weight)
        if embedding_bias is not None:
            logits += embedding_bias.float()
        return logits.view(*hidden_states.shape[:-1], len(weight))

    LogitsProcessor._apply_head = apply_head


def multiply_single_tokens_alike() -> None:
    """Make vLLM in this process multiply a step's only token as one among others, but in compiled models."""
    multiply = _custom_ops.onednn_mm

    @wraps(multiply)
    def alike(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.numel() != x.shape[-1]:
            return multiply(handler, x, bias)
        return multiply(handler, torch.stack((x, x)), bias)[0]

    _custom_ops.onednn_mm = alike


def _multiply(inputs: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """inputs [tokens, columns] @ matrix [rows, columns]^T. By oneDNN in float32: MKL's sums of few rows depend on
    their number, and log-probs would differ with the others' arrivals."""
    return product(inputs, matrix, None) if inputs.dtype == torch.float32 else inputs @ matrix.T


def _shrink(inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, scaling: float = 1.0) -> None:
    """output [tokens, >= rank] = scaling * inputs [tokens, inputs] times matrix [rank, inputs]."""
    output[:, : len(matrix)] = scaling * _multiply(inputs, matrix)


def _expand(inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, add_inputs: bool = True) -> None:
    """output [tokens, columns] (+)= inputs [tokens, rank] times matrix [outputs, rank], as far as both have columns."""
    size = min(len(matrix), output.shape[1])
    _expand_slice(inputs, matrix[:size], output, 0, size, add_inputs)


def _expand_slice(
    inputs: torch.Tensor, matrix: torch.Tensor, output: torch.Tensor, start: int, size: int, add_inputs: bool = True
) -> None:
    """Expand like `_expand`, into the columns from `start` on."""
    columns = output[:, start : start + size]
    if add_inputs:
        columns += _multiply(inputs, matrix)
    else:
        columns.copy_(_multiply(inputs, matrix))


_PRODUCTS: dict[str, Callable[..., None]] = {
    "bgmv_shrink": _shrink,
    "bgmv_expand": _expand,
    "bgmv_expand_slice": _expand_slice,
}
"""Replacements of vLLM's kernels; the kernels for prompts (`sgmv_...`) call them."""


def multiply_at_once() -> None:
    """Replace vLLM's kernels in this process if an engine has memory for one adapter."""
    for name, replacement in _PRODUCTS.items():
        replaced = _with_one_adapter(vars(lora_ops)[name], replacement)
        for module in (lora_ops, punica_cpu):
            setattr(module, name, replaced)


def multiply_experts_without_adapters() -> None:
    """Let vLLM choose the kernel of experts in this process as without adapters; before it loads a model. With adapters
    it chooses one for experts that have some, which needs Triton. Troupe's experts have none."""
    module: Any = unquantized_fused_moe_method
    chosen = module.select_unquantized_moe_backend

    @wraps(chosen)
    def choose(moe_config: Any) -> Any:
        return chosen(replace(moe_config, is_lora_enabled=False))

    module.select_unquantized_moe_backend = choose


def _with_one_adapter(kernel: Callable[..., None], product: Callable[..., None]) -> Callable[..., None]:
    """The kernel, or the product if all tokens have the same adapter. `kernel` gets the index of each token's."""

    @wraps(kernel)
    def multiply(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> None:
        if len(weights) > 1 or len(inputs) != len(output):
            return kernel(inputs, weights, output, indices, *rest, **named)
        matrix = weights.reshape(weights.shape[-2:])
        return product(inputs.to(output.dtype), matrix.to(output.dtype), output, *rest, **named)

    return multiply
