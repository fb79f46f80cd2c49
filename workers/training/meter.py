"""Measures and records the updates of a rank: speed, padding, a profile, and log-probs of the tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import torch
import torch.distributed as dist

from troupe.workers.contract.config_base import Device
from troupe.workers.contract.gpus import gpu_peaks
from troupe.workers.contract.messages import TOKEN_RECORDS
from troupe.workers.models.modeling import ModelModule
from troupe.workers.models.ragged import list_column
from troupe.workers.models.token_batch import TokenBatch
from troupe.workers.training.group import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UpdateMeter:
    """Tokens and seconds of one update on one rank."""

    def __init__(self, module: ModelModule, device: Device) -> None:
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
        """`padding`, `tokens_per_s` of one worker and, if all peaks are known, `mfu` (without attention and
        recomputation). Collective."""
        seconds = all_reduce({"seconds": time.perf_counter() - self._began}, self._device, "max")["seconds"]
        peaks = gpu_peaks(torch.cuda.get_device_name()) if self._device == "cuda" else None
        sums = {"tokens": self._tokens, "padding": self._padding, "peak": math.nan if peaks is None else peaks.flops}
        totals = all_reduce(sums, self._device, "sum")  # the ranks may have GPUs of several types
        rate = (totals["tokens"] - totals["padding"]) / seconds / dist.get_world_size()
        found = {"padding": totals["padding"] / max(totals["tokens"], 1.0), "tokens_per_s": rate}
        peak = totals["peak"] / dist.get_world_size()
        used = None if math.isnan(peak) else operations(self._module)
        return found if used is None else found | {"mfu": used * rate / peak}


def operations(module: ModelModule) -> int | None:
    """Floating-point operations of a token in an update, or None for a mixture of experts: two for each parameter in
    the forward pass, two for the gradient of the activations, and two for the parameter's if it trains."""
    model: PreTrainedModel = module.model
    if any("expert" in name for name in model.config.get_text_config().to_dict()):
        return None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    looked_up = () if head is not None and head.weight is embedding else (embedding,)
    # Under ZeRO-3 a parameter is empty, and `ds_numel` is its whole size.
    sizes = ((p, int(getattr(p, "ds_numel", p.numel()))) for p in module.parameters())
    used = [(p.requires_grad, size) for p, size in sizes if not any(p is other for other in looked_up)]
    return sum((6 if trains else 4) * size for trains, size in used)


@contextmanager
def profiled(trace: str, device: Device) -> Iterator[None]:
    """Record the block with torch's profiler in the file `trace` (for Chrome, Perfetto); nothing if it is empty."""
    if not trace:
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    Path(trace).parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(trace)


class TokenRecorder:
    """Log-probs and entropies of the rows that a rank trained on, since they were last taken."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, ...]] = []
        """Rows, lengths, log-probs and entropies of each micro-batch. They stay on their device until the update has
        ended: a copy would wait for it."""
        self._updates: list[pa.Table] = []

    def note(self, batch: TokenBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        """Keeps what a micro-batch gave: float [T] over its response tokens."""
        if len(batch.rows):
            self._parts.append((batch.rows, batch.lengths, logprobs.detach().clone(), entropy.detach().clone()))

    def end_update(self, table: pa.Table) -> None:
        """Takes the micro-batches noted since the last update as one update's, on rows of this TRAIN table."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        rows, lengths, logprobs, entropy = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        identity = table.select(TOKEN_RECORDS.names[:-2]).take(pa.array(rows.numpy()))
        columns = [list_column(values.float(), lengths, pa.float32()) for values in (logprobs, entropy)]
        arrays = [*(column.combine_chunks() for column in identity.columns), *columns]
        self._updates.append(pa.Table.from_arrays(arrays, schema=TOKEN_RECORDS))

    def take(self) -> pa.Table:
        """A TOKEN_RECORDS table of every update since the last call, in order; a row occurs once for each update."""
        updates, self._updates = self._updates, []
        return pa.concat_tables(updates) if updates else TOKEN_RECORDS.empty_table()
