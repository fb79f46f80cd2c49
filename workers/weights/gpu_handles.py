"""Handles with which another process on the same GPU opens a buffer (CUDA IPC), as plain values for vLLM's msgpack.

Untested on GPU. Both processes must share the IPC namespace, and the sender's allocator must not use expandable
segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

PlainHandle = list[Any]
"""Offset and length of the buffer in its storage, then the numbers and bytes of `reduce_tensor` behind its types."""
_DEVICE = 6
"""Place of the device's number among the arguments of `rebuild_cuda_tensor`."""


def check_allocator(environment: Mapping[str, str]) -> None:
    """Verify that torch allocates memory that another process can open. Raises ValueError."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = environment.get(name, "").lower().replace(" ", "").split(",")
        if {"expandable_segments:true", "expandable_segments:1"}.intersection(settings):
            why = "another process cannot open such memory, and weight_sync.backend is ipc"
            raise ValueError(f"the environment variable {name} sets expandable_segments: {why}; unset it")


def gpu_id(device: torch.device) -> str:
    """The GPU's identifier, equal in every process that sees it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_handle(buffer: torch.Tensor) -> PlainHandle:
    """A new handle of a uint8 [n] buffer; it can be opened once on each device."""
    _, arguments = cast("tuple[Any, tuple[Any, ...]]", reduce_tensor(buffer))
    return [arguments[3], buffer.numel(), *arguments[_DEVICE:]]


def open_handle(handle: PlainHandle, device: torch.device) -> torch.Tensor:
    """The buffer as this process sees it: uint8 [n], to be copied before the sender uses it again.

    Args:
        handle: From `export_handle` in the other process.
        device: The GPU, as this process numbers it.
    """
    offset, length, _, *rest = handle
    types = (torch.Tensor, torch.Size([length]), (1,), offset, torch.storage.TypedStorage, torch.uint8)
    return rebuild_cuda_tensor(*types, device.index or 0, *rest)
