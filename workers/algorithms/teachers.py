"""What the teachers of a batch say of its samples: each scores the samples of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import torch

from troupe.workers.algorithms.policy_loss import kl_penalty
from troupe.workers.contract.messages import TEACHER_TOKENS, TEACHER_WEIGHTS
from troupe.workers.models.ragged import Ragged, list_column


@dataclass(frozen=True)
class Teacher:
    """The scores of one teacher."""

    name: str
    """Empty for the reference."""
    weights: torch.Tensor
    """float64 [rows]: weight of its loss; 0 for the rows that it does not score."""
    logprobs: torch.Tensor
    """float32, of the response tokens of the rows that it scores."""
    tokens: tuple[Ragged, ...] = ()
    """`TEACHER_TOKENS` of these rows, or empty if they are not compared."""


def targets(teachers: Sequence[Teacher], sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, weights), float64 [T]: the sums of the teachers' weighted log-probs, and of the weights. `sequence`:
    int64 [T], the row of each response token."""
    logprobs, weights = torch.zeros(2, len(sequence), dtype=torch.double)
    for one in teachers:
        own = one.weights[sequence]
        scored = own > 0
        logprobs[scored] += own[scored] * one.logprobs.double()
        weights += own
    return logprobs, weights


def kl_metrics(
    teachers: Sequence[Teacher], logprobs: torch.Tensor, sequence: torch.Tensor, chosen: torch.Tensor
) -> dict[str, float]:
    """Mean KL(policy || teacher) of the `chosen` tokens (bool [T]) that each teacher scores, by k3."""
    metrics: dict[str, float] = {}
    for one in teachers:
        scored = one.weights[sequence] > 0
        kl = kl_penalty(logprobs[scored].double(), one.logprobs.double(), "k3")[chosen[scored]]
        metrics[f"kl_{one.name}" if one.name else "kl_ref"] = float(kl.mean()) if len(kl) else 0.0
    return metrics


def train_columns(teachers: Sequence[Teacher], lengths: torch.Tensor, whole: Sequence[str] = ()) -> dict[str, pa.Array]:
    """The columns of TRAIN that have the teachers' likeliest tokens and weights, or none if none are compared. Every
    row has room for as many teachers as the row with the most, and for one in a batch that no teacher scores. What no
    teacher has written has weight 0. `whole`: names of the teachers that compare all of their logits: every row has
    their weights alone, in this order. `lengths`: int64 [rows], response tokens."""
    if whole:
        given = {one.name: one.weights for one in teachers}
        weights = torch.stack([given.get(name, torch.zeros(len(lengths)).double()) for name in whole], -1).float()
        each = torch.full_like(lengths, len(whole))
        return {TEACHER_WEIGHTS.name: list_column(weights.flatten(), each, pa.float32())}
    if teachers and not teachers[0].tokens:
        return {}
    given = torch.stack([one.weights > 0 for one in teachers]) if teachers else torch.zeros(0, len(lengths)).bool()
    places, slots = given.long().cumsum(0) - 1, max(1, int(given.long().sum(0).max()))
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    widths = [1, 2]
    if teachers:
        tokens = max(1, int(lengths[given[0]].sum()))
        widths = [len(one.values) // tokens for one in teachers[0].tokens]
    weights = torch.zeros(len(lengths), slots)
    columns = [
        torch.arange(widths[0], dtype=torch.int32).repeat(len(sequence), slots, 1),
        torch.zeros(len(sequence), slots, widths[1]),
    ]
    for one, scored, place in zip(teachers, given, places, strict=True):
        weights[scored, place[scored]] = one.weights[scored].float()
        at = scored[sequence]
        for column, values, width in zip(columns, one.tokens, widths, strict=True):
            column[at, place[sequence][at]] = values.values.view(-1, width).to(column.dtype)
    arrays = {
        field.name: list_column(column.flatten(), lengths * slots * column.shape[-1], field.type.value_type)
        for field, column in zip(TEACHER_TOKENS, columns, strict=True)
    }
    each = torch.full_like(lengths, slots)
    return arrays | {TEACHER_WEIGHTS.name: list_column(weights.flatten(), each, pa.float32())}
