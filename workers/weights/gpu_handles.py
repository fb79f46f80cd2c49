"""Handles with which another process on the same GPU opens a buffer (CUDA IPC), as plain values for vLLM's msgpack.

Both processes must share the IPC namespace, and the sender's allocator must not use expandable segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from troupe.workers.contract.weight_backends import ALLOCATOR_VARIABLES

PlainHandle = list[Any]
"""Offset and length of the buffer in its storage, then the numbers and bytes of `reduce_tensor` behind its types."""
_DEVICE = 6
"""Place of the device's number among the arguments of `rebuild_cuda_tensor`."""
_COUNTER = slice(7, 9)
"""Place of the name and the offset of torch's counter in a `PlainHandle`."""


def check_allocator(environment: Mapping[str, str]) -> None:
    """Verify that torch allocates memory that another process can open. Raises ValueError."""
    for name in ALLOCATOR_VARIABLES:
        settings = environment.get(name, "").lower().replace(" ", "").split(",")
        if {"expandable_segments:true", "expandable_segments:1"}.intersection(settings):
            why = "another process cannot open such memory, and weight_sync.backend is ipc"
            raise ValueError(f"the environment variable {name} sets expandable_segments: {why}; unset it")


def gpu_id(device: torch.device) -> str:
    """The GPU's identifier, equal in every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_handle(buffer: torch.Tensor) -> PlainHandle:
    """A new handle of a uint8 [n] buffer, for any number of processes on its GPU; `release_handle` ends it."""
    _, arguments = cast("tuple[Any, tuple[Any, ...]]", reduce_tensor(buffer))
    return [arguments[3], buffer.numel(), *arguments[_DEVICE:]]


def release_handle(handle: PlainHandle) -> None:
    """Let torch free the buffer of a handle that this process has exported, once nothing here refers to it. torch
    counts 1 for every handle, which a process that opens it counts down when done; memory above 0 stays for good.
    This process counts down as well, for handles that nobody opened; below 0 is as 0."""
    torch.UntypedStorage._release_ipc_counter_cuda(*handle[_COUNTER])


def open_handle(handle: PlainHandle, device: torch.device) -> torch.Tensor:
    """The buffer on the GPU as this process numbers it: uint8 [n], to be copied before the sender uses it again."""
    offset, length, _, *rest = handle
    types = (torch.Tensor, torch.Size([length]), (1,), offset, torch.storage.TypedStorage, torch.uint8)
    return rebuild_cuda_tensor(*types, device.index or 0, *rest)
