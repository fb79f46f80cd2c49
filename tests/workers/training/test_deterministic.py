"""`deterministic`: what torch and the libraries are told, and that it changes nothing on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from troupe.workers.contract.config_base import ModelConfig
from troupe.workers.models.modeling import load_causal
from troupe.workers.training.rank import prepare_torch

NAMES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The algorithms and the environment of this process, as they were."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    prepare_torch(0)
    for name in NAMES:
        os.environ.pop(name, None)


def trained(model: Path, *, deterministic: bool) -> list[torch.Tensor]:
    """The weights after three updates."""
    prepare_torch(0, deterministic=deterministic)
    torch.manual_seed(1)
    policy = load_causal(ModelConfig(path=str(model), dtype="float32"))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    tokens = torch.randint(0, policy.config.vocab_size, (4, 48), generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        loss = policy(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in policy.parameters()]


def test_on_the_cpu_it_changes_nothing(tiny_model: Path) -> None:
    plain, fixed = (trained(tiny_model, deterministic=value) for value in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, fixed, strict=True))


def test_what_cannot_add_in_a_fixed_order_raises() -> None:
    """Not a warning: torch's attention then takes its deterministic backward pass."""
    prepare_torch(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert [os.environ[name] for name in NAMES] == [":4096:8", "0"]
    prepare_torch(0)
    assert not torch.are_deterministic_algorithms_enabled()
