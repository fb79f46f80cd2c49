"""The settings of vLLM's engine, as vLLM itself understands them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from troupe.workers.contract.config import EngineConfig, ModelConfig, RolloutConfig, SamplingConfig
from troupe.workers.engine.settings import engine_args


@pytest.mark.parametrize(
    ("dtype", "float32_head", "expected"),
    [
        ("bfloat16", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("float32", True, torch.float32),
        ("float32", False, torch.float32),
    ],
)
def test_the_engine_computes_logits_in_the_type_of_the_trainer(
    dtype: str, float32_head: bool, expected: torch.dtype, tiny_model: Path
) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model), dtype=dtype, float32_head=float32_head),  # pyright: ignore
        engine=EngineConfig(max_num_seqs=4, max_model_len=64, enforce_eager=True),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )
    model = engine_args(config).create_model_config()
    assert model.head_dtype == expected
    assert model.dtype == getattr(torch, dtype)
