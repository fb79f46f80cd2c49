"""Input and output of `troupe doctor`: the facts about this machine, and what a check found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from troupe.orchestrator.plan import nvidia
from troupe.orchestrator.plan.nvidia import Graphics
from troupe.orchestrator.telemetry.versions import installed_versions
from troupe.workers.contract.rdma import Rdma, loads, rdma
from troupe.workers.contract.units import GIB, MIB

UNLIMITED = -1
"""A limit that is not set."""
Level = Literal["ok", "note", "problem"]
_CGROUP = Path("/sys/fs/cgroup")
_PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "grpc_proxy", "all_proxy", "ALL_PROXY")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)", re.MULTILINE)


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

    packages: Mapping[str, str]
    """Version of every installed distribution, by normalized name."""
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


@dataclass(frozen=True)
class Machine:
    """Every fact that the checks look at."""

    software: Software
    resources: Resources
    graphics: Graphics = field(default_factory=Graphics)
    proxy: str = ""
    """The proxy variable that also applies to 127.0.0.1; empty if none does."""
    rdma: Rdma = field(default_factory=Rdma)


def gib(count: int) -> str:
    """GiB with one decimal; below 1 GiB, MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def version(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)


def gather(working: Path) -> Machine:
    return Machine(_software(), _resources(working), nvidia.graphics(), proxy=_proxy(), rdma=rdma())


def torch_cuda(text: str) -> tuple[int, int] | None:
    """CUDA version in the text of torch's `version.py`; None for a build for CPUs."""
    match = _TORCH_CUDA.search(text)
    return (int(match[1]), int(match[2])) if match else None


def _software() -> Software:
    return Software(
        packages=installed_versions(),
        torch_cuda=torch_cuda(_torch_version()),
        compiler=shutil.which(os.environ.get("CXX", "g++").partition(" ")[0]) or shutil.which("clang++") or "",
        python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        numa_library=loads("libnuma.so.1"),
    )


def _torch_version() -> str:
    """Text of torch's `version.py`; torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    return _read(Path(spec.origin).parent / "version.py") if spec is not None and spec.origin else ""


def _resources(working: Path) -> Resources:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = psutil.virtual_memory()
    limit, used = _memory_limit(memory.total)
    ray = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    return Resources(
        cpus=os.cpu_count() or 1,
        usable_cpus=_usable_cpus(),
        memory=memory.total,
        memory_limit=limit,
        available=memory.available if limit == UNLIMITED else max(0, min(memory.available, limit - used)),
        shm=_folder("shared memory", Path("/dev/shm")),
        folders=(
            _folder("working folder", working),
            _folder("temporary folder", Path(tempfile.gettempdir())),
            _folder("Ray's folder", ray),
        ),
        open_files=(_limit(files[0]), _limit(files[1])),
    )


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _folder(use: str, path: Path) -> Folder:
    """A folder, or its nearest existing parent if it does not exist yet."""
    there = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return Folder(use, str(path), 0, 0, writable=False)
    return Folder(use, str(path), usage.free, usage.total, os.access(there, os.W_OK))


def _usable_cpus() -> float:
    """Cores that affinity and the quota of any control group around this process leave."""
    usable = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu"):
        quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            usable = min(usable, int(quota) / int(period))
    return usable


def _memory_limit(memory: int) -> tuple[int, int]:
    """(limit, bytes in use) of the tightest control group around this process."""
    best, used = UNLIMITED, 0
    for group in _groups("memory"):
        limit = _read(group / "memory.max").strip() or _read(group / "memory.limit_in_bytes").strip()
        if not limit.isdecimal() or int(limit) >= memory or (best != UNLIMITED and int(limit) >= best):
            continue
        now = _read(group / "memory.current").strip() or _read(group / "memory.usage_in_bytes").strip()
        cache = re.search(r"^(?:total_)?inactive_file (\d+)", _read(group / "memory.stat"), re.MULTILINE)
        used = (int(now) if now.isdecimal() else 0) - (int(cache[1]) if cache else 0)
        best = int(limit)
    return best, max(0, used)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups around this process, of version 1 or 2, innermost first."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, own = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 mounts controllers together and links each name to their folder; some containers lack the link.
        top = next((_CGROUP / name for name in (controllers, controller) if (_CGROUP / name).is_dir()), _CGROUP)
        inner = top / own.lstrip("/")
        # In a container the path may be the host's, which is not visible; the container's own group is at the top.
        yield from (folder for folder in (inner, *inner.parents) if folder.is_dir() and folder.is_relative_to(top))


def _proxy() -> str:
    """The first proxy variable that is set, unless 127.0.0.1 is exempt."""
    exempt = [host.strip() for host in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")]
    if any(host in ("*", "127.0.0.1", "127.0.0.0/8") for host in exempt):
        return ""
    return next((name for name in _PROXIES if os.environ.get(name)), "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
