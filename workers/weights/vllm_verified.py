"""The engine of a model that must be the expected one: it digests the weights that it loads from the model's files.

vLLM imports this module in each of its worker processes before it loads the model, because `VerifiedExtension` is the
`worker_extension_cls`. The tensors are hashed as the loader yields them, so that the digest is of what was loaded.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
import xxhash
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from troupe.workers.contract.model_files import tensors_digest_of
from troupe.workers.weights.vllm_transfer import EngineExtension

_load = DefaultModelLoader.get_all_weights


def digested_weights(
    self: DefaultModelLoader, model_config: ModelConfig, model: nn.Module
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The weights that the loader reads. Notes their digest once all of them have been taken."""
    digests = dict[str, str]()
    for name, tensor in _load(self, model_config, model):
        digests[name] = xxhash.xxh3_128_hexdigest(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        yield name, tensor
    VerifiedExtension.troupe_digest = VerifiedExtension.troupe_digest or tensors_digest_of(digests)


class VerifiedExtension(EngineExtension):
    """An engine's process that reports which model it has loaded."""

    troupe_digest = ""
    """Digest of the weights of the first model that this process has loaded (a draft model is another), or empty."""

    def troupe_model_digest(self) -> str:
        return VerifiedExtension.troupe_digest


DefaultModelLoader.get_all_weights = digested_weights
