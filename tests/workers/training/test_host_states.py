"""Tensors that leave the device between two updates: views of them stay valid, and what cannot move stays."""

from __future__ import annotations

import torch

from troupe.workers.training.host_states import HostStates

CPU = torch.device("cpu")


def test_the_memory_is_free_and_comes_back_under_every_view() -> None:
    flat = torch.arange(12.0)
    view, expected = flat[4:8].view(2, 2), flat.clone()
    storage = flat.untyped_storage()
    states = HostStates(CPU)
    assert states.move_out([flat], []) == 48
    assert (states.moved, storage.nbytes()) == (True, 0), "nothing of the device is held, although a view exists"
    assert torch.equal(flat, expected), "it can be read and saved"
    assert states.move_out([flat], []) == 0
    states.move_back()
    states.move_back()
    assert not states.moved and flat.untyped_storage().data_ptr() == storage.data_ptr()
    flat += 1
    assert torch.equal(view, torch.tensor([[5.0, 6.0], [7.0, 8.0]])), "it is a view again"


def test_scratch_is_freed_without_a_copy_and_is_zero_afterwards() -> None:
    gradients = torch.zeros(10)
    part = gradients[3:]
    states = HostStates(CPU)
    assert states.move_out([], [gradients]) == 40
    assert gradients.untyped_storage().nbytes() == 0
    states.move_back()
    part += 1
    assert gradients.sum() == 7


def test_a_part_of_a_storage_stays_and_so_does_what_is_not_on_the_device() -> None:
    weights, elsewhere = torch.ones(8), torch.empty(4, device="meta")
    states = HostStates(CPU)
    assert states.move_out([weights[:4], elsewhere, torch.empty(0)], []) == 0
    assert not states.moved and torch.equal(weights, torch.ones(8))


def test_host_memory_is_kept_for_the_next_time() -> None:
    """Pinning it takes long on a GPU's host."""
    moments, states, places = torch.ones(1000), HostStates(CPU), set[int]()
    for _ in range(3):
        states.move_out([moments], [])
        places.add(moments.data_ptr())
        states.move_back()
    assert len(places) == 1 and torch.equal(moments, torch.ones(1000))
