"""The RDMA devices of this machine, and whether NCCL can use them: without a library it takes TCP, and says nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

IBVERBS, EFA = "libibverbs.so.1", "libnccl-net-ofi.so"
"""Libraries that NCCL loads for InfiniBand and RoCE, and for AWS's EFA."""
_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Rdma:
    """The devices, and what keeps NCCL from using them."""

    devices: tuple[str, ...] = ()
    missing: str = ""
    """The library that cannot be loaded; empty if NCCL can use the devices, or if there are none."""
    forbidden: str = ""
    """The environment variable by which NCCL does not use the devices; empty if there is none."""

    def __str__(self) -> str:
        if not self.devices:
            return "TCP: no RDMA device"
        if self.forbidden:
            return f"TCP: {self.forbidden} is set"
        return f"TCP: {self.missing} is missing" if self.missing else f"RDMA: {', '.join(self.devices)}"


def loads(library: str) -> bool:
    """Whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def rdma(
    devices: Path = _DEVICES, is_there: Callable[[str], bool] = loads, environment: Mapping[str, str] = os.environ
) -> Rdma:
    """The devices that the kernel shows. EFA's have their own library, an NCCL plugin."""
    found = sorted(devices.iterdir()) if devices.is_dir() else []
    drivers = {(device / "device" / "driver").resolve().name for device in found}
    library = EFA if drivers == {"efa"} else IBVERBS
    missing = library if found and not is_there(library) else ""
    return Rdma(tuple(device.name for device in found), missing, _forbidding(environment) if found else "")


def _forbidding(environment: Mapping[str, str]) -> str:
    """The variable by which NCCL takes TCP (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)."""
    if environment.get("NCCL_IB_DISABLE", "0") != "0":
        return "NCCL_IB_DISABLE"
    return "NCCL_NET=Socket" if environment.get("NCCL_NET", "").lower() == "socket" else ""
