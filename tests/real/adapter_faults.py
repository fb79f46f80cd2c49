"""Faults of adapters inside an engine's process, for the tests of the rollout worker. vLLM imports it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from troupe.workers.weights.vllm_adapter import AdapterExtension, AdapterTransferEngine

Tensors = dict[str, torch.Tensor]


class FaultyAdapterExtension(AdapterExtension):
    """Plants faults in the process that holds the engine's model."""

    model_runner: Any
    rank: int

    def plant(self, fault: str, rank: int | None = None) -> None:
        """Plants a fault, in one rank of the engine or in all."""
        if rank not in (None, self.rank):
            return
        if fault == "no effect":
            _without_effect(self.model_runner)
        else:
            _replace(AdapterTransferEngine, "_install", _installing(_FAULTS[fault]))

    def cure(self) -> None:
        """Removes every fault."""
        while _CURES:
            _CURES.pop()()


_CURES: list[Callable[[], None]] = []
_INSTALL = AdapterTransferEngine._install
_installed: list[Tensors] = []


def _remember(self: AdapterTransferEngine, version: Any, tensors: Tensors) -> None:
    _installed.append(tensors)
    _INSTALL(self, version, tensors)


AdapterTransferEngine._install = _remember


def _discard(self: CPUWorker, tags: tuple[str, ...]) -> None:
    """What a GPU's memory holds after it was given away and taken back. vLLM's CPU build refuses to release any."""
    assert tags == ("kv_cache",)
    for cache in self.model_runner.kv_caches:
        cache.fill_(7.0)


CPUWorker.discard = _discard


def _replace(owner: Any, name: str, value: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, value)
    _CURES.append(lambda: setattr(owner, name, old))


def _installing(change: Callable[[Tensors], Tensors | None]) -> Callable[..., None]:
    def install(self: AdapterTransferEngine, version: Any, tensors: Tensors) -> None:
        changed = change(tensors)
        if changed is not None:
            _INSTALL(self, version, changed)

    return install


def _scaled(tensors: Tensors) -> Tensors:
    return {name: 2 * tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}


_FAULTS: dict[str, Callable[[Tensors], Tensors | None]] = {
    "not pushed": lambda tensors: None,
    "previous version": lambda tensors: _installed[-1],
    "half the tensors": lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.0" in name},
    "wrong scale": _scaled,
}


def _without_effect(runner: Any) -> None:
    for wrapper in runner.model.lora_manager.punica_wrapper_mapping.values():
        _replace(wrapper, "add_lora_linear", lambda *args, **kwargs: None)
