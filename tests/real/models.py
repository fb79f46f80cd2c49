"""Small models that the tests of the trainers build themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_llama(folder: Path, **sizes: Any) -> str:
    """Write a Llama of these sizes, by default of two layers, always with the same weights, and return its folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    given: dict[str, Any] = {"num_hidden_layers": 2, "pad_token_id": 2} | sizes
    config = LlamaConfig(**given)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)
