"""vLLM worker extension of `benchmarks.weight_sync`. vLLM imports this module in its worker process.

It times the parts of a weight update, by functions of a run's extension, and adds the two baselines: loading weights
that are already in the process's memory (the limit), and vLLM's reload of a folder (the common practice).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from benchmarks.support.timing import Parts
from troupe.workers.contract.messages import WeightUpdate
from troupe.workers.weights import file as weight_file
from troupe.workers.weights import vllm_transfer as weight_transfer
from troupe.workers.weights.reload import ModelReload
from troupe.workers.weights.shared_memory import FileMapping

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

PARTS = Parts()
"""`open`, `verify` and `load`."""
_open_weights = weight_transfer.open_weights


@contextmanager
def _watched_open(update: WeightUpdate, mapping: FileMapping | None = None) -> Iterator[weight_file.MappedWeights]:
    with PARTS.timed("open"):
        opened = _open_weights(update, mapping)
        weights = opened.__enter__()
    try:
        yield weights
    finally:
        opened.__exit__(None, None, None)


class MeasuredExtension(weight_transfer.EngineExtension):
    """Methods that vLLM adds to its worker class."""

    model_runner: GPUModelRunner
    model_config: ModelConfig
    device: torch.device
    _weights_held: Sequence[tuple[str, torch.Tensor]]

    def troupe_update_parts(self) -> dict[str, float]:
        """Seconds by part of the updates since the last call."""
        return PARTS.read()

    def hold(self, update: dict[str, Any]) -> None:
        """Copy a published version into this process's own memory, on the model's device."""
        with weight_file.open_weights(weight_transfer.FileUpdateInfo(update).update()) as weights:
            self._weights_held = [(name, tensor.to(self.device, copy=True)) for name, tensor in weights.tensors()]

    def apply_held(self) -> float:
        """Load the held weights into the running model; returns the seconds it took."""
        model = self.model_runner.get_model()
        began = time.perf_counter()
        initialize_layerwise_reload(model)
        model.load_weights(iter(self._weights_held))  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(model, self.model_config)
        self.repack_heads()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        self._weights_held = ()
        return seconds

    def repack_heads(self) -> None:
        """Repack tied heads: on the CPU they keep a packed copy of their weight, which a reload does not update."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


weight_transfer.open_weights = _watched_open
PARTS.watch(weight_file.MappedWeights, "verify", "verify")
PARTS.watch(weight_transfer, "checksums", "verify")
PARTS.watch(weight_transfer, "weights_digest", "verify")
for method in ("begin", "load", "end"):
    PARTS.watch(ModelReload, method, "load")
