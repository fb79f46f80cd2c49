"""Low-rank adapters in a Hugging Face model, by peft: what trains, and how it is published, saved, exported, merged.

An adapter's tensors have the names of peft's files, `base_model.model.NAME.lora_A.weight`. A published version is
complete: with the tensors goes a description with peft's configuration and the digest of the model below, so that the
digest of a version covers all three.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from troupe.workers.contract.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_DIGEST, SCORE, SCORES
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.contract.model_files import check_model_files
from troupe.workers.contract.trainer_config import ALL_LINEAR, LoraConfig
from troupe.workers.data.tokenizer import copy_tokenizer
from troupe.workers.models.adapter_files import (
    DESCRIPTION,
    PREFIX,
    AdapterBeside,
    AdapterFolder,
    Description,
    add_adapter,
    as_bytes,
    read_adapter,
)
from troupe.workers.models.cpu import use_onednn
from troupe.workers.models.digests import base_digest
from troupe.workers.models.partitioned import is_partitioned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
"""peft's name of an adapter that is the only one."""


class _ScaledInside:
    """A variant of peft's layer, W x + B (scaling A x): peft itself scales what B returns, which is much larger."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        """Add the adapter's part. `x`: [..., inputs]; `result`: [..., outputs], what the layer returns without it."""
        inside = module.lora_A[active_adapter](x) * module.scaling[active_adapter]
        return result + module.lora_B[active_adapter](inside)


class Adapter:
    """The adapters of a model. Only they train of it, and the score head of a reward model or critic, whole."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, seed: int = 0) -> None:
        """Put adapters (B is 0) around targets of a model, whose parameters are frozen. Raises ValueError."""
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.config = config
        self.targets = _targets(model, config)
        """Last part of the names of all layers that have an adapter, sorted."""
        settings = PeftConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]: peft only divides it
            target_modules=list(self.targets),
            exclude_modules=_heads(model),
            use_rslora=config.rslora,
        )
        self.whole = (SCORE,) if isinstance(getattr(model, SCORE, None), nn.Linear) else ()
        """Names of the modules that train whole: the head of a model from `load_value`, which is new."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, model, _NAME)
        for name in self.whole:
            model.get_submodule(name).requires_grad_(True)
        use_onednn(model)
        self._model = model
        self._layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in self._layers:
            layer.lora_variant[_NAME] = _ScaledInside
        self._start: AdapterBeside | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in a file, live parameter) of everything that trains."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield PREFIX + name.replace(f".{_NAME}.", "."), parameter

    def start_from(self, adapter: AdapterFolder) -> None:
        """Start from an adapter's tensors. Raises ValueError: no match, or a reward model under ZeRO-3."""
        own = dict(self.named_parameters())
        if adapter.config.get("task_type") == SCORES and any(map(is_partitioned, own.values())):
            raise ValueError(f"{adapter.path}: the adapter of a reward model cannot be trained on under ZeRO-3")
        expected = {name: tuple(parameter.shape) for name, parameter in own.items()}
        found = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
        if adapter.config.get("task_type") != SCORES:  # a new head begins at 0
            expected = {name: shape for name, shape in expected.items() if ".lora_" in name}
        if expected != found:
            name = min(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
            raise ValueError(
                f"{adapter.path} does not fit the adapters of the spec: {name} is {found.get(name, 'not there')}, "
                f"expected {expected.get(name, 'none')}"
            )
        with torch.no_grad():
            for name, tensor in adapter.tensors.items():
                own[name].copy_(tensor)
        if not self.whole:
            self._start = AdapterBeside(self._model, adapter)

    def as_started(self) -> AbstractContextManager[None]:
        """Inside the block the language model is the one that training started from."""
        return self.off() if self._start is None else self.replaced_by(self._start)

    @contextmanager
    def replaced_by(self, other: AdapterBeside) -> Iterator[None]:
        """Inside the block a frozen adapter replaces the trained ones."""
        with self.off(), other.added():
            yield

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
            "task_type": SCORES if self.whole else "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "use_rslora": self.config.rslora,
            "target_modules": list(self.targets),
            "modules_to_save": list(self.whole) or None,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
        }


def _heads(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers behind the backbone, which never have an adapter."""
    inside = {id(module) for module in model.base_model.modules()} if model.base_model is not model else set[int]()
    head = model.get_output_embeddings()
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name, module in linear if module is head or (inside and id(module) not in inside)]


def _targets(model: PreTrainedModel, config: LoraConfig) -> tuple[str, ...]:
    """Last part of the names of the layers that have an adapter, sorted. Raises ValueError."""
    excluded = set(_heads(model))
    blocks = tuple(f"{name.rpartition('.')[0]}." for name, _ in model.named_modules() if name.endswith(".experts"))
    linear, beside_experts = set[str](), set[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in excluded:
            (beside_experts if blocks and name.startswith(blocks) else linear).add(name.rpartition(".")[2])
    if config.targets == ALL_LINEAR:
        return tuple(sorted(linear))
    if inside := [name for name in config.targets if name in beside_experts]:
        raise ValueError(
            f"roles.policy.lora.targets: {type(model).__name__} has {', '.join(inside)} beside its experts, where "
            "adapters are not supported"
        )
    if unknown := [name for name in config.targets if name not in linear]:
        names = ", ".join(sorted(linear))
        raise ValueError(
            f"roles.policy.lora.targets: {type(model).__name__} has no linear layer {', '.join(unknown)}; "
            f"there are: {names}"
        )
    return tuple(sorted(set(config.targets)))


class ModelAdapter(Adapter):
    """The adapters of the model that a rank trains."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, source: ModelConfig, seed: int = 0) -> None:
        """Add the adapters to the model (see `Adapter`), whose folder and first adapter `source` names. Raises OSError
        if a folder cannot be read, and ValueError if a target names no linear layer of the model, or the adapter does
        not fit."""
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

    def write(self, folder: Path, base: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Write peft's folder of an adapter, for transformers, peft and vLLM; `base`: folder of the model below."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor for name, tensor in weights.items() if name != DESCRIPTION}
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE_DIGEST: self.base})
        (folder / ADAPTER_CONFIG).write_text(json.dumps(self.peft_config(base), indent=2) + "\n")


def merge(request: dict[str, str]) -> Iterator[dict[str, int]]:
    """Write the model that computes what an adapter and the model below it compute together; yields the number of
    layers that had an adapter.

    The request has `adapter`, peft's folder, `target`, the folder to write, and `base`, the folder of the model below,
    whose tokenizer is copied. Without it, the model that the adapter names, and the adapter's tokenizer. Raises
    ValueError if the model below is not the one that the adapter was trained on, or lacks one of its layers, and
    OSError if a folder cannot be read or written.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    adapter, target = read_adapter(request["adapter"]), Path(request["target"])
    base = request.get("base") or str(adapter.config["base_model_name_or_path"])
    check_model_files(base)
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
