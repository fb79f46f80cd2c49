"""Small models that the tests of the trainers build themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_llama(folder: Path, **sizes: Any) -> str:
    """Write a two-layer Llama of these sizes, always with the same weights, and return its folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=2, pad_token_id=2, **sizes)).save_pretrained(folder)
    return str(folder)
