"""The pieces of the GPU check: what each one runs, on GPUs and on the CPU, and which of them a call runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["probe", "run", "benchmark"]
Command = tuple[str, ...]
"""Arguments of the Python interpreter. `{folder}` stands for the piece's folder."""
RUN, MEASUREMENTS = "run", "measurements.json"
"""Names, in the piece's folder, of a run's folder and of the measurements that a probe or a benchmark writes."""

_TINY_MODEL = ("--model", ".cache/models/tiny-llama")
_TINY = (*_TINY_MODEL, "--dtype", "float32")
_ONE_GPU = (
    *("model.dtype=bfloat16", "roles.rollout.colocate_with=policy", "roles.rollout.gpu_memory_utilization=0.3"),
    *("roles.rollout.gpus=0.4", "roles.policy.gpus=0.3", "weight_sync.backend=shm"),
)
"""Overrides that move a laptop spec to one GPU, which engine and trainers share.

Weights go through shared memory, so that a failure of CUDA IPC shows only in the pieces that check it."""


@dataclass(frozen=True)
class Piece:
    """A part of the check that runs on its own within ten minutes."""

    name: str
    what: str
    kind: Kind
    on_gpu: tuple[Command, ...]
    """Commands, in order."""
    on_cpu: tuple[Command, ...] = ()
    """Commands that exercise the check itself without a GPU; empty: none make sense."""
    gpus: int = 1
    gib: float = 0.0
    """Memory of each GPU that the piece needs."""
    bound_s: float = 540.0
    """The piece fails, and its processes end, after this time."""


_TWO_AND_TWO = ("roles.rollout.workers=2", "roles.policy.workers=2", "roles.policy.zero_stage=3")
"""Overrides for two engines and two ranks that partition the parameters."""
_TWO_STEPS = ("schedule.steps=2", "checkpoint.every_steps=0")
_LARGE = "{folder}/model"
"""Folder of the large piece's model."""


def _sharing_rows(ranks: int) -> Command:
    """Overrides for ranks that share every row; their number divides the attention heads."""
    return (f"roles.policy.workers={ranks}", f"roles.policy.sequence_parallel_size={ranks}")


def _run(spec: str, *overrides: str) -> Command:
    sets = (part for override in overrides for part in ("--set", override))
    return ("-m", "troupe", "run", f"deploy/specs/{spec}.yaml", "--out", f"{{folder}}/{RUN}", *sets)


def _benchmark(module: str, *arguments: str) -> Command:
    return ("-m", f"benchmarks.{module}", *arguments, "--json", f"{{folder}}/{MEASUREMENTS}")


def _probe(module: str, *arguments: str) -> Command:
    return ("-m", f"deploy.gpu_check.{module}", *arguments, "--json", f"{{folder}}/{MEASUREMENTS}")


def _install(device: str) -> tuple[Command, ...]:
    return (("-m", "troupe", "doctor"), _probe("probe", "--device", device))


def _sync(backend: str, turns: int) -> tuple[Command, ...]:
    return (_benchmark("weight_sync", "--device", "cuda", "--backend", backend, "--turns", str(turns)),)


