"""One product for all tokens gives what vLLM's kernels for the CPU give, whatever the number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from troupe.workers.weights.cpu_kernels import multiply_at_once

KERNELS: Any = punica_cpu
"""The module that vLLM calls them in."""
NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
TOKENS, RANK, INPUTS, OUTPUTS = 5, 8, 24, 12


@pytest.fixture
def replaced() -> Iterator[None]:
    """The kernels are replaced within the test."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (lora_ops, KERNELS):
            for name in NAMES:
                patch.setattr(module, name, getattr(module, name))
        multiply_at_once()
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [1, 2])
def test_products_are_those_of_the_kernels(slots: int, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Also where an engine has memory for several adapters, and a token has none (index -1)."""
    torch.manual_seed(1)
    a = torch.randn(slots, 1, RANK, INPUTS).to(dtype)
    b = torch.randn(slots, 1, OUTPUTS, RANK).to(dtype)
    states, shrunk = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(TOKENS, RANK)
    indices = torch.tensor([0, -1, 0, 0, slots - 1])

    def run() -> list[torch.Tensor]:
        small, whole, part, set_to = torch.zeros(TOKENS, RANK), *(torch.ones(TOKENS, 30, dtype=dtype) for _ in "123")
        KERNELS.bgmv_shrink(states, a, small, indices, scaling=0.5)
        KERNELS.bgmv_expand(shrunk, b, whole, indices, add_inputs=True)
        lora_ops.bgmv_expand_slice(shrunk, b, part, indices, 7, OUTPUTS, True)
        KERNELS.bgmv_expand_slice(shrunk, b, set_to, indices, 7, OUTPUTS, False)
        return [small, whole, part, set_to]

    expected = run()
    request.getfixturevalue("replaced")
    assert KERNELS.bgmv_shrink is lora_ops.bgmv_shrink
    for found, kernel in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, kernel, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("replaced")
def test_a_token_has_the_same_result_among_any_others(threads: int) -> None:
    """Otherwise the log-probs of a sample, and so its weight, would differ with the moments at which others end."""
    torch.manual_seed(1)
    a, b, states = torch.randn(1, 1, RANK, 64), torch.randn(1, 1, 64, RANK), torch.randn(24, 64)

    def run(tokens: int) -> torch.Tensor:
        small, large, indices = torch.zeros(tokens, RANK), torch.ones(tokens, 64), torch.zeros(tokens, dtype=torch.long)
        KERNELS.bgmv_shrink(states[:tokens], a, small, indices, scaling=8.0)
        KERNELS.bgmv_expand_slice(small, b, large, indices, 0, 64, True)
        return large

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(24)
        assert [tokens for tokens in range(1, 24) if not torch.equal(run(tokens), whole[:tokens])] == []
    finally:
        torch.set_num_threads(before)
