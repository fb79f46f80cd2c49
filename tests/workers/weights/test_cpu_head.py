"""vLLM's float32 output head in blocks: the logits of a float64 product, and vLLM's own where it does not apply.

And its products of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from troupe.workers.models import heads
from troupe.workers.weights import cpu_kernels
from troupe.workers.weights.cpu_kernels import logits_in_blocks, multiply_single_tokens_alike

Apply = Callable[..., torch.Tensor]


@pytest.fixture
def own() -> Iterator[Apply]:
    """vLLM's own head; it is replaced within the test."""
    with pytest.MonkeyPatch.context() as patch:
        apply: Apply = LogitsProcessor._apply_head
        patch.setattr(LogitsProcessor, "_apply_head", apply)
        logits_in_blocks()
        yield apply


def processor(head_dtype: torch.dtype) -> Any:
    """vLLM's layer without an engine's configuration."""
    made: Any = object.__new__(LogitsProcessor)
    torch.nn.Module.__init__(made)
    made.head_dtype = head_dtype
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_logits_are_those_of_a_float64_product(
    own: Apply, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_BLOCK_NUMBERS", 200)
    torch.manual_seed(3)
    head = SimpleNamespace(weight=torch.randn(37, 24).bfloat16(), quant_method=UnquantizedEmbeddingMethod())
    states, added = torch.randn(tokens, 24).bfloat16(), torch.randn(37).bfloat16() if bias else None
    layer = processor(torch.float32)
    found = layer._apply_head(head, states, added)
    exact = states.double() @ head.weight.double().T + (0.0 if added is None else added.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, own(layer, head, states, added), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dtype", "unquantized"),
    [
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_every_other_head_is_vllms_own(
    own: Apply, dtype: torch.dtype, head_dtype: torch.dtype, unquantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "float32_logits", lambda *_: pytest.fail("computed in blocks"))
    method = UnquantizedEmbeddingMethod() if unquantized else SimpleNamespace()
    head = SimpleNamespace(weight=torch.randn(8, 4, dtype=dtype), quant_method=method)
    head.cpu_linear = torch.nn.functional.linear
    states, layer = torch.randn(3, 4, dtype=dtype), processor(head_dtype)
    if not unquantized:
        with pytest.raises(ValueError, match="unquantized"):
            layer._apply_head(head, states, None)
        return
    assert torch.equal(layer._apply_head(head, states, None), own(layer, head, states, None))


def test_a_token_has_the_same_product_alone_as_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the rows of an MLP of SmolLM2-135M: oneDNN sums shorter ones in one order."""
    import_module("vllm._C")
    monkeypatch.setattr(_custom_ops, "onednn_mm", _custom_ops.onednn_mm)
    multiply_single_tokens_alike()
    torch.manual_seed(9)
    states, weight = torch.randn(9, 1536), torch.randn(576, 1536)
    handler = _custom_ops.create_onednn_mm(weight.t(), 32)
    alone, among = (_custom_ops.onednn_mm(handler, x, None) for x in (states[4:5], states))
    assert torch.equal(alone[0], among[4])
    torch.testing.assert_close(among, states @ weight.t(), rtol=1e-4, atol=1e-3)
