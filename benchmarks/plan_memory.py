"""Memory of a training rank as `troupe plan` estimates it, against the memory of real ranks.

    python -m benchmarks.plan_memory
    python -m benchmarks.plan_memory --only "zero 3"    # some of the cases
    python -m benchmarks.plan_memory --processes        # processes without a model

Each case starts `PolicyWorker`s in separate processes, without Ray, and runs two updates of two micro-batches at
the full token budget. It measures the peak resident memory (VmHWM, reset before the model is built) and compares it
with `training`. `--processes` measures processes without a model; the constants of
`orchestrator/plan/memory.py` come from there. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.harness import command_parser
from benchmarks.support.ranks import Ranks, reset_peak
from troupe.orchestrator.model_facts.model_size import read_size
from troupe.orchestrator.plan.memory import TRAINER_PROCESS
from troupe.orchestrator.plan.worker_memory import Training, WorkerMemory, training
from troupe.workers.contract.config_base import Dtype
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.units import MIB
from troupe.workers.telemetry.peak_memory import FamilyPeak, resident_peak

if TYPE_CHECKING:
    import pyarrow as pa

MODELS = Path(".cache/models")
TIMEOUT_S = 1800.0
ROW_TOKENS = 256
PROMPT_TOKENS = 8
VOCABULARY = 4000
"""Token ids are below it."""


@dataclass(frozen=True)
class Case:
    """One measurement."""

    model: str
    """A folder of `.cache/models`, or `made`: a Llama of 30 million parameters with an untied head."""
    stage: int
    """DeepSpeed's ZeRO stage."""
    dtype: Dtype
    ranks: int
    tokens: int
    """Token budget of a micro-batch."""
    checkpointing: bool = False
    ema: bool = False
    sharing: int = 1
    """Ranks that share each micro-batch, packed into one row; 1: micro-batches are padded."""

    @property
    def name(self) -> str:
        """Name in the table."""
        extras = ("checkpointing",) * self.checkpointing + ("ema",) * self.ema
        if self.sharing > 1:
            extras += (f"shared by {self.sharing}",)
        what = f"{self.model} zero {self.stage} {self.dtype} x{self.ranks} {self.tokens} tokens"
        return " ".join([what, *extras])

    def trainer(self) -> TrainerConfig:
        """Configuration of the ranks."""
        return TrainerConfig(
            zero_stage=self.stage,  # pyright: ignore[reportArgumentType]
            micro_batch_tokens=self.tokens,
            gradient_checkpointing=self.checkpointing,
            threads=1,
            sequence_parallel_size=self.sharing,
            packing=self.sharing > 1,
            ema_decay=0.9 if self.ema else 0.0,
        )


