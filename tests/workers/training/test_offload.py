"""Tensors that leave the device between two updates: views of them stay valid, and what cannot move stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from troupe.workers.training import offload
from troupe.workers.training.offload import StateOffload, gradient_buffers, optimizer_states

CPU = torch.device("cpu")


def test_the_memory_is_free_and_comes_back_under_every_view() -> None:
    flat = torch.arange(12.0)
    view, expected = flat[4:8].view(2, 2), flat.clone()
    storage = flat.untyped_storage()
    states = StateOffload(CPU)
    assert states.offload([flat], []) == 48
    assert (states.offloaded, storage.nbytes()) == (True, 0), "nothing of the device is held, although a view exists"
    assert torch.equal(flat, expected), "it can be read and saved"
    assert states.offload([flat], []) == 0
    states.reload()
    states.reload()
    assert not states.offloaded and flat.untyped_storage().data_ptr() == storage.data_ptr()
    flat += 1
    assert torch.equal(view, torch.tensor([[5.0, 6.0], [7.0, 8.0]])), "it is a view again"


def test_scratch_is_freed_without_a_copy_and_is_zero_afterwards() -> None:
    gradients = torch.zeros(10)
    part = gradients[3:]
    states = StateOffload(CPU)
    assert states.offload([], [gradients]) == 40
    assert gradients.untyped_storage().nbytes() == 0
    states.reload()
    part += 1
    assert gradients.sum() == 7


def test_a_part_of_a_storage_stays_and_so_does_what_is_not_on_the_device() -> None:
    weights, elsewhere = torch.ones(8), torch.empty(4, device="meta")
    states = StateOffload(CPU)
    mapped = torch.frombuffer(bytearray(16), dtype=torch.float32)  # as the moments of a loaded checkpoint on the CPU
    assert states.offload([weights[:4], elsewhere, torch.empty(0), mapped], [mapped]) == 0
    assert not states.offloaded and torch.equal(weights, torch.ones(8))


def test_host_memory_is_kept_for_the_next_time() -> None:
    """Pinning it takes long on a GPU's host."""
    moments, states, places = torch.ones(1000), StateOffload(CPU), set[int]()
    for _ in range(3):
        states.offload([moments], [])
        places.add(moments.data_ptr())
        states.reload()
    assert len(places) == 1 and torch.equal(moments, torch.ones(1000))


def test_host_memory_of_a_gpu_is_pinned_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's pinned memory is a power of two: nearly twice the states of some models."""
    pinned: dict[int, int] = {}
    monkeypatch.setattr(offload, "pin_memory", pinned.__setitem__)
    monkeypatch.setattr(offload, "unpin_memory", pinned.__delitem__)
    states = StateOffload(torch.device("cuda"))
    first = states._buffer(0, torch.empty(33))
    assert states._buffer(0, torch.empty(33)) is first and pinned == {first.data_ptr(): 132}
    other = states._buffer(0, torch.empty(65))
    assert pinned == {other.data_ptr(): 260}


class Mixed:
    """Float32 masters of a bfloat16 model, as DeepSpeed's optimizers have them; or the model's own weights."""

    def __init__(self, masters: bool) -> None:
        torch.manual_seed(1)
        self.module = torch.nn.Linear(16, 16, dtype=torch.bfloat16 if masters else torch.float32)
        own = list(self.module.parameters())
        self.masters = [torch.nn.Parameter(weight.detach().float().clone()) for weight in own] if masters else own
        self.basic_optimizer = torch.optim.AdamW(self.masters, lr=0.1, fused=True)
        self.fp32_groups_gradients_flat = [torch.zeros(16)] if masters else []
        self.optimizer: Any = self if masters else SimpleNamespace()

    def step(self, number: int) -> None:
        """One update on other data each time."""
        inputs = torch.full((4, 16), 0.1 * (number + 1), dtype=self.module.weight.dtype)
        self.module(inputs).float().square().sum().backward()
        for master, weight in zip(self.masters, self.module.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        self.basic_optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.module.parameters(), strict=True):
                weight.copy_(master)
                weight.grad = None


@pytest.mark.parametrize("masters", [True, False])
def test_training_is_the_same_to_the_last_bit_and_the_models_weights_stay(masters: bool) -> None:
    plain, moving = Mixed(masters), Mixed(masters)
    states = StateOffload(CPU)
    for number in range(4):
        plain.step(number)
        states.reload()
        moving.step(number)
        weights = [(weight.data_ptr(), weight.untyped_storage().nbytes()) for weight in moving.module.parameters()]
        numbers = 16 * 16 + 16
        expected = (12 * numbers + 64) if masters else 8 * numbers
        assert states.offload(optimizer_states(moving, 0), gradient_buffers(moving, 0)) == expected
        assert weights == [(w.data_ptr(), w.untyped_storage().nbytes()) for w in moving.module.parameters()]
    for one, other in zip(plain.module.parameters(), moving.module.parameters(), strict=True):
        assert torch.equal(one, other)
    saved, other = plain.basic_optimizer.state_dict()["state"], moving.basic_optimizer.state_dict()["state"]
    for number, state in saved.items():
        assert all(torch.equal(value, other[number][name]) for name, value in state.items()), "saved from host memory"


def test_partitions_of_the_model_that_are_its_own_masters_stay() -> None:
    """ZeRO-3 in float32: a group of one parameter is the whole storage that the parameter's partition lies in."""
    partition, other = torch.ones(8), torch.ones(4)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor = partition[:8]  # pyright: ignore[reportAttributeAccessIssue]
    module = SimpleNamespace(parameters=lambda: [parameter])
    optimizer = SimpleNamespace(fp32_partitioned_groups_flat=[partition, other])
    engine = SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=SimpleNamespace(state={}))
    assert [tensor is other for tensor in optimizer_states(engine, 3)] == [True]
