"""The RDMA devices of this machine, and whether NCCL can use them: without a library it takes TCP, and says nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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

    def __str__(self) -> str:
        if not self.devices:
            return "TCP: no RDMA device"
        return f"TCP: {self.missing} is missing" if self.missing else f"RDMA: {', '.join(self.devices)}"


def loads(library: str) -> bool:
    """Whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def rdma(devices: Path = _DEVICES, is_there: Callable[[str], bool] = loads) -> Rdma:
    """The devices that the kernel shows. EFA's have their own library, an NCCL plugin."""
    found = sorted(devices.iterdir()) if devices.is_dir() else []
    drivers = {(device / "device" / "driver").resolve().name for device in found}
    library = EFA if drivers == {"efa"} else IBVERBS
    return Rdma(tuple(device.name for device in found), library if found and not is_there(library) else "")
