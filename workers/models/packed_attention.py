"""Attention for packed rows: several sequences in one row of the model, each attending to its own tokens only.

A packed row has no padding and needs no [L, L] mask. In place of a mask the model gets a table with the segments of the
row; transformers passes a 4-D mask to every attention layer as it is, and an attention function registered here reads
the table. A segment is a run of tokens that attend, causally, to a prefix elsewhere in the row (the prompt that several
responses share) and to the segment itself, in a layer with a sliding window to the last ones of both.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from troupe.workers.contract.text import one_line
from troupe.workers.models.exact import ieee_float32
from troupe.workers.models.token_batch import is_table, segment_table, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

IMPLEMENTATION = "troupe_sdpa"
"""Name under which the attention is registered. Without a table of segments it is transformers' `sdpa`."""

_NEWER = {9: "FA3", 10: "FA4"}
"""torch's name of the fastest FlashAttention, by the major compute capability of a GPU. torch has FlashAttention 2; the
others are in packages (`flash_attn_interface`, `flash_attn.cute`)."""
_refused: set[str] = set()
"""Those that cannot be used in this process."""
_TILES = 40
"""Multiplies the lengths of a trial, so that they exceed the tiles of a kernel."""
_REFUSED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of a layer's attention that change its result and are not implemented here."""


@dataclass(frozen=True)
class RowSegment:
    """Tokens `start` to `start + length` of a row, which also attend to `prefix_length` tokens from `prefix_start`."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int

    @property
    def queries(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def prefix(self) -> slice:
        """The tokens before it that it attends to."""
        return slice(self.prefix_start, self.prefix_start + self.prefix_length)


@dataclass(frozen=True)
class VarlenLayout:
    """Arguments of a variable-length attention kernel for the segments of a row."""

    query_ends: torch.Tensor
    """int32 [S + 1], cumulative."""
    key_ends: torch.Tensor
    """int32 [S + 1], cumulative."""
    keys: torch.Tensor | None
    """int64: the tokens whose keys and values the segments attend to, in order, or None for all, in the order of the
    row."""
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Segments:
    """The segments of a row, in order; together they cover every token once."""

    items: tuple[RowSegment, ...]
    layouts: dict[torch.device, VarlenLayout] = field(default_factory=dict, compare=False)
    """Filled by `varlen`."""
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict, compare=False)
    """Filled by `seen`."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment with its prefix."""
        return max(item.prefix_length + item.length for item in self.items)

    def varlen(self, device: torch.device) -> VarlenLayout:
        """The arguments of a kernel on `device`, made once for all layers."""
        if device in self.layouts:
            return self.layouts[device]
        queries = [item.length for item in self.items]
        keys = [item.prefix_length + item.length for item in self.items]
        index = None
        if queries != keys:
            spans = [torch.arange(part.start, part.stop) for s in self.items for part in (s.prefix, s.queries)]
            index = torch.cat(spans).to(device, non_blocking=True)
        ends = (_ends(queries, device), _ends(keys, device))
        self.layouts[device] = VarlenLayout(*ends, index, max(queries), max(keys))
        return self.layouts[device]

    def seen(self, segment: RowSegment, window: int | None) -> dict[str, Any]:
        """Arguments of torch's CPU kernel for a segment, made once for all of a shape: behind a prefix it needs a
        mask, as its causal one is aligned to the first key."""
        tokens = segment.prefix_length + segment.length
        if window is not None and window >= tokens:
            window = None
        if not segment.prefix_length and window is None:
            return {"is_causal": True}
        shape = (segment.length, segment.prefix_length, window)
        if shape not in self.masks:
            allowed = torch.ones(segment.length, tokens, dtype=torch.bool).tril(segment.prefix_length)
            if window is not None:
                allowed = allowed.triu(segment.prefix_length - window + 1)
            self.masks[shape] = torch.zeros(allowed.shape).masked_fill_(~allowed, -math.inf)
        return {"is_causal": False, "attn_mask": self.masks[shape]}


def _ends(lengths: list[int], device: torch.device) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ends.to(device, non_blocking=True)


