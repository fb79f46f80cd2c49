"""The float32 output head of a bfloat16 model on vLLM's CPU build.

vLLM converts the whole weight to float32 in every step, the largest one of a model, and multiplies it with torch's
default library.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from troupe.workers.models.heads import float32_logits


def logits_in_blocks() -> None:
    """Make vLLM in this process compute such logits as the trainer does, in blocks of the weight."""
    apply = LogitsProcessor._apply_head

    @wraps(apply)
    def apply_head(self: Any, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: Any) -> torch.Tensor:
        weight: torch.Tensor = lm_head.weight
        both = hidden_states.dtype == weight.dtype == torch.bfloat16
        plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        if not (hidden_states.is_cpu and self.head_dtype == torch.float32 and both and plain):
            return apply(self, lm_head, hidden_states, embedding_bias)
        logits = float32_logits(hidden_states.flatten(0, -2), weight)
        if embedding_bias is not None:
            logits += embedding_bias.float()
        return logits.view(*hidden_states.shape[:-1], len(weight))

    LogitsProcessor._apply_head = apply_head
