"""Two checksums of a tensor, computed on its device."""

from __future__ import annotations

import torch

_ROW_WORDS = 4096


def checksum(words: torch.Tensor) -> torch.Tensor:
    """int64 [2] of int32 [n], modulo 2^64: their sum, and the sum weighted by their positions.

    Any change of one word changes the first, words that change places change the second. Sums of rows
    and columns give the weighted sum without a weighted copy.
    """
    rows, rest = divmod(words.numel(), _ROW_WORDS)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    if rows:
        table = words[: rows * _ROW_WORDS].view(rows, _ROW_WORDS)
        by_row, by_column = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
        total[0] = by_row.sum()
        total[1] = _ROW_WORDS * _weighted(by_row) + _weighted(by_column)
    if rest:
        tail = words[rows * _ROW_WORDS :].to(torch.int64)
        total[0] += tail.sum()
        total[1] += _weighted(tail) + rows * _ROW_WORDS * tail.sum()
    return total


def _weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.arange(values.numel(), device=values.device)).sum()
