"""Adapters into vLLM: an engine for its weight-transfer interface that loads a published version in place.

vLLM imports this module in its worker processes before it loads the model if `AdapterExtension` is the
`worker_extension_cls`. vLLM drops all adapters at the end of every update of weights, so that a version is received
within the update and put to use after it. What the process then reports to hold is read from the memory that the
layers multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.platforms import current_platform

from troupe.workers.engine.settings import ADAPTER_BACKEND, ADAPTER_ID
from troupe.workers.models.adapter_files import DESCRIPTION, Description
from troupe.workers.models.digests import base_digest
from troupe.workers.weights.adapter_slots import LayerAdapter, missing_parts, slot_problem
from troupe.workers.weights.cpu_kernels import multiply_at_once, multiply_experts_without_adapters
from troupe.workers.weights.vllm_transfer import EngineExtension, FileReader, FileUpdateInfo, LoadedWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

_PROBE_SIZE = 0.05
"""Standard deviation of B, scaling included, of the adapters that a probe samples with."""


class AdapterRefused(RuntimeError):
    """A version of adapters does not fit this engine."""


@dataclass(frozen=True)
class _Version:
    """A version that this process has received."""

    version: int
    digest: str
    description: Description
    tensors: dict[str, torch.Tensor]


class AdapterTransferEngine(FileReader):
    """Loads verified adapters for the model, which stays as it is."""

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            multiply_at_once()
        self._adapted: Any = model
        self._base = base_digest(vllm_config.model_config.model)
        self._received: _Version | None = None

    def start_weight_update(self) -> None:
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Verify a version and keep it. Raises WeightDigestMismatch, AdapterRefused, OSError."""
        update = update_info.update()
        with self._verified(update) as weights:
            # vLLM scales B in place, and the next version is written to the same memory.
            tensors = {name: tensor.clone() for name, tensor in weights.tensors()}
        if DESCRIPTION not in tensors:
            raise AdapterRefused(f"version {update.version} holds weights, not adapters")
        description = Description.of(tensors.pop(DESCRIPTION))
        if description.base != self._base:
            raise AdapterRefused(
                f"the adapters of version {update.version} were trained on another base model: its files have digest "
                f"{description.base}, those of this engine {self._base}"
            )
        self._received = _Version(update.version, update.digest, description, tensors)
        if problem := missing_parts(self._by_layer(tensors), description.config["r"]):
            raise AdapterRefused(f"version {update.version}: {problem}")

    def use(self) -> None:
        """Replace all adapters of the engine by the received version."""
        received = self._require()
        self._install(received, received.tensors)
        self.loaded = LoadedWeights(version=received.version, digest=received.digest, mismatch="")

    def use_probe(self) -> None:
        """Put adapters of the received version's form in place that change what the engine samples for certain."""
        received, generator = self._require(), torch.Generator().manual_seed(0)
        size = _PROBE_SIZE / self._settings(received).vllm_lora_scaling_factor
        noise = {
            name: (size * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in received.tensors.items()
            if ".lora_B." in name
        }
        self._install(received, received.tensors | noise)
        self.loaded = LoadedWeights(version=None, digest="", mismatch="")

    def held(self) -> LoadedWeights:
        """The version that this process multiplies with, by what is in its memory."""
        if self.loaded["version"] is None:
            return self.loaded
        received, manager = self._require(), self._adapted.lora_manager
        present = sorted(manager.list_adapters())
        if present != [ADAPTER_ID] or ADAPTER_ID not in manager.lora_index_to_id:
            problem = f"the engine holds {len(present)} adapters" if present else "the engine holds no adapter"
        else:
            adapters = {name: LayerAdapter(**parts) for name, parts in self._by_layer(received.tensors).items()}
            problem = slot_problem(
                manager.modules,
                manager.packed_modules,
                adapters,
                manager.lora_index_to_id.index(ADAPTER_ID),
                self._settings(received).vllm_lora_scaling_factor,
            )
        return LoadedWeights(version=None, digest="", mismatch=f"none: {problem}") if problem else self.loaded

    def _require(self) -> _Version:
        if self._received is None:
            raise RuntimeError("this engine has received no adapters")
        return self._received

    def _install(self, version: _Version, tensors: dict[str, torch.Tensor]) -> None:
        manager = self._adapted.lora_manager
        settings = self._settings(version)
        settings.validate_legal(manager.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in tensors.items()},
            settings,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=self._names(),
        )
        manager.remove_all_adapters()
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def _settings(self, version: _Version) -> PEFTHelper:
        return PEFTHelper.from_dict(dict(version.description.config))

    def _by_layer(self, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors `a` and `b` by vLLM's name of their layer."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            layer, is_a = parse_fine_tuned_lora_name(name, self._names())
            found.setdefault(layer, {})["a" if is_a else "b"] = tensor
        return found

    def _names(self) -> Any:
        """vLLM's names for Hugging Face's, or None if they are the same."""
        mapper = getattr(self._adapted, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()


class AdapterExtension(EngineExtension):
    """Methods that vLLM adds to its worker class, reachable through `collective_rpc`."""

    def troupe_use_adapter(self) -> None:
        self._adapters().use()

    def troupe_use_probe(self) -> None:
        self._adapters().use_probe()

    def troupe_loaded_weights(self) -> LoadedWeights:
        """Version that this process holds, read from its memory."""
        return self._adapters().held()

    def _adapters(self) -> AdapterTransferEngine:
        if not isinstance(self.weight_transfer_engine, AdapterTransferEngine):
            raise RuntimeError("this engine has no back-end for adapters")
        return self.weight_transfer_engine


if current_platform.is_cpu():
    multiply_experts_without_adapters()
WeightTransferEngineFactory.register_engine(ADAPTER_BACKEND, AdapterTransferEngine)
