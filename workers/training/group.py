"""The process group of a training group: joining, leaving, and reductions over its ranks.

DeepSpeed is imported when a group is joined, not before: an environment variable chooses its accelerator at import.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

from troupe.workers.contract.config import Rendezvous
from troupe.workers.contract.config_base import Device
from troupe.workers.contract.units import MIB
from troupe.workers.models.sequence_parallel import SequenceGroup

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PROBE_BYTES: dict[Device, int] = {"cuda": 256 * MIB, "cpu": 4 * MIB}
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest wait of one rank for another; a collective that takes longer fails."""


def open_store(address: str, timeout: timedelta = COLLECTIVE_TIMEOUT) -> TCPStore:
    """The store through which the ranks of a group find each other, on a free port of this host, at this address
    alone: torch's own socket listens on every interface, and who reaches a store can move or end the training."""
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


@contextmanager
def within_node(address: str) -> Iterator[None]:
    """Makes groups of gloo that are created inside the block listen at loopback, if their store does."""
    before = os.environ.get(_GLOO_INTERFACE)
    if address == LOOPBACK:
        os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_GLOO_INTERFACE, None)
        else:
            os.environ[_GLOO_INTERFACE] = before


def join_group(rendezvous: Rendezvous, device: Device, store: TCPStore | None = None) -> None:
    """Make this process a rank of the group, before it builds a `TrainEngine`. `store`: its own (`open_store`)."""
    os.environ |= {
        "DS_ACCELERATOR": device,
        "RANK": str(rendezvous.rank),
        "WORLD_SIZE": str(rendezvous.world_size),
        # Each rank is an actor that sees only its own GPU, as number 0.
        "LOCAL_RANK": "0",
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
    }
    if device == "cuda":
        torch.cuda.set_device(0)
    if store is None:
        store = TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    with within_node(rendezvous.address):
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        import_deepspeed().init_distributed(dist_backend=dist.get_backend(), timeout=COLLECTIVE_TIMEOUT)


def all_reduce_line(device: Device) -> str:
    """How fast the ranks of the group add up a tensor: the bus bandwidth of nccl-tests. Collective."""
    size, ranks = _PROBE_BYTES[device], dist.get_world_size()
    values, seconds = torch.ones(size // 4, device=device), 0.0
    for _ in range(2):  # the first one connects the ranks
        began = time.monotonic()
        dist.all_reduce(values)
        values[0].item()  # waits for a GPU
        seconds = time.monotonic() - began
    rate = 2 * (ranks - 1) / ranks * size / seconds
    return f"an all-reduce of {size // MIB} MiB over {ranks} ranks runs at {rate / 1e9:.2g} GB/s a rank"


def sequence_group(size: int) -> SequenceGroup | None:
    """The `size` adjacent ranks, among them this one, that share each micro-batch; None for one. Collective. Raises
    ValueError if the number of ranks is no multiple of `size`."""
    if size == 1:
        return None
    ranks = dist.get_world_size()
    if ranks % size:
        raise ValueError(f"sequence_parallel_size {size} does not divide the {ranks} workers")
    with within_node(os.environ["MASTER_ADDR"]):
        group, _ = dist.new_subgroups(group_size=size, timeout=COLLECTIVE_TIMEOUT)
    return SequenceGroup(cast(dist.ProcessGroup, group), size, dist.get_rank() % size)


def leave_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduce(values: Mapping[str, float], device: Device, operation: Literal["sum", "max"]) -> dict[str, float]:
    """Sum or maximum over ranks of each named number. Collective; every rank passes the same names."""
    names = sorted(values)
    total = torch.tensor([values[name] for name in names], dtype=torch.double, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return dict(zip(names, total.tolist(), strict=True))


def import_deepspeed() -> ModuleType:
    """DeepSpeed, quiet, without the extension that only inference uses, and with float16 on every CPU."""
    import deepspeed

    # Compiling the shared-memory all-reduce at first use takes a minute, and only inference calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator: Any = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        # Its own answer is whether oneDNN has kernels for it here. torch computes it on any CPU, only more slowly.
        accelerator.is_fp16_supported = lambda: True
    return deepspeed


def own_address() -> str:
    """Address of this machine for other machines; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only selects the outgoing interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
