"""The moving average of the weights as the model's weights, for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from troupe.workers.training.deepspeed_engine import TrainEngine


def engine(monkeypatch: pytest.MonkeyPatch, parameter: nn.Parameter, average: torch.Tensor) -> TrainEngine:
    """An engine with nothing but one parameter and its average."""
    found = object.__new__(TrainEngine)
    monkeypatch.setattr(found, "_average", [average], raising=False)
    monkeypatch.setattr(found, "_averaged_parts", lambda: [parameter], raising=False)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_has_the_average_inside_and_its_own_weights_afterwards(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter, average = nn.Parameter(torch.ones(2, dtype=dtype)), torch.full((2,), 3.0)
    before = parameter.data_ptr()
    with pytest.raises(KeyError), engine(monkeypatch, parameter, average).averaged():
        assert parameter.tolist() == [3.0, 3.0] and parameter.dtype == dtype
        raise KeyError
    assert parameter.tolist() == [1.0, 1.0] and parameter.data_ptr() == before, "the memory that ZeRO and engines know"
    assert average.tolist() == [3.0, 3.0]


def test_an_average_in_host_memory_comes_to_the_device_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    with engine(monkeypatch, parameter, torch.full((2,), 3.0)).averaged():
        assert parameter.device.type == "meta"
