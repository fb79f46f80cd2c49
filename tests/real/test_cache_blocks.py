"""The cache that `troupe plan` reserves for a sequence is the one that vLLM does, by vLLM's own specs and groups."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from troupe.orchestrator.model_facts.model_size import ModelSize
from troupe.orchestrator.plan.worker_memory import kv_bytes, sequence_bytes

pytestmark = pytest.mark.real

SIZE = ModelSize(layers=12, hidden=64, intermediate=128, heads=8, kv_heads=4, head_dim=16, vocabulary=100)
BLOCK, BATCH = 16, 40


def by_vllm(size: ModelSize, tokens: int, ranks: int) -> int:
    """Bytes that one sequence of `tokens` tokens takes of a rank's cache in bfloat16."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    common: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.bfloat16}
    if size.latent:
        full: Any = MLAAttentionSpec(num_kv_heads=1, head_size=size.latent, **common)
    else:
        heads = max(1, size.kv_heads // ranks)
        full = FullAttentionSpec(num_kv_heads=heads, head_size=size.head_dim, **common)
        common |= {"num_kv_heads": heads, "head_size": size.head_dim}
    specs = {f"full.{layer}": full for layer in range(size.layers - size.windowed)}
    if size.windowed:
        window = SlidingWindowSpec(sliding_window=size.window, **common)
        specs |= {f"window.{layer}": window for layer in range(size.windowed)}
    if len(set(specs.values())) == 1:
        groups = vars(kv_cache_utils)["_get_kv_cache_groups_uniform_spec"](specs)
    else:
        groups = vars(kv_cache_utils)["_get_kv_cache_groups_uniform_page_size"](specs)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        max_in_flight_tokens=2 * BATCH,
    )
    pages = [
        math.ceil(group.kv_cache_spec.max_memory_usage_bytes(config) / group.kv_cache_spec.page_size_bytes)
        for group in groups
    ]
    # Every block of the pool holds a page of each layer of the largest group.
    most = max(len(group.layer_names) for group in groups)
    return sum(pages) * most * full.page_size_bytes


@pytest.mark.parametrize("tokens", [16, 100, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(
    "size",
    [
        SIZE,
        replace(SIZE, window=64, windowed=12),
        replace(SIZE, window=64, windowed=10),
        replace(SIZE, layers=26, window=64, windowed=22),
        replace(SIZE, layers=13, window=64, windowed=7),
        replace(SIZE, latent=576),
    ],
)
def test_blocks_of_a_sequence(size: ModelSize, tokens: int, ranks: int) -> None:
    expected = by_vllm(size, tokens, ranks)
    assert sequence_bytes(size, kv_bytes(size, 2, ranks), tokens, BLOCK, BATCH) == expected
