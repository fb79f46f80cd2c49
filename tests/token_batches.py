"""Micro-batches of given tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from troupe.workers.models.token_batch import TokenBatch, filler_batch


def batch_of(ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor | None = None) -> TokenBatch:
    """A padded micro-batch without padding, in which the tokens at `positions` predict the next ones.

    Args:
        ids: int64 [B, L].
        positions: int64 [T]: indices into the flattened tokens.
        last: int64 [B]: as in `TokenBatch`, if the test reads it.
    """
    batch = filler_batch()
    return replace(
        batch,
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        positions=positions,
        targets=ids.flatten()[positions + 1],
        last=batch.last if last is None else last,
    )