CASES = (  # in float32, one rank runs stages 1 and 2 as stage 0
    *(Case("tiny-llama", stage, "float32", 1, 2048) for stage in (1, 3)),
    *(Case("made", stage, "float32", 1, 2048) for stage in (1, 3)),
    *(Case("made", stage, "float32", 2, 2048) for stage in range(4)),
    *(Case("made", stage, "bfloat16", ranks, 2048) for ranks in (1, 2) for stage in range(4)),
    *(Case("made", 1, "float32", 2, 8192, sharing=sharing) for sharing in (1, 2)),
    *(Case("smollm2-135m-instruct", stage, "float32", 1, 1024) for stage in (1, 3)),
    *(Case("smollm2-135m-instruct", stage, "bfloat16", 2, 1024) for stage in range(4)),
    Case("smollm2-135m-instruct", 1, "float32", 1, 4096, checkpointing=True),
    Case("smollm2-135m-instruct", 1, "bfloat16", 1, 4096, checkpointing=True, ema=True),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Bytes of the largest rank of a case."""

    process: int
    """Resident before the model is made."""
    built: int
    """Peak until DeepSpeed has built the engine."""
    peak: int
    """Peak until the updates are done."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser("plan_memory", __doc__)
    add = parser.add_argument
    add("--models", type=Path, default=MODELS, help=f"folder of the models (default: {MODELS})")
    add("--only", default="", help="run the cases whose name contains this text")
    add(
        "--json", type=Path, default=Path("runs/plan_memory.json"), help="results file (default: runs/plan_memory.json)"
    )
    add("--processes", action="store_true", help="measure processes without a model instead")
    add("--list", action="store_true", help="print the cases and their estimates without measuring")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print the table, write the results file."""
    given = parse(sys.argv[1:])
    if given.processes:
        rows: list[dict[str, Any]] = [processes(given.models)]
    else:
        with tempfile.TemporaryDirectory() as made:
            folders = _folders(given.models, Path(made))
            chosen = [case for case in CASES if given.only in case.name]
            rows = [_row(case, folders[case.model], not given.list) for case in chosen]
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(rows, indent=2) + "\n")


def _row(case: Case, folder: Path, measures: bool) -> dict[str, Any]:
    (memory,) = estimate(case, folder)
    row = asdict(case) | {"parts": {part.name: part.bytes for part in memory.parts}, "estimate": memory.total}
    if measures:
        found = measure(case, folder)
        row |= asdict(found) | {"ratio": memory.total / found.peak}
        print(
            f"{case.name:<72} {memory.total / MIB:6.0f} estimated  {found.peak / MIB:6.0f} measured  "
            f"{memory.total / found.peak:.2f}   (process {found.process / MIB:.0f}, built {found.built / MIB:.0f})",
            flush=True,
        )
    else:
        parts = "  ".join(f"{part.name} {part.bytes / MIB:.0f}" for part in memory.parts)
        print(f"{case.name:<72} {memory.total / MIB:6.0f} = {parts}")
    return row


def estimate(case: Case, folder: Path) -> tuple[WorkerMemory, ...]:
    """The estimate of `troupe plan` for one rank."""
    settings = Training(
        size=read_size(folder),
        dtype=case.dtype,
        trainer=case.trainer(),
        ranks=case.ranks,
        gpu=False,
        longest=ROW_TOKENS,
        process=TRAINER_PROCESS,
    )
    return training("policy-0", settings)


def measure(case: Case, folder: Path) -> Measured:
    """Run the ranks of a case. Raises NotCorrect if one of them fails."""
    table = batch(2 * (case.tokens // ROW_TOKENS))
    with Ranks(case.ranks, _updates, case, str(folder), table) as ranks:
        found = ranks.results(TIMEOUT_S)
    return Measured(*(max(column) for column in zip(*found, strict=True)))


def _updates(rank: int, meeting: Queue[Any], case: Case, folder: str, table: pa.Table) -> tuple[int, int, int]:
    """Build a worker and run its updates; returns (process, built, peak) in bytes."""
    from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
    from troupe.workers.contract.config import PolicyConfig, Rendezvous, SamplingConfig
    from troupe.workers.contract.config_base import ModelConfig
    from troupe.workers.contract.messages import RankPlan
    from troupe.workers.policy import PolicyWorker

    config = PolicyConfig(
        share_prompts=False,
        model=ModelConfig(path=folder, dtype=case.dtype),
        trainer=case.trainer(),
        loss=PolicyLossConfig(),
        advantage=AdvantageConfig(estimator="group"),
        sampling=SamplingConfig(max_tokens=ROW_TOKENS),
        run_id="plan-memory",
        reference_model=None,
        total_updates=10,
        seed=1,
        device="cpu",
    )
    worker = PolicyWorker(config, f"policy-{rank}")
    if rank == 0:
        place = worker.rendezvous(one_host=True)
        for _ in range(case.ranks):
            meeting.put(place)
    address, port = meeting.get(timeout=120)
    worker.join(Rendezvous(address=address, port=port, rank=rank, world_size=case.ranks))
    reset_peak()
    process = resident_peak()
    worker.build()
    built = resident_peak()
    rows = case.tokens // ROW_TOKENS
    micro_batches = (tuple(range(rows)), tuple(range(rows, 2 * rows)))
    plan = RankPlan(micro_batches, 2 * rows * ROW_TOKENS, 2 * rows, packed=case.sharing > 1)
    for _ in range(2):
        worker.update(plan, table)
    most = resident_peak()
    worker.close()
    return process, built, most


def batch(rows: int) -> pa.Table:
    """A TRAIN table; every second row is one token shorter, so that micro-batches have padding as real ones do."""
    from benchmarks.support.train_rows import GroupLengths, train_batch  # would count in the ranks' memory

    lengths = [GroupLengths(PROMPT_TOKENS, (ROW_TOKENS - PROMPT_TOKENS - number % 2,)) for number in range(rows)]
    return train_batch(lengths, VOCABULARY, seed=1)[1]


def _folders(models: Path, made: Path) -> dict[str, Path]:
    """Folders by model name; creates the model `made`, in a separate process so that this one does not load torch."""
    code = (
        "import sys, torch; from transformers import LlamaConfig, LlamaForCausalLM; "
        "LlamaForCausalLM(LlamaConfig(vocab_size=16384, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, "
        "num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False)).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(made)], check=True, capture_output=True)
    names = {case.model for case in CASES} - {"made"}
    return {"made": made} | {name: models / name for name in names}


def processes(models: Path) -> dict[str, int]:
    """Peak memory of processes without a model, in bytes."""
    imports = {
        "scorer": "import troupe.workers.reference, troupe.workers.rewards.model",
        "reward": "import troupe.workers.reward",
        "function": "import troupe.workers.rewards.child",
    }
    found = {name: _peak_of(code) for name, code in imports.items()}
    case = Case("tiny-llama", 1, "float32", 1, 256)
    found["trainer"] = measure(case, models / case.model).process
    found["engine"] = asyncio.run(_engine(models / case.model))
    for name, count in found.items():
        print(f"{name:<10} {count / MIB:6.0f} MiB")
    return found


def _peak_of(code: str) -> int:
    show = "import pathlib; print(pathlib.Path('/proc/self/status').read_text())"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{show}"], check=True, capture_output=True, text=True)
    return next(int(line.split()[1]) * 1024 for line in done.stdout.splitlines() if line.startswith("VmHWM:"))


async def _engine(folder: Path) -> int:
    """Peak memory of an engine's processes, less its weights and its KV cache."""
    import psutil

    from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig
    from troupe.workers.contract.config_base import ModelConfig
    from troupe.workers.rollout import RolloutWorker

    cache = 0.0625
    config = RolloutConfig(
        model=ModelConfig(path=str(folder), dtype="float32"),
        engine=EngineConfig(max_model_len=256, max_num_seqs=4, kv_cache_gib=cache, threads=1, enforce_eager=True),
        sampling=SamplingConfig(max_tokens=16),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )
    worker = RolloutWorker(config, "rollout-0")
    await worker.start()
    try:
        size = read_size(folder)
        held = 4 * (size.parameters + size.vocabulary * size.hidden) + int(cache * 2**30)
        return FamilyPeak().read(child.pid for child in psutil.Process().children(recursive=True)) - held
    finally:
        await worker.close()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
