"""A whole model of an adapter's folder and the model below it, for `troupe export --merge`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from troupe.workers.contract.adapter_config import SCORES
from troupe.workers.contract.config import ModelConfig
from troupe.workers.data.tokenizer import copy_tokenizer
from troupe.workers.models.adapter_folder import add_adapter, read_adapter


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
