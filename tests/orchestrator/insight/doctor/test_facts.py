"""Facts about this machine: how each is read, and that none of them is a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.orchestrator.insight.doctor import machine
from troupe.orchestrator.insight.doctor.machine import UNLIMITED, torch_cuda
from troupe.orchestrator.plan.nvidia import is_visible
from troupe.workers.contract.units import GIB


def test_the_cuda_version_is_read_from_torchs_version_file() -> None:
    head = "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n__version__ = '2.13.0'\n"
    assert torch_cuda(f"{head}cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n") == (13, 0)
    assert torch_cuda(f"{head}cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n") is None


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, "012"), ("", ""), ("0,2", "02"), ("GPU-b", "1"), ("-1", ""), ("NoDevFiles", "")],
)
def test_the_visible_gpus_are_those_of_cuda_visible_devices(visible: str | None, shown: str) -> None:
    uuids = ("GPU-aaa", "GPU-bbb", "GPU-ccc")
    assert "".join(str(i) for i, uuid in enumerate(uuids) if is_visible(visible, str(i), uuid)) == shown


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (
            "0::/pod\n",
            {"pod/memory.max": str(8 * GIB), "pod/memory.current": str(3 * GIB), "pod/cpu.max": "150000 100000"},
        ),
        (
            "4:memory:/pod\n3:cpu,cpuacct:/pod\n",
            {
                "memory/pod/memory.limit_in_bytes": str(8 * GIB),
                "memory/pod/memory.usage_in_bytes": str(3 * GIB),
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "100000",
            },
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_limits_of_control_groups_are_read_in_both_versions(
    version: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    read = machine._read
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_read", lambda path: version if path == Path("/proc/self/cgroup") else read(path))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(16)))
    assert machine._memory_limit(64 * GIB) == (8 * GIB, 3 * GIB)
    assert machine._usable_cpus() == 1.5


def test_without_control_groups_there_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine._memory_limit(64 * GIB) == (UNLIMITED, 0)


def test_a_proxy_counts_unless_loopback_is_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*machine._PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert machine._proxy() == ""
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert machine._proxy() == "https_proxy"
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert machine._proxy() == ""
