"""The size of a model, from its folder alone: `config.json` and the headers of its safetensors files.

No tensor is read. The headers give every tensor's shape, which is exact for every architecture. Without weight files,
the parameters of known families are computed from the configuration (`families.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from troupe.orchestrator.errors import TroupeError
from troupe.orchestrator.model_facts.families import (
    FieldUnknown,
    ModelShape,
    count_of,
    fused_experts,
    has_own_head,
    shape_of,
    with_defaults,
)
from troupe.workers.contract.model_files import weight_files

CONFIG_BYTES = 1 << 20
"""Size limit of a config.json."""
_HEADER_BYTES = 32 << 20
"""Longest header that is parsed: one of 200 000 tensors. The safetensors library reads 100 MB, which as Python objects
are gigabytes."""
_MOST_DIMENSIONS = 16
_MOST = 1 << 50
"""Largest dimension, and largest number of parameters, that is not taken for a broken file."""

_HEADS = ("lm_head.weight", "lm_head.bias", "language_model.lm_head.weight")
_SCORES = ("score.weight", "score.bias")
_BUFFERS = ("rotary_emb.inv_freq", "attn.masked_bias", "gate.e_score_correction_bias", "position_ids")
"""Ends of names of tensors in checkpoints that are not parameters."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class SizeUnknown(TroupeError):
    """The size of a model cannot be determined from its folder; the message gives the reason."""


