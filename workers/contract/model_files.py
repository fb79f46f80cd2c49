"""The weight files in a model's folder. transformers, vLLM and Troupe must read the same ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from troupe.workers.contract.adapter_config import ADAPTER_CONFIG

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_BYTES = 64 << 20
_MOST_FILES = 10_000
_SHOWN = 3


def weight_files(folder: str | Path) -> list[Path]:
    """The files that transformers loads: the single one, or the files of the index. If the folder has neither, all
    files of weights, which vLLM alone loads. Raises OSError or ValueError if the index cannot be read."""
    root = Path(folder)
    if (root / _SINGLE).is_file():
        return [root / _SINGLE]
    return _indexed(root) if (root / _INDEX).is_file() else sorted(root.glob("*.safetensors"))[:_MOST_FILES]


def tensors_digest_of(tensors: Mapping[str, str]) -> str:
    """SHA-256 of the tensors of a model, from the xxh3-128 of each one's bytes by name, in any order."""
    return hashlib.sha256(json.dumps(sorted(tensors.items())).encode()).hexdigest()


def check_model_files(folder: str | Path) -> None:
    """Raise OSError or ValueError if readers would load different weights of a folder: transformers adds an adapter
    beside the weights, vLLM loads every `*.safetensors`, or those of the index."""
    root = Path(folder)
    if (root / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{root} holds an adapter beside the model: transformers would add it, vLLM fails on it. Move "
            f"{ADAPTER_CONFIG} and adapter_model.* to another folder, and name that one in `adapter` to start from it"
        )
    own, found = set(weight_files(root)), set(root.glob("*.safetensors"))
    if (root / _INDEX).is_file():
        found &= set(_indexed(root))
    if names := sorted(path.name for path in own ^ found if path.is_file()):
        listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ValueError(f"{root}: {listed}: vLLM and transformers do not both load them; keep one copy of the weights")


def _indexed(root: Path) -> list[Path]:
    with (root / _INDEX).open("rb") as file:
        content = file.read(_INDEX_BYTES)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{root / _INDEX} is not JSON") from None
    named = found.get("weight_map") if isinstance(found, dict) else None
    names = set(named.values()) if isinstance(named, dict) and all(map(_is_name, named.values())) else set()
    if not names or len(names) > _MOST_FILES:
        raise ValueError(f"{root / _INDEX}: its weight_map names no files of this folder")
    return [root / name for name in sorted(names)]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value == Path(value).name and value.endswith(".safetensors")
