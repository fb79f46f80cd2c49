"""What a published version of adapters consists of: peft's tensors, and a description of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

PREFIX = "base_model.model."
"""What peft puts before a parameter's name in a file."""
DESCRIPTION = "adapter"
"""Name of the description among the tensors of a version."""


@dataclass(frozen=True)
class Description:
    """What the tensors of a version mean."""

    base: str
    """Digest of the files of the model below (`troupe.workers.models.base_files`)."""
    config: Mapping[str, Any]
    """Contents of peft's `adapter_config.json`."""

    def to_json(self) -> str:
        """The description as text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Description:
        """The description in a tensor that `as_bytes` made."""
        return cls(**json.loads(as_text(tensor)))


def as_bytes(text: str) -> torch.Tensor:
    """A text as a tensor, uint8 [bytes]."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def as_text(tensor: torch.Tensor) -> str:
    """The text in a tensor that `as_bytes` made."""
    return bytes(tensor.tolist()).decode()
