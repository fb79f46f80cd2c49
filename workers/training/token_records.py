"""The policy's numbers for every token of a step's updates, kept for the run's samples."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import torch

from troupe.workers.contract.messages import TOKEN_RECORDS
from troupe.workers.models.ragged import list_column
from troupe.workers.models.token_batch import TokenBatch


@dataclass(frozen=True)
class _RecordedBatch:
    """One micro-batch. The tensors stay on their device until the update has ended: a copy would wait for it."""

    rows: torch.Tensor
    lengths: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor


class TokenRecorder:
    """Log-probs and entropies of the rows that a rank trained on, since they were last taken."""

    def __init__(self) -> None:
        self._parts: list[_RecordedBatch] = []
        self._updates: list[pa.Table] = []

    def note(self, batch: TokenBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        """Keeps what a micro-batch gave: float [T] over its response tokens."""
        if len(batch.rows):
            self._parts.append(
                _RecordedBatch(batch.rows, batch.lengths, logprobs.detach().clone(), entropy.detach().clone())
            )

    def end_update(self, table: pa.Table) -> None:
        """Takes the micro-batches noted since the last update as one update's, on rows of this TRAIN table."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        rows, lengths, logprobs, entropy = (
            torch.cat([getattr(part, name) for part in parts]).cpu()
            for name in ("rows", "lengths", "logprobs", "entropy")
        )
        identity = table.select(TOKEN_RECORDS.names[:-2]).take(pa.array(rows.numpy()))
        columns = [list_column(values.float(), lengths, pa.float32()) for values in (logprobs, entropy)]
        arrays = [*(column.combine_chunks() for column in identity.columns), *columns]
        self._updates.append(pa.Table.from_arrays(arrays, schema=TOKEN_RECORDS))

    def take(self) -> pa.Table:
        """A TOKEN_RECORDS table of every update since the last call, in order; a row occurs once for each update."""
        updates, self._updates = self._updates, []
        return pa.concat_tables(updates) if updates else TOKEN_RECORDS.empty_table()
