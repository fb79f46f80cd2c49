"""A whole model of an adapter's folder and the model below it, for `troupe export --merge`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from troupe.workers.contract.config import ModelConfig
from troupe.workers.data.tokenizer import copy_tokenizer
from troupe.workers.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_DIGEST, PREFIX
from troupe.workers.models.base_files import base_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def merge(request: dict[str, str]) -> Iterator[dict[str, int]]:
    """Write the model that computes what an adapter and the model below it compute together.

    Args:
        request: `adapter`, peft's folder; `target`, the folder to write.

    Yields:
        The number of layers that had an adapter.

    Raises:
        ValueError: The model below is not the one that the adapter was trained on, or lacks one of its layers.
        OSError: A folder cannot be read or written.
    """
    from transformers import AutoModelForCausalLM

    folder, target = Path(request["adapter"]), Path(request["target"])
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = str(config["base_model_name_or_path"])
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        trained_on, found = file.metadata().get(BASE_DIGEST, ""), base_digest(base)
        if trained_on != found:
            raise ValueError(
                f"{base} is not the model that the adapter was trained on: digest {trained_on}, now {found}"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dtype = next(iter(tensors.values())).dtype  # of the run: what the adapter was added to
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, local_files_only=True, use_safetensors=True)
    layers = add_adapters(model, tensors, config)
    model.save_pretrained(target)
    copy_tokenizer(ModelConfig(path=str(folder)), target)
    yield {"layers": layers}


@torch.no_grad()
def add_adapters(model: PreTrainedModel, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> int:
    """Add the adapters to the weights of a model in place, in float32 before rounding once; returns their number.

    Raises:
        ValueError: The model lacks a layer.
    """
    rank, alpha = config["r"], config["lora_alpha"]
    scaling = alpha / (rank**0.5 if config["use_rslora"] else rank)
    weights = dict(model.named_parameters())
    layers = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    for layer in layers:
        weight = weights.get(f"{layer}.weight")
        if weight is None:
            raise ValueError(f"{type(model).__name__} has no layer {layer}")
        a, b = (tensors[f"{PREFIX}{layer}.lora_{part}.weight"] for part in "AB")
        weight.copy_(weight.float() + scaling * (b.float() @ a.float()))
    return len(layers)
