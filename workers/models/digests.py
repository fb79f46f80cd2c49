"""Digests of weights: of a model's files, and of tensors on their device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash

from troupe.workers.contract.model_files import weight_files

_PIECE = 1 << 24
_CONFIG = "config.json"


def base_digest(folder: str | Path) -> str:
    """xxh3-128 of the configuration and of the weight files of a model, with their names. Raises OSError if a file
    cannot be read, or there are no weights, and ValueError if the index of the weights cannot be read."""
    root = Path(folder)
    files = weight_files(root)
    if not files:
        raise FileNotFoundError(f"{root} has no weights (safetensors)")
    state = xxhash.xxh3_128()
    for file in (root / _CONFIG, *files):
        state.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                state.update(piece)
    return state.hexdigest()


_ROW_WORDS = 4096
_WORD = 4
"""Bytes of a word of a checksum."""


def tensors_digest(tensors: Iterable[torch.Tensor]) -> str:
    """xxh3-128 of the bytes of the tensors, one after another; of a GPU's tensors, of two checksums of each: a copy
    to the host, hashed by one thread, took 1.2 s of 1.5 billion weights. Digests of GPU and CPU are not
    comparable."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        state.update((flat if flat.device.type == "cpu" else checksums(flat).cpu()).numpy().data)
    return state.hexdigest()


def checksums(flat: torch.Tensor) -> torch.Tensor:
    """int64 [3], on the device of uint8 [n]: its length, and its words' `checksum`, with up to three zeros appended."""
    padded = F.pad(flat, (0, -len(flat) % _WORD)) if len(flat) % _WORD or flat.storage_offset() % _WORD else flat
    sums = checksum(padded.view(torch.int32))
    return torch.cat((sums.new_tensor([len(flat)]), sums))


def checksum(words: torch.Tensor) -> torch.Tensor:
    """int64 [2] of int32 [n], modulo 2^64: their sum, and the sum weighted by their positions. A change of one word
    changes the first, words that change places the second. Sums of rows and columns avoid a weighted copy."""
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
