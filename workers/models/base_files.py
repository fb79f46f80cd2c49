"""Digest of a model's files: what a policy's adapters were trained on, and what an engine has loaded below them."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

_PIECE = 1 << 24
_CONFIG = "config.json"


def base_digest(folder: str | Path) -> str:
    """xxh3-128 of the configuration and of every safetensors file of a model, with their names.

    Args:
        folder: Folder of the model.

    Raises:
        OSError: A file cannot be read, or there are no weights.
    """
    root = Path(folder)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{root} has no safetensors files")
    state = xxhash.xxh3_128()
    for file in (root / _CONFIG, *files):
        state.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                state.update(piece)
    return state.hexdigest()
