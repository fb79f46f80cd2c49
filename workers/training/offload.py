"""Moves what only an update needs out of the memory of a GPU that a rollout engine shares: into host memory and back.

DeepSpeed's own `offload_states` accepts only its FusedAdam, which is compiled at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


class StateOffload:
    """Moves the optimizer's states and master weights, and frees buffers of gradients. Not collective. DeepSpeed's
    many views stay valid: memory is taken from, and given back to, the storage that they share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors whose data are in host memory, readable and saved from there, and the data on the device, with no
        memory allocated."""
        self._freed: list[tuple[torch.Tensor, int]] = []
        """Tensors that are empty between two updates, and the bytes of their storages."""
        self._buffers: list[torch.Tensor] = []
        """Host memory, which is kept, because pinning it takes long."""

    @property
    def offloaded(self) -> bool:
        """Whether the tensors are in host memory."""
        return bool(self._moved or self._freed)

    @torch.no_grad()
    def offload(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor]) -> int:
        """Free the device of these tensors; returns the bytes. `kept` ones are copied to host memory and can be read
        there, `scratch` ones are zero whenever this is called. Parts of a storage stay, as do tensors that are
        elsewhere, mapped from a file, or shared with numpy (on the CPU only)."""
        if self.offloaded:
            return 0
        for number, tensor in enumerate(self._whole(kept)):
            host = self._buffer(number, tensor)
            host.copy_(tensor, non_blocking=True)
            self._moved.append((tensor, tensor.data))
            tensor.data = host
        self._freed = [(tensor, tensor.untyped_storage().nbytes()) for tensor in self._whole(scratch)]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        released = 0
        for tensor in (*(before for _, before in self._moved), *(tensor for tensor, _ in self._freed)):
            released += tensor.untyped_storage().nbytes()
            tensor.untyped_storage().resize_(0)
        return released

    @torch.no_grad()
    def reload(self) -> None:
        """Allocate the device's memory again, and copy the tensors back. Does nothing if they are there."""
        for tensor, before in self._moved:
            before.untyped_storage().resize_(before.nbytes)
            before.copy_(tensor, non_blocking=True)
        for tensor, nbytes in self._freed:
            tensor.untyped_storage().resize_(nbytes)
            tensor.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for tensor, before in self._moved:
            tensor.data = before
        self._moved, self._freed = [], []

    def _whole(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors on the device with separate storage that torch has allocated."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and 0 < storage.nbytes() == tensor.nbytes and storage.resizable():
                yield tensor

    def _buffer(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """The host memory of the tensor with this number."""
        if number == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[number]
        if (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            on_gpu = self._device.type == "cuda"
            if on_gpu and buffer.nbytes:
                unpin_memory(buffer.data_ptr())
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if on_gpu:  # at its own size: torch rounds what it allocates with `pin_memory` up to a power of two
                pin_memory(buffer.data_ptr(), buffer.nbytes)
            self._buffers[number] = buffer
        return buffer


def optimizer_states(engine: Any, stage: int) -> Iterator[torch.Tensor]:
    """Master weights and moments of DeepSpeed's `engine`, without those that are the model's own (float32)."""
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    model = {tensor.untyped_storage().data_ptr() for tensor in held}
    if stage == 3:
        masters = engine.optimizer.fp32_partitioned_groups_flat
    else:
        masters = [master for group in engine.basic_optimizer.param_groups for master in group["params"]]
    yield from (master for master in masters if master.untyped_storage().data_ptr() not in model)
    for state in engine.basic_optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value) and value.ndim > 0)


def gradient_buffers(engine: Any, stage: int) -> Iterator[torch.Tensor]:
    """Buffers that DeepSpeed keeps for gradients and clears after a step; gradients that it left behind are freed."""
    for parameter in engine.module.parameters():
        parameter.grad = None
    optimizer = engine.optimizer
    if stage == 3:
        yield optimizer.grad_partitions_flat_buffer
    elif hasattr(optimizer, "fp32_groups_gradients_flat"):  # DeepSpeed's BF16_Optimizer
        yield from optimizer.fp32_groups_gradients_flat
