"""The settings of vLLM's engine, as vLLM itself understands them."""

from __future__ import annotations

import math
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from troupe.workers.contract.config import GPU_BATCH_TOKENS, EngineConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.engine.settings import engine_args, set_environment, unread_metrics
from troupe.workers.measured_rollout import EngineMeter


@pytest.mark.parametrize(
    ("dtype", "float32_head", "expected"),
    [
        ("bfloat16", True, torch.float32),
        ("bfloat16", False, torch.bfloat16),
        ("float32", True, torch.float32),
        ("float32", False, torch.float32),
    ],
)
def test_the_engine_computes_logits_in_the_type_of_the_trainer(
    dtype: str, float32_head: bool, expected: torch.dtype, tiny_model: Path
) -> None:
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model), dtype=dtype, float32_head=float32_head),  # pyright: ignore
        engine=EngineConfig(max_num_seqs=4, max_model_len=64, enforce_eager=True),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="shm",
        device="cpu",
    )
    model = engine_args(config).create_model_config()
    assert model.head_dtype == expected
    assert model.dtype == getattr(torch, dtype)


class FakeCuda:
    """What vLLM's parallel configuration asks of a CUDA platform with two GPUs."""

    ray_device_key = "GPU"
    device_type = "cuda"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: name in ("is_cuda", "is_cuda_alike")

    def device_count(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("sequences", "longest", "tokens"),
    [
        (64, 1024, GPU_BATCH_TOKENS),
        (8, 1024, GPU_BATCH_TOKENS),
        (8, 256, 2048),
        (1, 64, 64),
        (300, 8, 2400),
        (9000, 8, 9000),
    ],
)
def test_no_sequence_of_a_gpu_engines_trial_batch_exceeds_its_block_table(
    sequences: int, longest: int, tokens: int, tiny_model: Path
) -> None:
    """At its start vLLM runs a batch of `max_num_batched_tokens`, divided among `max_num_seqs`. With sequences beyond
    `max_model_len` an H200 reported "an illegal memory access"; vLLM only logs a warning."""
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(max_num_seqs=sequences, max_model_len=longest),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="nccl",
        device="cuda",
    )
    args = engine_args(config)
    assert args.max_num_batched_tokens == tokens
    assert math.ceil(tokens / sequences) <= longest


@pytest.mark.parametrize(("sequences", "longest", "tokens"), [(64, 128, 4096), (8, 9000, 9000), (5000, 128, 5000)])
def test_vllm_takes_the_largest_batch_of_a_cpu_engine(sequences: int, longest: int, tokens: int) -> None:
    """It refuses one with fewer tokens than sequences, or without room for a prompt that is computed at once."""
    from vllm.config import SchedulerConfig

    engine = EngineConfig(max_num_seqs=sequences, max_model_len=longest)
    taken = SchedulerConfig(
        max_num_batched_tokens=engine.cpu_batch_tokens,
        max_num_seqs=sequences,
        max_model_len=longest,
        enable_chunked_prefill=False,
        is_encoder_decoder=False,
    )
    assert taken.max_num_batched_tokens == tokens


@pytest.mark.parametrize(("ranks", "backend"), [(1, "uni"), (2, "mp")])
def test_an_engine_on_gpus_does_not_start_its_processes_with_ray(
    ranks: int, backend: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an actor's placement group vLLM would choose Ray, which refuses a bundle with more than one GPU."""
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(max_num_seqs=4, max_model_len=64, tensor_parallel_size=ranks),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="nccl",
        device="cuda",
    )
    args = engine_args(config)
    assert (args.enable_sleep_mode, args.kv_cache_memory_bytes) == (False, None)
    resting = engine_args(config.model_copy(update={"sleep": "kv_cache", "kv_cache_bytes": 5 << 30}))
    assert (resting.enable_sleep_mode, resting.kv_cache_memory_bytes) == (True, 5 << 30)
    workers: Any = import_module("vllm.v1.worker.utils")
    shared = SimpleNamespace(device_="cuda:0", total_memory=80 << 30, free_memory=20 << 30)
    workers.request_memory(shared, resting)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        workers.request_memory(shared, args)
    parallel: Any = import_module("vllm.config.parallel")
    monkeypatch.setattr(parallel, "current_platform", FakeCuda())
    chosen = parallel.ParallelConfig(
        tensor_parallel_size=ranks,
        placement_group=SimpleNamespace(bundle_specs=[{"GPU": ranks}]),
        distributed_executor_backend=args.distributed_executor_backend,
    )
    assert chosen.distributed_executor_backend == backend
    if ranks > 1:
        left = parallel.ParallelConfig(tensor_parallel_size=2, placement_group=chosen.placement_group)
        assert left.distributed_executor_backend == "ray", "the choice that the setting avoids"


def test_an_engine_on_a_gpu_chooses_its_threads(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets the variable to the CPUs of the actor, after the environment that it is given."""
    monkeypatch.setattr(os, "environ", dict(os.environ, OMP_NUM_THREADS="4"))
    config = RolloutConfig(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(),
        sampling=SamplingConfig(),
        seed=1,
        transfer_backend="nccl",
        device="cuda",
    )
    set_environment(config.process)
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_engine_keeps_no_metrics_for_prometheus_and_its_meter_is_told_everything() -> None:
    loggers: Any = import_module("vllm.v1.metrics.loggers")
    stats: Any = import_module("vllm.v1.metrics.stats")
    meter, before = EngineMeter(), {metric.name for metric in REGISTRY.collect()}
    # Without a logger that takes their place the manager creates vLLM's own metrics, from the engine's settings.
    chosen = [unread_metrics(), lambda config, index: meter]
    manager = loggers.StatLoggerManager(None, [0], chosen, enable_default_loggers=False)
    iteration = stats.IterationStats()
    iteration.finished_requests.append(stats.FinishedRequestStats(finish_reason=None, num_generation_tokens=7))
    manager.log_engine_initialized()
    manager.record(stats.SchedulerStats(), iteration)
    manager.record_sleep_state(1, 1)
    manager.record_admission_rejection("max_num_queued_reqs")
    manager.log()
    assert [sequence.response_tokens for sequence in meter.read("rollout-0").sequences] == [7]
    assert {metric.name for metric in REGISTRY.collect()} == before
