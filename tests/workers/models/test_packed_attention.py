"""Attention over the segments of a row, against torch's attention under a mask of the whole row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl, list_flash_attention_impls
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from tests.workers.models.test_modeling import SAMPLES, SIZES, save_model
from tests.workers.models.test_token_batch import train_table
from troupe.workers.models import packed_attention
from troupe.workers.models.capabilities import adapt
from troupe.workers.models.modeling import CausalLogprobs, load_causal
from troupe.workers.models.packed_attention import Segments, attention, parse
from troupe.workers.models.token_batch import TokenTable, segment_table

TABLE = segment_table(
    torch.tensor([0, 9, 14, 14, 20]),
    torch.tensor([9, 5, 0, 6, 11]),
    torch.tensor([[0, 0], [0, 4], [0, 4], [0, 4], [0, 0]]),
)
"""A prompt of 4 tokens with responses of 5, 5, 0 and 6, and a sequence of 11."""
TOKENS, HEAD_SIZE, SCALE = 31, 16, 0.3
FLASH = ["FA3", "FA4"]
CAUSAL = SimpleNamespace(is_causal=True)


def mask_of(segments: Segments, window: int = TOKENS) -> torch.Tensor:
    """bool [N, N]: whether a token attends to another, of the last `window` tokens of its sequence."""
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for segment in segments.items:
        sequence = [*range(TOKENS)[segment.prefix], *range(TOKENS)[segment.queries]]
        for place, token in enumerate(sequence[segment.prefix_length :], segment.prefix_length):
            seen[token, sequence[max(0, place - window + 1) : place + 1]] = True
    return seen


def states(heads: int, groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, TOKENS, HEAD_SIZE, dtype=dtype, requires_grad=True)
        for count in (heads * groups, heads, heads)
    )
    return query, key, value


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int = TOKENS) -> torch.Tensor:
    """torch's attention in float32: [1, N, heads, head size]."""
    mask = mask_of(parse(TABLE), window)
    return scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask, scale=SCALE, enable_gqa=True
    ).transpose(1, 2)


def gradients(output: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((output * weights).sum(), inputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (2, 3)])
def test_segments_attend_to_their_prefix_and_themselves(
    heads: int, groups: int, dtype: torch.dtype, tolerance: float
) -> None:
    inputs = states(heads, groups, dtype)
    module: Any = CAUSAL
    found, expected = attention(module, *inputs, TABLE, scaling=SCALE)[0], masked(*inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [1, 2, 5, 7, 10, 11, 12])
