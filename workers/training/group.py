"""The process group of a training group: joining, leaving, and reductions over its ranks.

DeepSpeed is imported when a group is joined, not before: an environment variable chooses its accelerator at import.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from types import ModuleType
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: it is documented

from troupe.workers.contract.config import Device, Rendezvous
from troupe.workers.models.sequence_parallel import SequenceGroup

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest wait of one rank for another; a collective that takes longer fails."""


def rendezvous_store(address: str, port: int, serve: bool) -> TCPStore:
    """The store through which the ranks of a training group find each other.

    Args:
        address: Host of the store.
        port: Port of the store; 0 with `serve` takes a free one (`store.port`).
        serve: Open the store in this process instead of connecting to it.
    """
    return TCPStore(address, port, is_master=serve, wait_for_workers=False, timeout=COLLECTIVE_TIMEOUT)


def join_group(rendezvous: Rendezvous, device: Device, store: TCPStore | None = None) -> None:
    """Make this process a rank of the training group. Call it before the process builds a `TrainEngine`.

    Args:
        rendezvous: Address of the store, rank and world size.
        device: Device of the rank.
        store: The store, if `rendezvous_store` opened it in this process.
    """
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
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store or rendezvous_store(rendezvous.address, rendezvous.port, serve=False),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    import_deepspeed().init_distributed(dist_backend=dist.get_backend(), timeout=COLLECTIVE_TIMEOUT)


def sequence_group(size: int) -> SequenceGroup | None:
    """The `size` adjacent ranks, among them this one, that share each micro-batch; None for one. Collective.

    Raises:
        ValueError: the number of ranks is no multiple of `size`.
    """
    if size == 1:
        return None
    ranks = dist.get_world_size()
    if ranks % size:
        raise ValueError(f"sequence_parallel_size {size} does not divide the {ranks} workers")
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
    """DeepSpeed, quiet and without the extension that only inference uses."""
    import deepspeed

    # Compiling the shared-memory all-reduce at first use takes a minute, and only inference calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def own_address() -> str:
    """Address of this machine for other machines; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only selects the outgoing interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
