"""Peak host memory of each rank while a model is loaded for ZeRO-3, against the size of the model.

    python -m benchmarks.zero3_loading
    python -m benchmarks.zero3_loading --dtype bfloat16 --ranks 4

Two ways to load the same files, each turn in new processes: the whole model on every rank, which DeepSpeed then
partitions, and the model partitioned while it is read, as the trainers load it. The model is a random Llama with few
wide layers, in float32 files. The peak is that of resident memory (VmHWM, reset before the model is loaded), without
what the process held before; pages of the mapped files count while they are resident. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from benchmarks.support.harness import GIGABYTES, NotCorrect, Report, Turn, command_parser, run_benchmark, take_turns
from benchmarks.support.processes import Meter
from benchmarks.support.ranks import Ranks, reset_peak
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.plan.worker_memory import WIDTHS
from troupe.workers.contract.config_base import Dtype
from troupe.workers.telemetry.peak_memory import resident_peak

WHOLE, PARTITIONED = "whole on every rank", "partitioned while read"
PEAK = "peak of a rank, of the model"
TIMEOUT_S = 600.0
_MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sizes = {"hidden_size": hidden, "intermediate_size": 8 * hidden, "num_hidden_layers": layers}
heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
LlamaForCausalLM(LlamaConfig(vocab_size=8192, pad_token_id=2, **sizes, **heads)).save_pretrained(folder)
"""


def make(folder: Path, hidden: int, layers: int) -> Path:
    """Write a random model, in a separate process so that this one does not load torch."""
    subprocess.run([sys.executable, "-c", _MAKE, str(folder), str(hidden), str(layers)], check=True)
    return folder


class Loading:
    """The turns of the two ways."""

    def __init__(self, folder: Path, small: Path, dtype: Dtype, ranks: int) -> None:
        """`small`: a model of the same architecture, loaded first so that no import counts."""
        self._folders = (str(folder), str(small))
        self._dtype: Dtype = dtype
        self._ranks = ranks
        self._bytes = WIDTHS[dtype] * read_size(folder).parameters
        self._sums: dict[str, float] = {}

    async def turn(self, name: str) -> Turn:
        """Load once on all ranks.

        Raises:
            NotCorrect: A rank failed, or the two ways load other weights.
        """
        with Ranks(self._ranks, _load, *self._folders, self._dtype, name == PARTITIONED, self._ranks) as ranks:
            meter = Meter(ranks.pids)
            found = ranks.results(TIMEOUT_S)
            measured = meter.turn(self._bytes / 1e9)
        peaks, seconds, sums = zip(*found, strict=True)
        self._sums[name] = sums[0]
        if len(set(self._sums.values())) > 1:
            raise NotCorrect(f"the two ways load other weights: {self._sums}")
        figures = {PEAK: max(peaks) / self._bytes, "peak of a rank, GB": max(peaks) / 1e9}
        return replace(measured, wall_s=max(seconds), figures=figures)

    def checks(self) -> dict[str, str]:
        """The checks and their outcomes."""
        return {
            "weights": "the sum of all weights is the same in both ways, bit for bit",
            "model": f"{self._bytes / 1e9:.2f} GB in {self._dtype} on {self._ranks} ranks",
        }


def _load(
    rank: int, meeting: Queue[Any], folder: str, small: str, dtype: Dtype, partitioned: bool, world: int
) -> tuple[int, float, float]:
    """Load on one rank; returns (peak bytes, seconds, sum of the weights)."""
    import torch
    import torch.distributed as dist

    from troupe.workers.contract.config import Rendezvous
    from troupe.workers.contract.config_base import ModelConfig
    from troupe.workers.contract.trainer_config import TrainerConfig
    from troupe.workers.models.modeling import load_causal
    from troupe.workers.training.group import join_group, leave_group, open_store, own_address
    from troupe.workers.training.zero3 import ZeroPartitioner

    torch.set_num_threads(1)
    address = own_address()
    store = open_store(address) if rank == 0 else None
    if store is not None:
        for _ in range(world):
            meeting.put(store.port)
    place = Rendezvous(address=address, port=meeting.get(timeout=TIMEOUT_S), rank=rank, world_size=world)
    join_group(place, "cpu", store)
    trainer = TrainerConfig(zero_stage=3)

    def load(path: str) -> Any:
        partitioner = ZeroPartitioner(trainer, getattr(torch, dtype))
        model = load_causal(ModelConfig(path=path, dtype=dtype), partitioner if partitioned else None)
        if not partitioned:
            partitioner.finish(model)
        return model

    load(small)
    reset_peak()
    before = _resident()
    dist.barrier()
    began = time.monotonic()
    model = load(folder)
    seconds, peak = time.monotonic() - began, resident_peak()
    total = torch.zeros((), dtype=torch.double)
    for parameter in model.parameters():
        start = parameter.ds_tensor.ds_numel * rank
        own = parameter.ds_tensor[: max(0, parameter.ds_numel - start)]
        total += own.double().sum()
    dist.all_reduce(total)
    leave_group()
    return peak - before, seconds, float(total)


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


async def measure(given: argparse.Namespace) -> Report:
    """Make the model and alternate the two ways. Raises NotCorrect."""
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = make(Path(made) / "wide", given.hidden, given.layers)
        contenders = Loading(folder, make(Path(made) / "small", 128, 1), given.dtype, given.ranks)
        turns = {name: lambda _, name=name: contenders.turn(name) for name in (WHOLE, PARTITIONED)}
        taken = await take_turns(turns, given.turns)
    return Report("zero3_loading", taken, WHOLE, contenders.checks(), GIGABYTES)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("zero3_loading", __doc__, 3)
    add = parser.add_argument
    add("--hidden", type=int, default=2048, help="width of the model (default: 2048, a multiple of 64)")
    add("--layers", type=int, default=2)
    add("--dtype", choices=("bfloat16", "float32"), default="float32", help="type of the loaded weights")
    add("--ranks", type=int, default=2)
    add("--folder", type=Path, help="where the model is written for the time of the benchmark (default: /tmp)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_benchmark(parse, measure)
