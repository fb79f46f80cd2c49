"""vLLM's float32 output head in blocks: the logits of a float64 product, and vLLM's own where it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from troupe.workers.models import heads
from troupe.workers.weights import cpu_kernels
from troupe.workers.weights.cpu_kernels import logits_in_blocks

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