@dataclass(frozen=True)
class ModelSize(ModelShape):
    """A causal language model's shape and size. Counts are of numbers, not of bytes."""

    backbone: int = 0
    """Parameters without the output head."""
    head: int = 0
    """Parameters of the output head; 0 if it shares the embedding's weight."""
    largest: int = 0
    """Numbers in the largest tensor."""
    counted: bool = False
    """Whether parameters are counted in the files; otherwise they are computed from the configuration."""
    packed: int = 0
    """Bytes of quantized weights, as they are stored; 0: the weights are not quantized."""
    method: str = ""
    """How the weights are quantized: `awq`, `gptq`, `fp8`, ...; empty if they are not."""

    @property
    def parameters(self) -> int:
        """Parameters of the causal language model."""
        return self.backbone + self.head

    @property
    def module(self) -> int:
        """Parameters of the largest module, which ZeRO-3 gathers whole."""
        return max(self.largest, self.expert_weights)

    def multiplied(self, tokens: float = 1) -> int:
        """Parameters that so many tokens are multiplied with: experts one passes through, no embedding looked up."""
        idle = (1 - self.experts / self.routed) ** tokens if self.routed else 0.0
        looked_up = self.vocabulary * self.hidden if self.head else 0
        return self.parameters - looked_up - int(idle * self.sparse * self.expert_weights)

    def divided_experts(self, ranks: int) -> ModelSize:
        """The same model as ranks gather it that divide the experts of every layer among them."""
        own = self.expert_weights // ranks  # gate, up and down are a tensor each
        fused = self.largest == 2 * self.expert_weights // 3
        largest = max(self.vocabulary * self.hidden, own // 3) if fused else self.largest
        return replace(self, largest=largest, expert_weights=own)

    def with_score(self) -> ModelSize:
        """The same backbone with a head of one score (critics, reward models)."""
        return replace(self, head=self.hidden)


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    numbers: int
    bytes: int
    """0: the header does not say."""
    end: int
    """Where its bytes end, counted from the end of the header; 0 if the header does not contain it."""


def read_size(folder: Path) -> ModelSize:
    """Size of the model in a folder. Raises SizeUnknown."""
    path = folder / "config.json"
    config = read_config(folder)
    tensors = list(_tensors(folder))
    method = quantization(config)
    try:
        if not tensors:
            return _from_config(config, folder, method)
        size = _from_tensors(config, tensors, folder)
    except FieldUnknown as error:
        raise SizeUnknown(f"{path}: {error}") from None
    return replace(size, packed=sum(tensor.bytes for tensor in tensors), method=method) if method else size


def read_config(folder: Path) -> Mapping[str, Any]:
    """The configuration of a folder's language model, with what its family leaves out. Raises SizeUnknown."""
    config = _object(folder / "config.json", CONFIG_BYTES)
    text = config.get("text_config")
    return with_defaults(config | text if isinstance(text, dict) else config)


def config_or_empty(folder: Path) -> dict[str, Any]:
    """The config.json of a folder as it is; empty if it cannot be read."""
    try:
        return _object(folder / "config.json", CONFIG_BYTES)
    except SizeUnknown:
        return {}


def check_weights(folder: Path) -> None:
    """Verify that the weight files of a folder are there and complete, by their headers. Raises SizeUnknown if a file
    is missing, is no safetensors file, or ends before its tensors do."""
    for path in _weight_files(folder):
        tensors = list(tensors_of(path))
        header = 8 + _header_length(path)
        size, stored = path.stat().st_size, header + max((tensor.end for tensor in tensors), default=0)
        if size < stored:
            raise SizeUnknown(f"{path} is incomplete: it has {size} of {stored} bytes; download or copy it again")


def lacks_head(folder: Path) -> bool:
    """Whether the files lack the separate output head of their model. Raises SizeUnknown if they cannot be read."""
    if not has_own_head(read_config(folder)):
        return False
    names = {tensor.name for tensor in _tensors(folder)}
    return any(name.endswith("embed_tokens.weight") for name in names) and names.isdisjoint(_HEADS)


def quantization(config: Mapping[str, Any]) -> str:
    """How the weights are quantized (`awq`, `gptq`, `fp8`, ...) by config.json; empty if they are not."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return ""
    return str(found.get("quant_method") or "quantized")[:40]


def _from_tensors(config: Mapping[str, Any], tensors: list[Tensor], folder: Path) -> ModelSize:
    shape = shape_of(config)
    own = {tensor.name: tensor.numbers for tensor in tensors if _is_loaded(tensor.name, shape.layers)}
    head = sum(own.pop(name, 0) for name in _HEADS)
    for name in _SCORES:
        own.pop(name, None)
    if not own:
        raise SizeUnknown(f"{folder}: its safetensors files hold no model")
    tied = config.get("tie_word_embeddings", head == 0)  # some files hold the shared weight twice
    head = 0 if tied else head or shape.vocabulary * shape.hidden  # a reward model's folder has none
    largest = max(head, fused_experts(config), *own.values())
    return ModelSize(**vars(shape), backbone=sum(own.values()), head=head, largest=largest, counted=True)


def _is_loaded(name: str, layers: int) -> bool:
    """Whether transformers loads the tensor: no buffer, no layer of further tokens (numbered last by DeepSeek-V3)."""
    layer = _LAYER.match(name)
    return not name.endswith(_BUFFERS) and (layer is None or int(layer[1]) < layers)


def _from_config(config: Mapping[str, Any], folder: Path, method: str) -> ModelSize:
    if method:
        raise SizeUnknown(
            f"{folder} has no *.safetensors, and only these tell the size of weights quantized by {method}"
        )
    count = count_of(config)
    if count is None:
        kind = str(config.get("model_type"))[:40]
        raise SizeUnknown(f"{folder} has no *.safetensors, and the config of a {kind} does not tell its size")
    shape = shape_of(config)
    return ModelSize(**vars(shape), backbone=count.backbone, head=count.head, largest=count.largest)


def _tensors(folder: Path) -> Iterator[Tensor]:
    """Every tensor that transformers would load."""
    for path in _weight_files(folder):
        yield from tensors_of(path)


def _weight_files(folder: Path) -> list[Path]:
    try:
        return weight_files(folder)
    except OSError as error:
        raise SizeUnknown(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise SizeUnknown(str(error)) from None


def _is_size(number: object) -> bool:
    """Whether this is a dimension of a tensor."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MOST


METADATA = "__metadata__"
"""Entry of a safetensors file's header that is no tensor."""


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: the file begins with its length (8 bytes, little-endian) and a JSON object.
    Raises SizeUnknown if the file cannot be read or is not valid."""
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
    return header


def tensors_of(path: Path) -> Iterator[Tensor]:
    """Every tensor of a safetensors file, from its header. Raises SizeUnknown if the file cannot be read or is not
    valid."""
    for name, entry in read_header(path).items():
        if name == METADATA:
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS or not all(map(_is_size, shape)):
            raise SizeUnknown(f"{path}: the header gives {name[:60]!r} no shape")
        count = math.prod(shape)
        if count >= _MOST:
            raise SizeUnknown(f"{path}: the header gives {name[:60]!r} an impossible shape")
        start, end = _stored(entry.get("data_offsets"))
        yield Tensor(name, count, end - start, end)


def _stored(offsets: Any) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end; 0 and 0 if the header does not contain it."""
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        return 0, 0
    start, end = offsets
    return (start, end) if 0 <= start <= end < _MOST else (0, 0)


def _header_length(path: Path) -> int:
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


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
