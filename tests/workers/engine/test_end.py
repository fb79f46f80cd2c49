"""The end of an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from troupe.workers.contract.config import EngineConfig, RolloutConfig, SamplingConfig
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.engine import serving


@pytest.mark.parametrize(
    ("device", "ranks", "wait_s"),
    [("cpu", 1, 0.0), ("cpu", 2, serving._SHUTDOWN_S), ("cuda", 1, serving._SHUTDOWN_S)],
)
def test_only_an_engine_whose_memory_would_stay_behind_has_time_to_end(
    device: Device, ranks: int, wait_s: float
) -> None:
    config = RolloutConfig(
        model=ModelConfig(path="model"),
        engine=EngineConfig(max_num_seqs=4, max_model_len=64, tensor_parallel_size=ranks),
        sampling=SamplingConfig(max_tokens=8),
        seed=1,
        transfer_backend="shm",
        device=device,
    )
    engine, waited = serving.ServingEngine(config, "rollout-0"), list[float]()
    vllm: Any = SimpleNamespace(output_handler=None, shutdown=waited.append)
    engine.vllm = vllm
    asyncio.run(engine.stop())
    assert waited == [wait_s] and engine.vllm is None


def test_an_engine_whose_process_ends_while_it_is_killed_has_ended() -> None:
    """vLLM looks for the children of a process that may have gone, and leaves its sockets open."""
    freed: list[str] = []

    def shutdown(timeout_s: float) -> None:
        raise psutil.NoSuchProcess(18382)

    core = SimpleNamespace(resources=lambda: freed.append("sockets"))
    serving._shut_down(cast("Any", SimpleNamespace(shutdown=shutdown, engine_core=core)), 0.0)
    assert freed == ["sockets"]
