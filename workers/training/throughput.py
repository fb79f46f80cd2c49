"""Measures the padding in an update's work and the speed of the ranks."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from troupe.workers.contract.config import Device
from troupe.workers.models.modeling import ModelModule
from troupe.workers.models.token_batch import TokenBatch
from troupe.workers.training.group import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "B200": 2250e12,
}
"""Floating-point operations per second of dense bfloat16 products, by a part of the GPU's name, from NVIDIA's data
sheets; the first entry that fits counts."""


class UpdateMeter:
    """Tokens and seconds of one update on one rank."""

    def __init__(self, module: ModelModule, device: Device) -> None:
        """Start the clock for an update of `module`."""
        self._module = module
        self._device: Device = device
        self._began = time.perf_counter()
        self._tokens = self._padding = 0.0

    def note(self, batch: TokenBatch) -> None:
        """Count this worker's part of a micro-batch."""
        sharing = 1 if self._module.sequence is None else self._module.sequence.size
        self._tokens += batch.input_ids.numel() / sharing
        self._padding += batch.padding / sharing

    def metrics(self) -> dict[str, float]:
        """`padding`, `tokens_per_s` of one worker and, if the peak of every rank is known, `mfu`. Collective.

        Attention and what gradient checkpointing computes again do not count as used.
        """
        seconds = all_reduce({"seconds": time.perf_counter() - self._began}, self._device, "max")["seconds"]
        peak = (peak_flops(torch.cuda.get_device_name()) if self._device == "cuda" else None) or math.nan
        sums = {"tokens": self._tokens, "padding": self._padding, "peak": peak}
        totals = all_reduce(sums, self._device, "sum")  # the ranks may have GPUs of several types
        rate = (totals["tokens"] - totals["padding"]) / seconds / dist.get_world_size()
        found = {"padding": totals["padding"] / max(totals["tokens"], 1.0), "tokens_per_s": rate}
        peak = totals["peak"] / dist.get_world_size()
        used = None if math.isnan(peak) else operations(self._module)
        return found if used is None else found | {"mfu": used * rate / peak}


def operations(module: ModelModule) -> int | None:
    """Floating-point operations of a token in an update; None for a mixture of experts.

    Two for each parameter that it is multiplied with in the forward pass, two for the gradient of the activations,
    and two for the parameter's if it trains.
    """
    model: PreTrainedModel = module.model
    if any("expert" in name for name in model.config.get_text_config().to_dict()):
        return None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    looked_up = () if head is not None and head.weight is embedding else (embedding,)
    # Under ZeRO-3 a parameter is empty, and `ds_numel` is its whole size.
    sizes = ((p, int(getattr(p, "ds_numel", p.numel()))) for p in module.parameters())
    used = [(p.requires_grad, size) for p, size in sizes if not any(p is other for other in looked_up)]
    return sum((6 if trains else 4) * size for trains, size in used)


def peak_flops(name: str) -> float | None:
    """The peak of the GPU with this name; None if unknown."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
