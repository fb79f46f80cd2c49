"""Low-rank adapters inside a Hugging Face model, by peft: what trains, and the same model without it.

An adapter's tensors have the names of peft's files, `base_model.model.NAME.lora_A.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from troupe.workers.contract.config import ALL_LINEAR, LoraConfig
from troupe.workers.models.adapter_files import PREFIX
from troupe.workers.models.cpu import use_onednn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
"""peft's name of an adapter that is the only one."""


class Adapter:
    """The adapters of a model, which are the only parameters of it that train."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, seed: int = 0) -> None:
        """Put adapters around the targets of a model. They change nothing: B is 0.

        Args:
            model: The model; its parameters are frozen.
            config: The adapters.
            seed: What A is drawn from.

        Raises:
            ValueError: A target names no linear layer of the model.
        """
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model

        self.config = config
        self.targets = _targets(model, config)
        """Last part of the names of all layers that have an adapter, sorted."""
        settings = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]: peft only divides it
            target_modules=list(self.targets),
            exclude_modules=_head(model),
            use_rslora=config.rslora,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, model, _NAME)
        use_onednn(model)
        self._model = model
        self._layers: list[Any] = [module for module in model.modules() if _has_adapter(module)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in a file, live parameter) of every adapter."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield PREFIX + name.replace(f".{_NAME}.", "."), parameter

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model is the one that was loaded."""
        for layer in self._layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enable_adapters(True)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Contents of peft's `adapter_config.json`. `base`: folder or name of the model."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "use_rslora": self.config.rslora,
            "target_modules": list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }


def _has_adapter(module: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _head(model: PreTrainedModel) -> list[str]:
    """Name of the output head, which never has an adapter; empty where there is none."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if module is head and head is not None]


def _targets(model: PreTrainedModel, config: LoraConfig) -> tuple[str, ...]:
    """Last part of the names of the layers that have an adapter, sorted. Raises ValueError."""
    excluded = set(_head(model))
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in excluded
    }
    if config.targets == ALL_LINEAR:
        return tuple(sorted(linear))
    if unknown := [name for name in config.targets if name not in linear]:
        names = ", ".join(sorted(linear))
        raise ValueError(
            f"roles.policy.lora.targets: {type(model).__name__} has no linear layer {', '.join(unknown)}; "
            f"there are: {names}"
        )
    return tuple(sorted(set(config.targets)))