_parsed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Segments by their table: all layers of a model get the same one."""


def parse(table: torch.Tensor) -> Segments:
    """The segments of a table from `token_batch.segment_table`."""
    if table not in _parsed:
        _parsed[table] = Segments(tuple(RowSegment(*row) for row in table[0, 0].tolist()))
    segments: Segments = _parsed[table]
    return segments


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: [1, heads, N, size] to [1, N, heads, size]. Raises ValueError."""
    if attention_mask is None or not is_table(attention_mask):
        return _sdpa()(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    segments = parse(attention_mask)
    if query.shape[0] != 1 or dropout or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError("packed rows need one row, no dropout and causal attention")
    if refused := [name for name in _REFUSED if kwargs.get(name) is not None]:
        raise ValueError(f"packed rows do not support {', '.join(refused)}")
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    window: int | None = kwargs.get("sliding_window")
    if window is not None and window >= segments.longest:
        window = None
    if not torch.backends.cuda.flash_sdp_enabled():
        return _plain(query, key, value, segments, scale, window), None
    if query.is_cuda:
        return _varlen(query, key, value, segments, scale, window), None
    output: torch.Tensor = _SegmentsOnCpu.apply(query, key, value, segments, scale, window)
    return output, None


@cache
def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Flash attention over segments of different length, causal to the last key, within the window."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch.compile

    layout = segments.varlen(query.device)

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        if layout.keys is not None:
            keys, values = keys[layout.keys], values[layout.keys]
        ends = (layout.query_ends, layout.key_ends, layout.longest_query, layout.longest_key)
        grouped = queries.shape[1] != keys.shape[1]
        before = -1 if window is None else window - 1
        return varlen_attn(queries, keys, values, *ends, scale=scale, window_size=(before, 0), enable_gqa=grouped)

    states = [x[0].transpose(0, 1) for x in (query, key, value)]
    if layout.keys is None or not torch.is_grad_enabled():
        return attend(*states)[None]
    # A shared prompt's keys and values are gathered once for each response, and again in the backward pass.
    return checkpoint(attend, *states, use_reentrant=False, preserve_rng_state=False)[None]


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scale: float, window: int | None
) -> torch.Tensor:
    """Attention segment by segment by operations that can be differentiated twice, for
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."""
    queries, *states = _by_head(query, key, value)
    parts = []
    for segment in segments.items:
        keys, values = (_attended(x, segment) for x in states)
        mask: torch.Tensor | None = segments.seen(segment, window).get("attn_mask")
        mask = None if mask is None else to_device(mask, query.device)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                queries[:, :, segment.queries], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
        )
    return torch.cat(parts, 2).transpose(1, 2)


class _SegmentsOnCpu(torch.autograd.Function):
    """Flash attention segment by segment, in float32: torch's backward pass takes several times as long in bfloat16.
    Only query, key, value and output are kept, in the type of the weights and once for each token: keys and values of a
    shared prompt are gathered again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        sums: list[torch.Tensor] = []
        queries, *states = _by_head(query, key, value)
        for segment in segments.items:
            keys, values = (_attended(x, segment) for x in states)
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[:, :, segment.queries], keys, values, 0.0, **segments.seen(segment, window), scale=scale
            )
            output[:, segment.queries] = attended.transpose(1, 2)
            sums.append(log_sum)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.segments, ctx.scale, ctx.window = segments, scale, window
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None, None]:
        query, key, value, output, *sums = ctx.saved_tensors
        heads = key.shape[1]
        groups = query.shape[1] // heads
        queries, *states = _by_head(query, key, value)
        grad, outputs = (x.float().transpose(1, 2) for x in (grads[0], output))
        of_query = torch.empty_like(query)
        # Several segments add to the keys of a shared prompt.
        of_key, of_value = (torch.zeros(x.shape) for x in (key, value))
        for segment, log_sum in zip(ctx.segments.items, sums, strict=True):
            keys, values = (_attended(x, segment) for x in states)
            gradient, own, attended = (x[:, :, segment.queries] for x in (grad, queries, outputs))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(gradient, own, keys, values, attended, log_sum, 0.0),
                **ctx.segments.seen(segment, ctx.window),
                scale=ctx.scale,
            )
            of_query[:, :, segment.queries] = parts[0]
            for total, part in zip((of_key, of_value), parts[1:], strict=True):
                of_tokens = part.unflatten(1, (heads, groups)).sum(2)
                total[:, :, segment.prefix] += of_tokens[:, :, : segment.prefix_length]
                total[:, :, segment.queries] += of_tokens[:, :, segment.prefix_length :]
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _by_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """float32 [1, query heads, N, head size] of each; the heads of a group have the same keys and values."""
    groups = query.shape[1] // key.shape[1]
    return query.float(), *(x.float().repeat_interleave(groups, 1) for x in (key, value))


def _attended(states: torch.Tensor, segment: RowSegment) -> torch.Tensor:
    """[1, heads, prefix and segment, head size] of keys or values."""
    own = states[:, :, segment.queries]
    return torch.cat([states[:, :, segment.prefix], own], 2) if segment.prefix_length else own


@cache
def register() -> None:
    """Make the attention known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def install(model: PreTrainedModel) -> bool:
    """Make the layers of a model use the attention; returns False, and changes nothing, if they cannot."""
    register()
    if model.config.get_text_config()._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(IMPLEMENTATION)
    return model.config.get_text_config()._attn_implementation == IMPLEMENTATION


