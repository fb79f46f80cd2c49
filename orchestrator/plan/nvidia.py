"""Facts about NVIDIA GPUs, from nvidia-smi, the driver's library and the kernel; does not initialize a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from troupe.workers.contract.units import MIB

_TIMEOUT_S = 20.0
_QUERY = "name,memory.total,memory.used,compute_cap,driver_version,index,uuid"
_VENDOR = "0x10de"
"""NVIDIA's number among PCI vendors."""
_DISPLAY = "0x03"
"""First digits of the PCI class of graphics and compute devices."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as nvidia-smi reports it."""

    name: str
    memory: int
    """Bytes."""
    used: int
    """Bytes that processes hold now."""
    capability: tuple[int, int]
    """CUDA compute capability."""


@dataclass(frozen=True)
class Graphics:
    """NVIDIA GPUs and their driver."""

    devices: int = 0
    """NVIDIA GPUs on the PCI bus or among the device files."""
    gpus: tuple[Gpu, ...] = ()
    """The GPUs that the driver shows."""
    driver: str = ""
    """Version of the driver; empty if none answers."""
    driver_cuda: tuple[int, int] | None = None
    """Newest CUDA version that the driver supports."""
    error: str = ""
    """Why nvidia-smi gave no answer."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""


def graphics() -> Graphics:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible."""
    answer, error = _nvidia_smi(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(_QUERY.split(","))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = [row for row in rows if is_visible(visible, row[5], row[6])]
    return Graphics(
        devices=max(sum(1 for _ in _pci()), len(rows)),
        gpus=tuple(_gpu(row) for row in shown),
        driver=rows[0][4] if rows else "",
        driver_cuda=_driver_cuda() if rows else None,
        error=error,
        visible=visible,
    )


def is_visible(visible: str | None, index: str, uuid: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, a list of indices or of beginnings of UUIDs, names this GPU."""
    if visible is None:
        return True
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return any(name == index or (not name.isdecimal() and uuid.startswith(name)) for name in named)


def _gpu(row: list[str]) -> Gpu:
    major, _, minor = row[3].partition(".")
    capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (99, 0)
    return Gpu(row[0], _bytes(row[1]), _bytes(row[2]), capability)


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * MIB if mebibytes.isdecimal() else 0


def _nvidia_smi(*arguments: str) -> tuple[str, str]:
    """(output, error) of nvidia-smi; one of them is empty."""
    try:
        command = ["nvidia-smi", *arguments]
        done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        return "", "nvidia-smi is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"nvidia-smi failed ({type(error).__name__})"
    if done.returncode == 0:
        return done.stdout, ""
    return "", " ".join((done.stdout + done.stderr).split())[:200] or f"nvidia-smi exited with {done.returncode}"


def _driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA version that the driver supports, from its library."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _pci() -> Iterator[Path]:
    """NVIDIA GPUs on the PCI bus."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _VENDOR and kind.startswith(_DISPLAY):
            yield device
