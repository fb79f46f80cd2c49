"""Input and output of `troupe doctor`: the facts about a machine, what a spec needs, and what a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from troupe.orchestrator.plan.nvidia import Graphics
from troupe.workers.contract.units import GIB, MIB

UNLIMITED = -1
"""A limit that is not set."""

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    level: Level
    """`note`: works, but slower or not for everything; `problem`: runs will fail."""
    found: str
    remedy: str = ""
    """One command or sentence; empty if there is nothing to do."""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to, and the room on its file system in bytes."""

    use: str
    """What it is for: `working folder`."""
    path: str
    free: int
    total: int
    writable: bool = True


@dataclass(frozen=True)
class Software:
    """Python, the installed packages and the tools that compile extensions."""

    system: str
    """Result of `platform.system()`: `Linux`."""
    architecture: str
    python: tuple[int, int, int]
    executable: str
    packages: Mapping[str, str]
    """Version of every installed distribution, by normalized name."""
    requirements: Mapping[str, tuple[str, ...]]
    """Requirements (PEP 508) of Troupe, and of the packages that it builds on, by distribution."""
    torch_cuda: tuple[int, int] | None
    """CUDA version that torch was built for, or None for a CPU build or without torch."""
    compiler: str
    """Path of the C++ compiler; empty if there is no compiler."""
    python_headers: bool
    numa_library: bool
    """Whether libnuma, which vLLM's CPU build loads, is there."""


@dataclass(frozen=True)
class Resources:
    """Processors, memory and the limits on them."""

    cpus: int
    usable_cpus: float
    """Cores that affinity and control group leave to this process."""
    memory: int
    """Bytes of the machine."""
    memory_limit: int
    """Bytes that the control group allows, or `UNLIMITED`."""
    available: int
    """Bytes that new processes can take now, limits included."""
    shm: Folder
    folders: tuple[Folder, ...]
    open_files: tuple[int, int]
    """Soft and hard limit."""
    processes: int


@dataclass(frozen=True)
class Machine:
    """Every fact that the checks look at."""

    software: Software
    resources: Resources
    graphics: Graphics = field(default_factory=Graphics)
    loopback: str = ""
    """Why a connection to 127.0.0.1 failed; empty if it works."""
    proxy: str = ""
    """The proxy variable that also applies to 127.0.0.1; empty if none does."""
    temporary: str = ""
    """Folder in which Ray puts its sessions."""
    ray_address: str = ""
    """RAY_ADDRESS."""


@dataclass(frozen=True)
class Needs:
    """What a spec needs from one machine; memory and files in bytes, 0 if unknown."""

    name: str = ""
    """Name of the spec; empty if none is given."""
    gpus: float = 0.0
    cpus: float = 0.0
    host_memory: int = 0
    """Peak of all workers together, if all of them run here."""
    weight_file: int = 0
    """The policy's weights in shared memory."""
    checkpoint: int = 0
    """One checkpoint: model and optimizer."""
    checkpoints: int = 0
    """Checkpoints kept at a time, including the one being written."""


def gib(count: int) -> str:
    """GiB with one decimal; below 1 GiB, MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def version(numbers: tuple[int, ...]) -> str:
    """`12.8` of (12, 8)."""
    return ".".join(str(number) for number in numbers)
