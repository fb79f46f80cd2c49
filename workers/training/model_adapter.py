"""A model's adapters as the trainer publishes, saves, exports and merges them.

A published version describes itself: with the tensors goes a description with peft's configuration and the digest of
the model below, so that the digest of a version covers all three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from troupe.workers.contract.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_DIGEST, SCORES
from troupe.workers.contract.config import LoraConfig, ModelConfig
from troupe.workers.data.tokenizer import copy_tokenizer
from troupe.workers.models.adapter import Adapter
from troupe.workers.models.adapter_files import DESCRIPTION, Description, add_adapter, as_bytes, read_adapter
from troupe.workers.models.digests import base_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelAdapter(Adapter):
    """The adapters of the model that a rank trains."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, source: ModelConfig, seed: int = 0) -> None:
        """Add the adapters to the model (see `Adapter`).

        Args:
            model: The model.
            config: The adapters.
            source: The folder that the model was loaded from, and the adapter that training starts from.
            seed: What A is drawn from.

        Raises:
            OSError: A folder cannot be read.
            ValueError: A target names no linear layer of the model, or the adapter does not fit.
        """
        super().__init__(model, config, seed)
        self.base = base_digest(source.path)
        """Digest of the model's files."""
        if source.adapter is not None:
            start = read_adapter(source.adapter)
            start.require_base(source.path)
            self.start_from(start)

    def description(self) -> torch.Tensor:
        """Description of the tensors of a version, uint8 [bytes]."""
        return as_bytes(Description(base=self.base, config=self.peft_config("")).to_json())

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, live tensor) of everything that a version consists of, the description first."""
        yield DESCRIPTION, self.description()
        yield from ((name, parameter.detach()) for name, parameter in self.named_parameters())

    def write(self, folder: Path, base: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Write peft's folder of an adapter, which transformers, peft and vLLM load.

        Args:
            folder: The folder; it is made.
            base: Folder of the model below.
            weights: What `published` yields, on the CPU.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor for name, tensor in weights.items() if name != DESCRIPTION}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE_DIGEST: self.base})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.peft_config(base), indent=2) + "\n")


def merge(request: dict[str, str]) -> Iterator[dict[str, int]]:
    """Write the model that computes what an adapter and the model below it compute together.

    Args:
        request: `adapter`, peft's folder; `target`, the folder to write; `base`, the folder of the model below, whose
            tokenizer is copied. Without it, the model that the adapter names, and the adapter's tokenizer.

    Yields:
        The number of layers that had an adapter.

    Raises:
        ValueError: The model below is not the one that the adapter was trained on, or lacks one of its layers.
        OSError: A folder cannot be read or written.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    adapter, target = read_adapter(request["adapter"]), Path(request["target"])
    base = request.get("base") or str(adapter.config["base_model_name_or_path"])
    adapter.require_base(base)
    dtype = next(iter(adapter.tensors.values())).dtype  # of the run: what the adapter was added to
    arguments: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
    if adapter.config["task_type"] == SCORES:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, **arguments)
    else:
        model = AutoModelForCausalLM.from_pretrained(base, **arguments)
    layers = add_adapter(model, adapter)
    model.save_pretrained(target)
    copy_tokenizer(ModelConfig(path=request.get("base", str(adapter.path))), target)
    yield {"layers": layers}
