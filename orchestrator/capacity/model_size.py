"""The size of a model, from its folder alone: `config.json` and the headers of its safetensors files.

No tensor is read. The headers give every tensor's shape, which is exact for every architecture. Without weight files,
the parameters of Llama and similar architectures are computed from the configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import TroupeError

_CONFIG_BYTES = 1 << 20
_INDEX_BYTES = 64 << 20
_HEADER_BYTES = 32 << 20
"""Longest header that is parsed: one of 200 000 tensors. The safetensors library reads 100 MB, which as Python objects
are gigabytes."""
_MOST_DIMENSIONS = 16
_MOST_FILES = 10_000
_MOST = 1 << 50
"""Largest dimension, and largest number of parameters, that is not taken for a broken file."""

_FORMULA = {"llama", "mistral", "qwen2", "qwen3"}
"""Model types whose parameters `_from_config` counts."""
_HEADS = ("lm_head.weight", "lm_head.bias")
_SCORES = ("score.weight", "score.bias")
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias")
"""Ends of names of tensors in old checkpoints that are not parameters."""


class SizeUnknown(TroupeError):
    """The size of a model cannot be determined from its folder; the message says why."""


@dataclass(frozen=True)
class ModelSize:
    """A causal language model's shape. Counts are of numbers, not of bytes."""

    backbone: int
    """Parameters without the output head."""
    head: int
    """Parameters of the output head; 0 where it shares the embedding's weight."""
    largest: int
    """Numbers in the largest tensor."""
    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward layers that one token passes through."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    counted: bool
    """Whether parameters are counted in the files; otherwise they are computed from the configuration."""

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model."""
        return self.backbone + self.head

    def with_score(self) -> ModelSize:
        """The same backbone with a head of one score (critics, reward models)."""
        return replace(self, head=self.hidden)


def read_size(folder: Path) -> ModelSize:
    """Size of the model in a folder. Raises SizeUnknown."""
    config = _object(folder / "config.json", _CONFIG_BYTES)
    text = config.get("text_config")
    shape = config | text if isinstance(text, dict) else config
    tensors = dict(_tensors(folder))
    return _from_tensors(shape, tensors, folder) if tensors else _from_config(shape, folder)


def _from_tensors(config: Mapping[str, Any], tensors: Mapping[str, int], folder: Path) -> ModelSize:
    own = {name: count for name, count in tensors.items() if not name.endswith(_BUFFERS)}
    head = sum(own.pop(name, 0) for name in _HEADS)
    for name in _SCORES:
        own.pop(name, None)
    if not own:
        raise SizeUnknown(f"{folder}: its safetensors files hold no model")
    dims = _dimensions(config, folder)
    tied = config.get("tie_word_embeddings", head == 0)  # some files hold the shared weight twice
    head = 0 if tied else head or dims["vocabulary"] * dims["hidden"]  # a reward model's folder has none
    return ModelSize(backbone=sum(own.values()), head=head, largest=max(head, *own.values()), counted=True, **dims)


def _from_config(config: Mapping[str, Any], folder: Path) -> ModelSize:
    """Llama (arXiv 2302.13971): per layer q, k, v, o, gate, up, down and two norms; Qwen2 has biases on q, k and v,
    Qwen3 norms over each head's q and k."""
    kind = config.get("model_type")
    if kind not in _FORMULA:
        raise SizeUnknown(f"{folder} has no *.safetensors, and the config of a {str(kind)[:40]} does not tell its size")
    dims = _dimensions(config, folder)
    hidden, intermediate = dims["hidden"], dims["intermediate"]
    q, kv = dims["heads"] * dims["head_dim"], dims["kv_heads"] * dims["head_dim"]
    layer = hidden * (2 * q + 2 * kv) + 3 * hidden * intermediate + 2 * hidden
    if kind == "qwen2":
        layer += q + 2 * kv
    elif config.get("attention_bias"):
        layer += q + 2 * kv + hidden
    if config.get("mlp_bias"):
        layer += 2 * intermediate + hidden
    if kind == "qwen3":
        layer += 2 * dims["head_dim"]
    embedding = dims["vocabulary"] * hidden
    return ModelSize(
        backbone=embedding + dims["layers"] * layer + hidden,
        head=0 if config.get("tie_word_embeddings") else embedding,
        largest=max(embedding, hidden * intermediate, hidden * q),
        counted=False,
        **dims,
    )


def _dimensions(config: Mapping[str, Any], folder: Path) -> dict[str, int]:
    def whole(*names: str, default: int | None = None) -> int:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < _MOST:
            raise SizeUnknown(f"{folder / 'config.json'}: {names[0]} is {str(found)[:40]}, not a whole number above 0")
        return found

    hidden = whole("hidden_size", "n_embd", "d_model")
    heads = whole("num_attention_heads", "n_head")
    # In a mixture of experts, a token passes through some experts; the others cost weights, not activations.
    experts = whole("num_experts_per_tok", default=1)
    width = whole("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return {
        "layers": whole("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "intermediate": experts * width,
        "heads": heads,
        "kv_heads": whole("num_key_value_heads", default=heads),
        "head_dim": whole("head_dim", default=max(1, hidden // heads)),
        "vocabulary": whole("vocab_size"),
    }


def _tensors(folder: Path) -> Iterator[tuple[str, int]]:
    """(name, numbers in it) of every tensor that transformers would load."""
    for path in _weight_files(folder):
        yield from read_header(path)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: the single one, else those in the index. A folder may hold further copies."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))[:_MOST_FILES]
    named = _object(index, _INDEX_BYTES).get("weight_map")
    names = set(named.values()) if isinstance(named, dict) and all(map(_is_name, named.values())) else set()
    if not names or len(names) > _MOST_FILES:
        raise SizeUnknown(f"{index}: its weight_map names no files of this folder")
    return [folder / name for name in sorted(names)]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value == Path(value).name and value.endswith(".safetensors")


def read_header(path: Path) -> Iterator[tuple[str, int]]:
    """(name, numbers in it) of every tensor of a safetensors file, from its header.

    The file begins with the header's length (8 bytes, little-endian) and the header, a JSON object.

    Raises:
        SizeUnknown: The file cannot be read or is not valid.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            left = path.stat().st_size - 8
            if not 0 < length <= min(left, _HEADER_BYTES):
                raise SizeUnknown(f"{path} is not a safetensors file: a header of {length} bytes in {max(left, 0)}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise SizeUnknown(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise SizeUnknown(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise SizeUnknown(f"{path} is not a safetensors file: its header is not a JSON object")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        whole = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
        if not whole or not all(type(n) is int and 0 <= n < _MOST for n in shape):
            raise SizeUnknown(f"{path}: the header gives {name[:60]!r} no shape")
        count = math.prod(shape)
        if count >= _MOST:
            raise SizeUnknown(f"{path}: the header gives {name[:60]!r} an impossible shape")
        yield name, count


def _object(path: Path, most: int) -> dict[str, Any]:
    """A JSON object of at most `most` bytes. Raises SizeUnknown."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(most))
    except OSError as error:
        raise SizeUnknown(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise SizeUnknown(f"{path} is not JSON") from None
    if not isinstance(found, dict):
        raise SizeUnknown(f"{path} is not a JSON object")
    return found
