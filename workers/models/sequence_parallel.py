"""Ulysses sequence parallelism (arXiv 2309.14509): the workers of a group share the tokens of each micro-batch.

Each worker runs the model on a part of the packed row. Only in attention does a token depend on others: there the
workers exchange tokens for heads, so that each one attends with a part of the heads over the whole row, and exchange
back. What a module returns for the tokens of a micro-batch is gathered on every worker of the group. All of them then
compute the same loss, and each one has the gradients of its tokens: their sum over all ranks is the gradient.

DeepSpeed's own class for transformers' models cannot read the table of segments of a packed row
(`packed_attention`), needs the positions as an argument of every layer's attention, and gathers them there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from troupe.workers.models import packed_attention
from troupe.workers.models.ragged import Ragged
from troupe.workers.models.token_batch import TokenBatch, is_table, segment_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "troupe_ulysses"
"""Name under which the attention is registered. Without a table of segments it is `packed_attention`'s."""


@dataclass(frozen=True)
class SequenceGroup:
    """The workers that share each micro-batch, and this worker's place among them."""

    group: dist.ProcessGroup
    size: int
    rank: int


@dataclass(frozen=True)
class Places:
    """Where the worker's own tokens have some tokens of the micro-batch, which its caller asks for."""

    chosen: torch.Tensor | slice
    """Which of them the worker has: indices into the tokens asked for."""
    local: torch.Tensor
    """int64: the index of each chosen one among the worker's own tokens."""
    count: int
    """Number of tokens asked for."""
    sequence: SequenceGroup | None = None

    def of(self, rows: Ragged | None) -> Ragged | None:
        """The chosen tokens' rows of `rows` in host memory, which has one for each token asked for, or None of None."""
        return rows if rows is None or isinstance(self.chosen, slice) else rows.take(self.chosen.cpu())

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all tokens asked for, [count, ...], from the chosen ones' values. Collective over the group,
        whose workers compute the same loss of the result: the gradient of a worker's values is its own loss's."""
        if self.sequence is None:
            return values
        gathered: torch.Tensor = _Gather.apply(self.sequence.group, self.count, self.chosen, values)
        return gathered


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of a micro-batch that a worker runs the model on: all of them, or its part of a packed row."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    """Mask of the whole row."""
    position_ids: torch.Tensor | None
    first: int = 0
    """Number of the first one in the row."""
    sequence: SequenceGroup | None = None
    routes: torch.Tensor | None = None
    """Experts of the own tokens; see `TokenBatch.routes`."""

    def find(self, positions: torch.Tensor) -> Places:
        """Where the tokens at `positions`, int64 indices into the flattened tokens of the micro-batch, are here."""
        if self.sequence is None:
            return Places(slice(None), positions, len(positions))
        local = positions - self.first
        chosen = ((local >= 0) & (local < self.input_ids.shape[1])).nonzero().flatten()
        return Places(chosen, local[chosen], len(positions), self.sequence)


def divide(sequence: SequenceGroup | None, batch: TokenBatch) -> OwnTokens:
    """This worker's part of a micro-batch, padded with a segment to a multiple of the group; the filler batch is not
    divided. Raises ValueError if it is padded instead of packed."""
    input_ids, attention_mask, position_ids = batch.input_ids, batch.attention_mask, batch.position_ids
    packed = is_table(attention_mask)
    if sequence is None or (input_ids.numel() == 1 and not packed):
        return OwnTokens(input_ids, attention_mask, position_ids, routes=batch.routes)
    if not packed or position_ids is None:
        raise ValueError("sequence parallelism divides packed rows only")
    tokens = input_ids.shape[1]
    length = -(-tokens // sequence.size)
    missing = length * sequence.size - tokens
    if missing:
        padding = segment_table(torch.tensor([tokens]), torch.tensor([missing]), torch.zeros(1, 2, dtype=torch.int64))
        attention_mask = torch.cat([attention_mask, padding], dim=2)
    first = sequence.rank * length
    ids, positions = (pad(x, (0, missing))[:, first : first + length] for x in (input_ids, position_ids))
    routes = None if batch.routes is None else pad(batch.routes, (0, 0, 0, 0, 0, missing), value=-1)
    own_routes = None if routes is None else routes[:, first : first + length]
    return OwnTokens(ids, attention_mask, positions, first, sequence, own_routes)


def attention(
    sequence: SequenceGroup,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: [1, heads, own tokens, head size] to [1, own tokens, heads, head size].
    With more workers than KV heads, each gets a copy of the one that its heads use."""
    if attention_mask is None or not is_table(attention_mask):
        return packed_attention.attention(module, query, key, value, attention_mask, **kwargs)
    copies = sequence.size // math.gcd(key.shape[1], sequence.size)
    if copies > 1:
        key, value = (states.repeat_interleave(copies, 1) for states in (key, value))
    query, key, value = (_exchanged(sequence, states) for states in (query, key, value))
    output, _ = packed_attention.attention(module, query, key, value, attention_mask, **kwargs)
    return _exchanged(sequence, output), None


def _exchanged(sequence: SequenceGroup, states: torch.Tensor) -> torch.Tensor:
    """[1, heads, own tokens, size] to [1, own heads, tokens, size], or [1, tokens, own heads, size] back."""
    by_worker = states[0].unflatten(0, (sequence.size, -1))
    exchanged: torch.Tensor = _Exchange.apply(sequence.group, by_worker)
    return exchanged.transpose(0, 1).flatten(1, 2)[None]


class _Exchange(torch.autograd.Function):
    """An all-to-all of `parts` by worker, whose gradient goes back the same way. torch's own one is deprecated."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(group, parts)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[None, torch.Tensor]:
        return None, _all_to_all(ctx.group, grads[0])


def _all_to_all(group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gather(torch.autograd.Function):
    """All values, gathered from a group's ranks; a rank's values get the gradient of that rank's loss."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, count: int, chosen: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(chosen)
        places = values.new_zeros(count, *values.shape[1:])
        places[chosen] = values
        dist.all_reduce(places, group=group)
        return places

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: the decorator hides the name `ctx`
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[None, None, None, torch.Tensor]:
        (chosen,) = ctx.saved_tensors
        return None, None, None, grads[0][chosen]


def install(model: PreTrainedModel, sequence: SequenceGroup) -> None:
    """Make the layers divide their heads among the workers of the group. Raises ValueError if that fails."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    heads = model.config.get_text_config().num_attention_heads
    if heads % sequence.size:
        raise ValueError(f"sequence_parallel_size {sequence.size} does not divide the model's {heads} attention heads")
    AttentionInterface.register(IMPLEMENTATION, partial(attention, sequence))
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)