def uninstall(model: PreTrainedModel) -> None:
    """Undo `install`."""
    model.set_attn_implementation("sdpa")


def use_fastest_kernel(head_size: int, dtype: torch.dtype, windows: bool = False) -> bool:
    """Whether the GPU's kernel is exact (`kernel_is_exact`). If so, FlashAttention 3 or 4 replaces torch's
    FlashAttention 2 in the whole process, provided that its package is installed and that it is exact, too: one that
    is wrong for a model is used for none."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        current_flash_attention_impl,
        restore_flash_attention_impl,
    )

    if (before := current_flash_attention_impl()) is not None:
        restore_flash_attention_impl()
    exact = kernel_is_exact(head_size, dtype, windows)
    version = _NEWER.get(torch.cuda.get_device_capability()[0])
    if version is None or version in _refused or not (exact or before):
        return exact
    try:
        activate_flash_attention_impl(version)
    except (ImportError, OSError, RuntimeError) as error:
        _refused.add(version)
        logger.info("attention runs with FlashAttention 2: %s", one_line(str(error)))
        return exact
    if exact and not kernel_is_exact(head_size, dtype, windows):
        restore_flash_attention_impl()
        _refused.add(version)
        logger.warning("attention runs with FlashAttention 2: %s computes something else here", version)
    return exact


def kernel_is_exact(head_size: int, dtype: torch.dtype, windows: bool = False) -> bool:
    """Whether the GPU's kernel takes this type and head size, and aligns its causal mask to the last key, also with
    windows: tried with a prompt that two responses share, against torch's attention under a mask."""
    cuda = torch.device("cuda")
    return all(
        _kernel_is_exact(head_size, dtype, window, cuda) for window in (None, 2 * _TILES) if windows or window is None
    )


@ieee_float32()
def _kernel_is_exact(head_size: int, dtype: torch.dtype, window: int | None, device: torch.device) -> bool:
    prompt, first, tokens = 4 * _TILES, 7 * _TILES, 10 * _TILES
    lengths = torch.tensor([first, tokens - first])
    table = segment_table(torch.tensor([0, first]), lengths, torch.tensor([[0, 0], [0, prompt]]))
    query, key, value = states = [
        torch.randn(1, heads, tokens, head_size, device=device, dtype=dtype, requires_grad=True) for heads in (2, 1, 1)
    ]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    allowed[first:, prompt:first] = False
    if window is not None:
        place = torch.tensor([*range(first), *range(prompt, first)], device=device)  # as the second does
        allowed &= place[:, None] - place[None, :] < window
    with torch.enable_grad():
        try:
            found = _varlen(query, key, value, parse(table), 1.0 / math.sqrt(head_size), window).float()
            weights = torch.randn_like(found)
            gradients = torch.autograd.grad((found * weights).sum(), states)
        except RuntimeError:  # the kernel refuses the GPU, the type or the size
            return False
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=allowed, enable_gqa=True
        ).transpose(1, 2)
        exact = torch.autograd.grad((expected * weights).sum(), states)
    pairs = zip((found, *gradients), (expected, *exact), strict=True)
    return all(bool((one.float() - other.float()).norm() <= 0.02 * other.float().norm()) for one, other in pairs)