PIECES: tuple[Piece, ...] = (
    Piece(
        "install",
        "`troupe doctor`, kernels in float32 and bfloat16, vLLM imports",
        "probe",
        on_gpu=_install("cuda"),
        on_cpu=_install("cpu"),
        bound_s=300.0,
    ),
    Piece(
        "training",
        "SFT and DPO alone at every ZeRO stage, offloaded, recomputed, with both heads, saved and resumed",
        "probe",
        on_gpu=(
            _probe(
                *("training", "--device", "cuda", "--set", "model.path=.cache/models/smollm2-135m-instruct"),
                *("--set", "roles.policy.learning_rate=2e-5"),
            ),
        ),
        on_cpu=(_probe("training", "--device", "cpu"),),
    ),
    Piece(
        "agreement",
        "log-probs and gradients in float32 and bfloat16, padded, packed, with windows, against float32 on the CPU",
        "probe",
        on_gpu=(_probe("agreement", "--device", "cuda"),),
        on_cpu=(_probe("agreement", "--device", "cpu", *_TINY_MODEL),),
    ),
    Piece(
        "grpo",
        "the GRPO demo; engine and policy share one GPU",
        "run",
        on_gpu=(_run("laptop-grpo", *_ONE_GPU),),
        on_cpu=(_run("tiny-grpo", *_TWO_STEPS),),
    ),
    Piece(
        "ppo",
        "the PPO demo; engine, policy, reference and critic share one GPU",
        "run",
        on_gpu=(_run("laptop-ppo", *_ONE_GPU, "roles.critic.gpus=0.3"),),
        on_cpu=(_run("tiny-ppo", *_TWO_STEPS),),
    ),
    Piece(
        "adapters",
        "the GRPO demo with adapters; the engine keeps the model below while the policy trains on its GPU",
        "run",
        on_gpu=(
            _run(
                *("laptop-grpo", *_ONE_GPU, "roles.policy.lora={rank: 16, alpha: 32}"),
                "roles.policy.learning_rate=5e-4",
            ),
        ),
    ),
    Piece(
        "packing",
        "updates with packed rows, against padded ones: the same gradient, and their time",
        "benchmark",
        on_gpu=(_benchmark("packing", "--device", "cuda", "--micro-batch-tokens", "8192", "--groups", "32"),),
        on_cpu=(_benchmark("packing", *_TINY, "--groups", "2", "--turns", "1", "--threads", "1"),),
    ),
    Piece(
        "ipc",
        "weight sync by CUDA IPC between two processes on one GPU; samples agree with the new weights",
        "benchmark",
        on_gpu=_sync("ipc", 1),
        bound_s=420.0,
    ),
    Piece(
        "nccl",
        "weight sync by NCCL between two processes on two GPUs; samples agree with the new weights",
        "benchmark",
        on_gpu=_sync("nccl", 1),
        gpus=2,
        bound_s=420.0,
    ),
    Piece(
        "transfer",
        "weights to two engines on one GPU; after a trainer's failure and an engine's loss, the next transfer is right",
        "probe",
        on_gpu=(_probe("transfer", "--backend", "ipc"),),
        on_cpu=(_probe("transfer", "--backend", "gloo", *_TINY_MODEL),),
    ),
    Piece(
        "transfer-nccl",
        "the same over NCCL, each engine on its own GPU",
        "probe",
        on_gpu=(_probe("transfer", "--backend", "nccl"),),
        gpus=3,
    ),
    Piece(
        "graphs",
        "the same with engines that compile: CUDA graphs run on the new weights",
        "probe",
        on_gpu=(_probe("transfer", "--backend", "ipc", "--compiled"),),
        on_cpu=(_probe("transfer", "--backend", "gloo", "--compiled", *_TINY_MODEL),),
    ),
    Piece(
        "grpo-graphs",
        "the GRPO demo with a compiled engine, against `grpo`",
        "run",
        on_gpu=(_run("laptop-grpo", *_ONE_GPU, "roles.rollout.enforce_eager=false"),),
    ),
    Piece(
        "tensor-parallel",
        "the GRPO demo with an engine on two GPUs and the policy on a third",
        "run",
        on_gpu=(
            _run(
                *("laptop-grpo", "model.dtype=bfloat16", "roles.rollout.tensor_parallel_size=2"),
                *("roles.rollout.gpus=2", "roles.policy.gpus=1", "roles.rollout.gpu_memory_utilization=0.3"),
            ),
        ),
        on_cpu=(_run("tiny-grpo", "roles.rollout.tensor_parallel_size=2", "roles.rollout.cpus=2", *_TWO_STEPS),),
        gpus=3,
    ),
    Piece(
        "zero3",
        "the GRPO demo with two ranks at ZeRO-3 that send to two engines from device to device",
        "run",
        on_gpu=(
            _run(
                *("laptop-grpo", "model.dtype=bfloat16", *_TWO_AND_TWO, "weight_sync.backend=nccl"),
                *("roles.rollout.gpus=1", "roles.policy.gpus=1", "roles.rollout.gpu_memory_utilization=0.3"),
            ),
        ),
        on_cpu=(_run("tiny-grpo", *_TWO_AND_TWO, "weight_sync.backend=gloo", *_TWO_STEPS),),
        gpus=4,
    ),
    Piece(
        "sequence-parallel",
        "the GRPO demo with three ranks that share every row (Ulysses), and the engine on a fourth GPU",
        "run",
        on_gpu=(
            _run(
                *("laptop-grpo", "model.dtype=bfloat16", *_sharing_rows(3), "roles.rollout.gpus=1"),
                *("roles.policy.gpus=1", "roles.rollout.gpu_memory_utilization=0.3"),
            ),
        ),
        on_cpu=(_run("tiny-grpo", *_sharing_rows(2), *_TWO_STEPS),),
        gpus=4,
    ),
    Piece(
        "large",
        "GRPO on random layers as wide as those of Qwen2.5-7B: a tensor above 1 GiB, chunks of the head, memory",
        "run",
        on_gpu=(
            ("-m", "deploy.gpu_check.large", "--out", _LARGE),
            _run(
                *("laptop-grpo", *_ONE_GPU, *_TWO_STEPS, f"model.path={_LARGE}", "weight_sync.backend=ipc"),
                *("roles.rollout.max_model_len=1024", "roles.policy.micro_batch_tokens=8192"),
                *("sampling.max_tokens=512", "evaluation=null"),
            ),
        ),
        on_cpu=(
            ("-m", "deploy.gpu_check.large", "--out", _LARGE, "--narrow", "--tokenizer", ".cache/models/tiny-llama"),
            _run("tiny-grpo", f"model.path={_LARGE}", *_TWO_STEPS),
        ),
        gib=78.0,
    ),
    Piece(
        "sleep",
        "an engine rests its cache, or its weights: memory freed, no wake without weights, right samples after it",
        "probe",
        on_gpu=(_probe("sleep"),),
        bound_s=300.0,
    ),
    Piece(
        "sync",
        "benchmark of weight sync (CUDA IPC; shared memory on the CPU)",
        "benchmark",
        on_gpu=_sync("ipc", 7),
        on_cpu=(_benchmark("weight_sync", *_TINY, "--samples", "2", "--max-tokens", "4", "--turns", "1"),),
    ),
    Piece(
        "rollout",
        "benchmark of sampling, against AsyncLLM with the same settings",
        "benchmark",
        on_gpu=(_benchmark("rollout_throughput", "--device", "cuda", "--baseline", "AsyncLLM", "--turns", "5"),),
        on_cpu=(
            _benchmark(
                *("rollout_throughput", *_TINY, "--baseline", "AsyncLLM", "--groups", "2", "--samples", "2"),
                *("--max-tokens", "8", "--turns", "1"),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Decision:
    """What a call does with a piece: run `commands`, or skip it for a reason, or keep its recorded result."""

    piece: Piece
    commands: tuple[Command, ...] = ()
    skipped: str = ""
    """Why it is skipped; empty together with no commands: it passed before."""


def decide(
    pieces: Sequence[Piece], gpus: Sequence[float], on_cpu: bool, passed: Collection[str], again: bool
) -> tuple[Decision, ...]:
    """What to do with each piece.

    Args:
        pieces: The chosen pieces.
        gpus: Memory of each visible GPU, in GiB.
        on_cpu: Whether to run the pieces' commands for the CPU.
        passed: Names of the pieces that passed before.
        again: Whether those run again.
    """
    return tuple(_decide(piece, gpus, on_cpu, piece.name in passed and not again) for piece in pieces)


def _decide(piece: Piece, gpus: Sequence[float], on_cpu: bool, keep: bool) -> Decision:
    if on_cpu and not piece.on_cpu:
        return Decision(piece, skipped="needs a GPU")
    if not on_cpu and (lacks := _lacks(piece, gpus)):
        return Decision(piece, skipped=lacks)
    if keep:
        return Decision(piece)
    return Decision(piece, commands=piece.on_cpu if on_cpu else piece.on_gpu)


def _lacks(piece: Piece, gpus: Sequence[float]) -> str:
    """What the GPUs lack for a piece; empty: nothing."""
    if len(gpus) < piece.gpus:
        found = f"{len(gpus)} visible" if gpus else "no NVIDIA GPU is visible"
        return f"needs {piece.gpus} GPU{'s' if piece.gpus > 1 else ''}: {found}"
    if min(gpus) < piece.gib:
        return f"needs a GPU of {piece.gib:.0f} GiB: {min(gpus):.0f} GiB visible"
    return ""


def arguments(command: Command, folder: Path) -> list[str]:
    """The command with the piece's folder in place of `{folder}`."""
    return [part.replace("{folder}", str(folder)) for part in command]
