"""Runs of the demos with roles that share a GPU or have one each, and one whose tensors are as wide as a 7B model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from benchmarks.support.workload import GPU_SHARE
from tests.conftest import ROOT
from tests.gpu.isolated import Measurements, finish
from tests.real.commands import Run
from troupe.orchestrator.spec.derived.training import resolved_backend
from troupe.orchestrator.spec.load import load_rollout_spec
from troupe.workers.weights.buckets import BUCKET_BYTES

_GPU = ("model.dtype=bfloat16", f"roles.rollout.gpu_memory_utilization={GPU_SHARE}")
_ONE_GPU = (
    *(*_GPU, "roles.rollout.colocate_with=policy", "roles.rollout.gpus=0.4", "roles.policy.gpus=0.3"),
    "weight_sync.backend=shm",
)
"""Engine and trainers share a GPU. Weights go through shared memory: CUDA IPC is the subject of other tests."""
_OWN_GPUS = (*_GPU, "roles.rollout.gpus=1", "roles.policy.gpus=1")


@dataclass(frozen=True)
class GpuRun:
    """A run of a spec with overrides."""

    overrides: tuple[str, ...]
    spec: str = "laptop-grpo"
    gpus: int = 1
    backend: str = "shm"
    """How the weights have to be sent."""


RUNS = {
    "grpo": GpuRun(_ONE_GPU),
    "ppo": GpuRun((*_ONE_GPU, "roles.critic.gpus=0.3"), "laptop-ppo"),
    "adapters": GpuRun((*_ONE_GPU, "roles.policy.lora={rank: 16, alpha: 32}", "roles.policy.learning_rate=5e-4")),
    "graphs": GpuRun((*_ONE_GPU, "roles.rollout.enforce_eager=false")),
    "tensor-parallel": GpuRun(
        (*_OWN_GPUS, "roles.rollout.tensor_parallel_size=2", "roles.rollout.gpus=2"), gpus=3, backend="nccl"
    ),
    "zero3": GpuRun(
        (*_OWN_GPUS, "roles.rollout.workers=2", "roles.policy.workers=2", "roles.policy.zero_stage=3"),
        gpus=4,
        backend="nccl",
    ),
    "sequence-parallel": GpuRun(
        (*_OWN_GPUS, "roles.policy.workers=3", "roles.policy.sequence_parallel_size=3"), gpus=4, backend="nccl"
    ),
}
LARGE = GpuRun(
    (
        *(*_ONE_GPU, "weight_sync.backend=ipc", "schedule.steps=2", "checkpoint.every_steps=0", "evaluation=null"),
        *("roles.rollout.max_model_len=1024", "roles.policy.micro_batch_tokens=8192", "sampling.max_tokens=512"),
    ),
    backend="ipc",
)
WIDTHS = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
"""Of Qwen2.5-7B."""
NARROW = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY = 152064


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.gpu(run.gpus)) for name, run in RUNS.items()])
def test_a_run_on_gpus(name: str, tmp_path: Path, measured: Callable[[Measurements], None]) -> None:
    measured(run_of(tmp_path, name, RUNS[name]))


@pytest.mark.gpu(gib=78)
def test_a_run_with_tensors_above_a_bucket_of_a_transfer(
    demo_model: Path, measured: Callable[[Measurements], None]
) -> None:
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", demo_model, WIDTHS)
        measured(run_of(Path(folder), "large", LARGE, f"model.path={model}"))


def run_of(folder: Path, name: str, run: GpuRun, *overrides: str) -> Measurements:
    """Run to the end; returns what the metrics of its steps say."""
    command = Run(folder, ROOT / f"deploy/specs/{run.spec}.yaml", *run.overrides, *overrides, name=name)
    finish(command)
    steps = command.metrics
    first, last = steps[0], steps[-1]
    memory = {name.removeprefix("memory/"): value for name, value in last.items() if name.startswith("memory/")}
    found: dict[str, float | str] = {
        "steps": len(steps),
        "reward, first step": first["reward/mean"],
        "reward, last step": last["reward/mean"],
        "nats per token, first step": first["policy/rollout_logprob_gap"],
        "nats per token, last step": last["policy/rollout_logprob_gap"],
        "s per step": median(step["seconds/step"] for step in steps),
        "s per sync": median(step["seconds/sync"] for step in steps),
        "response tokens/s": median(step["response_tokens_per_s"] for step in steps),
    }
    return found | {f"{name}, GiB": value for name, value in memory.items()}


def write_model(folder: Path, tokenizer: Path, widths: dict[str, Any]) -> Path:
    """Write a random model of four layers, whose tokenizer knows a part of the vocabulary."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    known = AutoTokenizer.from_pretrained(tokenizer)
    config = Qwen2Config(
        **widths,
        num_hidden_layers=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*RUNS, "large"])
def test_runs_are_valid_specs_that_fit_their_gpus(name: str, tmp_path: Path, demo_model: Path) -> None:
    run, overrides = RUNS.get(name, LARGE), []
    if name == "large":
        overrides = [f"model.path={write_model(tmp_path / 'model', demo_model, NARROW)}"]
    spec = load_rollout_spec(ROOT / f"deploy/specs/{run.spec}.yaml", [*run.overrides, *overrides])
    assert (spec.device, resolved_backend(spec)) == ("cuda", run.backend)
    roles = [role for role in (spec.roles.rollout, spec.roles.policy, spec.roles.critic) if role is not None]
    assert all(role.gpus > 0 for role in roles)
    assert sum(role.workers * role.gpus for role in roles) <= run.gpus
    ranks = spec.roles.policy.sequence_parallel_size
    assert json.loads((demo_model / "config.json").read_text())["num_attention_heads"] % ranks == 0


def test_the_wide_model_has_a_tensor_above_a_bucket_of_a_transfer() -> None:
    assert 2 * VOCABULARY * WIDTHS["hidden_size"] > BUCKET_BYTES