def test_a_window_covers_the_last_tokens_of_the_sequence_with_its_prompt(window: int) -> None:
    """Windows shorter than a response, than a prompt with its response, and longer than every sequence."""
    inputs = states(2, 3, torch.float32)
    module: Any = CAUSAL
    found = attention(module, *inputs, TABLE, scaling=SCALE, sliding_window=window)[0]
    expected = masked(*inputs, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_arguments_of_the_gpu_kernel_describe_the_same_attention() -> None:
    """Of every piece the kernel aligns the causal mask to the last key."""
    query, key, value = (x[0].transpose(0, 1) for x in states(2, 3, torch.float32))
    layout = parse(TABLE).varlen(torch.device("cpu"))
    assert layout.keys is not None
    keys, values = key[layout.keys], value[layout.keys]
    pieces = []
    query_ends, key_ends = layout.query_ends.tolist(), layout.key_ends.tolist()
    assert query_ends[-1] == TOKENS and key_ends[-1] == len(keys)
    for number in range(len(query_ends) - 1):
        own, seen = (slice(ends[number], ends[number + 1]) for ends in (query_ends, key_ends))
        rows, columns = own.stop - own.start, seen.stop - seen.start
        assert rows <= layout.longest_query and columns <= layout.longest_key
        causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        asked, known, held = (x.transpose(0, 1)[None] for x in (query[own], keys[seen], values[seen]))
        piece = scaled_dot_product_attention(asked, known, held, attn_mask=causal, scale=SCALE, enable_gqa=True)
        pieces.append(piece[0].transpose(0, 1))
    torch.testing.assert_close(torch.cat(pieces)[None], masked(*states(2, 3, torch.float32)), rtol=1e-5, atol=1e-5)
    alone = segment_table(torch.tensor([0, 9]), torch.tensor([9, 2]), torch.zeros(2, 2, dtype=torch.int64))
    assert parse(alone).varlen(torch.device("cpu")).keys is None, "nothing to gather without a shared prompt"


class _NoGradientOfKeys(torch.autograd.Function):
    """A backward pass that is wrong, behind an output that is right."""

    @staticmethod
    def forward(ctx: Any, key: torch.Tensor) -> torch.Tensor:
        return key.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grads[0])


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_kernel_with_another_output_or_gradient_is_not_used(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the CPU plays that of the GPU."""

    def kernel(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attend(query: Any, key: Any, value: Any, segments: Any, scale: float, window: int | None) -> torch.Tensor:
            return packed_attention._SegmentsOnCpu.apply(query, change(key), value, segments, scale, window)

        return attend

    found = list[bool]()
    for change in (lambda key: key, lambda key: 1.1 * key, _NoGradientOfKeys.apply):
        monkeypatch.setattr(packed_attention, "_varlen", kernel(change))
        torch.manual_seed(0)
        found.append(packed_attention._kernel_is_exact(HEAD_SIZE, dtype, window, torch.device("cpu")))
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("capability", "installed", "exact", "used"),
    [
        (9, {"FA3"}, {None, "FA3"}, "FA3"),
        (10, {"FA3", "FA4"}, {None, "FA3", "FA4"}, "FA4"),
        (9, {"FA3"}, {None}, None),
        (9, set[str](), {None, "FA3"}, None),
        (8, {"FA3", "FA4"}, {None, "FA3", "FA4"}, None),
        (9, {"FA3"}, {"FA3"}, None),
    ],
)
def test_the_newest_flash_attention_that_is_installed_and_exact_is_used(
    capability: int, installed: set[str], exact: set[str | None], used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own registry, with packages that are not there; the trial sees which version runs."""
    versions = _Versions(monkeypatch, capability, installed)
    monkeypatch.setattr(packed_attention, "kernel_is_exact", lambda *_: versions.running() in exact)
    assert packed_attention.use_fastest_kernel(128, torch.bfloat16) is (None in exact)
    assert versions.running() == used


def test_a_version_that_is_wrong_for_a_later_model_is_used_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the kernel of every version refuses changes nothing for the others."""
    versions = _Versions(monkeypatch, 9, {"FA3"})
    exact = {64: {None}, 128: {None, "FA3"}, 512: set[str | None]()}
    monkeypatch.setattr(packed_attention, "kernel_is_exact", lambda size, *_: versions.running() in exact[size])
    found = [(packed_attention.use_fastest_kernel(size, torch.bfloat16), versions.running()) for size in (128, 512)]
    assert found == [(True, "FA3"), (False, "FA3")]
    found = [(packed_attention.use_fastest_kernel(size, torch.bfloat16), versions.running()) for size in (64, 128)]
    assert found == [(True, None), (True, None)]


class _Versions:
    """torch's registry of FlashAttention on a GPU of this capability, with these packages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: int, installed: set[str]) -> None:
        monkeypatch.setattr(packed_attention, "_refused", set())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
        monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
        monkeypatch.setattr(
            _registry, "_FLASH_ATTENTION_IMPLS", {v: partial(self._start, v in installed) for v in FLASH}
        )

    def running(self) -> str | None:
        return current_flash_attention_impl()

    @staticmethod
    def _start(installed: bool) -> _registry.FlashAttentionHandle:
        if not installed:
            raise ModuleNotFoundError("No module named 'flash_attn_interface'")
        return Mock(spec=["remove"])


def test_torch_has_the_versions_that_are_asked_for() -> None:
    assert sorted(packed_attention._NEWER.values()) == list_flash_attention_impls() == FLASH


@pytest.mark.parametrize("arguments", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_what_is_not_implemented_is_refused(arguments: dict[str, Any]) -> None:
    module: Any = CAUSAL
    with pytest.raises(ValueError, match="packed"):
        attention(module, *states(4, 1, torch.float32), TABLE, **arguments)
    attention(module, *states(4, 1, torch.float32), TABLE, softcap=None)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_recompute_give_the_gradients_of_padded_rows(reentrant: bool, tmp_path: Path) -> None:
    model = load_causal(save_model(LlamaConfig(**SIZES), tmp_path))
    module = CausalLogprobs(model, temperature=0.7, chunks=3)
    assert adapt(module, model, "cpu", packing=True)
    table, parameters = TokenTable(train_table(SAMPLES)), list(model.parameters())
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        cut = table.packed_batch if checkpointing else table.batch
        batch = cut(range(len(SAMPLES)))
        logprobs, _ = module.train()(batch=batch)
        model.zero_grad()
        (logprobs * torch.arange(1.0, len(logprobs) + 1)).sum().backward()
        found.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
    assert len(found[0]) == len(found[1]) == len(parameters)
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
