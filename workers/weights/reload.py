"""Loads new weights into a running vLLM model layer by layer, and reports which layers got none.

vLLM only logs a warning for a layer without new weights, and keeps its old ones. Here the update is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class IncompleteUpdate(RuntimeError):
    """The update did not contain every weight of the model."""


class ModelReload:
    """One update of a model's weights after another, each in any number of parts."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig) -> None:
        self._model = model
        self._config = config
        self._tied_heads = _tied_heads(model)
        self._active = False
        self._kernels: list[tuple[UnquantizedFusedMoEMethod, Any]] = []

    def begin(self) -> None:
        """Begin an update. One that has not ended, because its sender is gone, is abandoned."""
        self.abandon()
        initialize_layerwise_reload(self._model)
        # On the CPU experts are multiplied in a packed layout, and vLLM packs them only if a layer has no kernel yet:
        # an update would leave unpacked weights behind, which the kernel reads as packed ones.
        self._kernels = [(method, method.moe_kernel) for method in _packed_experts(self._model)]
        for method, _ in self._kernels:
            method.moe_kernel = None
        self._active = True

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a part. A tensor may be read until `end`: nothing else may be written to its memory before."""
        with disable_mtp_completeness_check():
            self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]

    def end(self) -> None:
        """End the update. Raises IncompleteUpdate if layers got no weights; the model is a mixture then."""
        missing = _missing_layers(self._model, self._tied_heads)
        self.abandon()
        if missing:
            raise IncompleteUpdate(f"the update lacks weights of {', '.join(missing)}")

    def abandon(self) -> None:
        """End an update that has begun: restore the modules that a later one loads into, with their present weights."""
        if not self._active:
            return
        self._active = False
        finalize_layerwise_reload(self._model, self._config)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:  # no weights came for its layer
                method.moe_kernel = kernel
        self._kernels = []
        _repack_heads(self._model)


def _packed_experts(model: torch.nn.Module) -> Iterator[UnquantizedFusedMoEMethod]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend == UnquantizedMoeBackend.CPU:
            yield method


def _heads(model: torch.nn.Module) -> Iterator[tuple[str, ParallelLMHead]]:
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            yield name, module


def _tied_heads(model: torch.nn.Module) -> frozenset[str]:
    """Names of the output heads whose weight is the embedding's."""
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding | torch.nn.Embedding)]
    return frozenset(
        name for name, head in _heads(model) if any(m is not head and m.weight is head.weight for m in embeddings)
    )


def _repack_heads(model: torch.nn.Module) -> None:
    """Repack every output head from its weight: on the CPU it multiplies by a packed copy, and the reload does not
    notice that a tied head's weight has changed: it would keep the old policy's last layer."""
    for _, head in _heads(model):
        if isinstance(head.quant_method, UnquantizedEmbeddingMethod):
            head.quant_method.process_weights_after_loading(head)


def _missing_layers(model: torch.nn.Module, tied_heads: frozenset[str]) -> list[str]:
    """Modules that the reload still waits for, but attention layers (processed last), tied heads, and padding rows."""
    missing = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if name in tied_heads or not info.can_load() or is_deferred_attention_layer(module):
            continue
        if all(parameter is None for parameter in module._parameters.values()):
            continue
        if isinstance(module, VocabParallelEmbedding) and info.load_numel > 0:
            continue
        missing.append(name)
    return missing


# vLLM warns of every module that is tied or has only buffers. Weights that are really missing raise IncompleteUpdate.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
