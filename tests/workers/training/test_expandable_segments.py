"""torch's allocator on the GPUs of trainers: its segments grow unless another process opens them."""

from __future__ import annotations

import pytest
import torch

from troupe.workers.contract.algorithm_config import AdvantageConfig, PolicyLossConfig
from troupe.workers.contract.config import PolicyConfig, Rendezvous, SamplingConfig
from troupe.workers.contract.config_base import Device, ModelConfig
from troupe.workers.contract.trainer_config import TrainerConfig
from troupe.workers.contract.weight_backends import TransferBackend
from troupe.workers.policy import PolicyWorker
from troupe.workers.training import rank

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told, when a rank joins a group that is not there."""
    told: list[str] = []
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in ("join_group", "prepare_torch"):
        monkeypatch.setattr(rank, name, lambda *_, **__: None)
    return told


def join(device: Device, backend: TransferBackend) -> None:
    config = PolicyConfig(
        model=ModelConfig(path="model"),
        trainer=TrainerConfig(),
        loss=PolicyLossConfig(),
        advantage=AdvantageConfig(estimator="none"),
        sampling=SamplingConfig(temperature=1.0, max_tokens=8),
        run_id="segments",
        reference_model=None,
        total_updates=1,
        seed=1,
        device=device,
        transfer_backend=backend,
    )
    PolicyWorker(config, "policy-0").join(Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=1))


@pytest.mark.parametrize(
    ("device", "backend", "grows"),
    [("cuda", "nccl", True), ("cuda", "shm", True), ("cuda", "ipc", False), ("cpu", "shm", False)],
)
def test_segments_grow_on_gpus_whose_memory_no_engine_opens(
    settings: list[str], device: Device, backend: TransferBackend, grows: bool
) -> None:
    join(device, backend)
    assert settings == (["expandable_segments:True"] if grows else [])


@pytest.mark.parametrize("name", ALLOCATORS)
def test_the_environment_s_own_settings_stay(settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    join("cuda", "nccl")
    assert settings == []
