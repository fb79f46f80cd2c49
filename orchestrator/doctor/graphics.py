"""Checks of the NVIDIA driver, the GPUs and the connections between them."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.doctor.machine import UNLIMITED, Finding, Machine, Needs, gib, version
from troupe.workers.contract.units import GIB, MIB

_LEAST_CAPABILITY = (7, 0)
"""vLLM runs on GPUs from Volta on."""
_BFLOAT16_CAPABILITY = (8, 0)
_FREE_SHARE = 0.1
"""Share of a GPU's memory that may be in use without a note: engines take 0.85 of it by default."""
_NCCL_SHM = 256 * MIB
_LOCKED_MEMORY = GIB


def check_driver(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The driver, and whether it is new enough for torch."""
    graphics, software = machine.graphics, machine.software
    if not graphics.gpus:
        yield _no_gpus(machine, needs)
        return
    supported = f"CUDA up to {version(graphics.driver_cuda)}" if graphics.driver_cuda else "CUDA version not known"
    found = f"driver {graphics.driver}, {supported}"
    wanted = software.torch_cuda
    if wanted is None:
        if "torch" not in software.packages or "vllm" in software.packages:  # reported by packages, engine
            yield Finding("driver", "ok", found)
            return
        level = "problem" if needs.gpus else "note"
        remedy = "install torch's build for CUDA: pip install 'troupe-rl[gpu]'"
        yield Finding("driver", level, f"{found}; torch {software.packages['torch']} is built without CUDA", remedy)
    elif graphics.driver_cuda is None or graphics.driver_cuda >= wanted:
        yield Finding("driver", "ok", f"{found}; torch is built for CUDA {version(wanted)}")
    elif graphics.driver_cuda[0] < wanted[0]:
        found = f"{found}, but torch is built for CUDA {version(wanted)}"
        remedy = f"install a driver for CUDA {version(wanted)} or newer, or torch's build for CUDA "
        yield Finding("driver", "problem", found, f"{remedy}{version(graphics.driver_cuda)} or older")
    else:
        found = f"{found}, older than torch's CUDA {version(wanted)}: kernels compiled at run time may fail"
        yield Finding("driver", "note", found, f"install a driver for CUDA {version(wanted)} or newer")


def _no_gpus(machine: Machine, needs: Needs) -> Finding:
    graphics = machine.graphics
    if graphics.visible is not None and graphics.devices and not graphics.error:
        found = f"CUDA_VISIBLE_DEVICES={graphics.visible!r} hides every GPU"
        return Finding("driver", "problem" if needs.gpus else "note", found, "unset CUDA_VISIBLE_DEVICES")
    if graphics.devices:
        found = f"{graphics.devices} NVIDIA GPU(s), but no driver answers: {graphics.error or 'nvidia-smi shows none'}"
        if "mismatch" in graphics.error.lower():
            remedy = "reboot: the driver was updated while its old kernel module is still loaded"
        elif machine.surroundings.container:
            remedy = "start the container with its GPUs: docker run --gpus all (Kubernetes: limits nvidia.com/gpu)"
        else:
            remedy = "install NVIDIA's driver for this GPU and reboot"
        return Finding("driver", "problem", found, remedy)
    if needs.gpus:
        found = f"no NVIDIA GPU, but {needs.name} asks for {needs.gpus:g}"
        return Finding(
            "driver", "problem", found, "run it on a GPU machine, or join a cluster: troupe run --address ..."
        )
    return Finding("driver", "ok", "no NVIDIA GPU: everything runs on the CPU")


def check_gpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The GPUs themselves: number, age, free memory."""
    gpus = machine.graphics.gpus
    if not gpus:
        return
    problems = list(_gpu_problems(machine, needs))
    yield from problems
    if not problems:
        names = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
        text = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding("gpus", "ok", f"{text}, {gib(min(gpu.memory for gpu in gpus))} each")


def _gpu_problems(machine: Machine, needs: Needs) -> Iterator[Finding]:
    gpus = machine.graphics.gpus
    if needs.gpus > len(gpus):
        found = f"{needs.name} asks for {needs.gpus:g} GPUs, this machine shows {len(gpus)}"
        yield Finding("gpus", "problem", found, "lower the roles' workers, or join a cluster: troupe run --address ...")
    oldest = min(gpus, key=lambda gpu: gpu.capability)
    if oldest.capability < _LEAST_CAPABILITY:
        found = f"{oldest.name} has compute capability {version(oldest.capability)}; vLLM needs at least 7.0"
        yield Finding("gpus", "problem", found, "use a newer GPU (V100 or later)")
    elif oldest.capability < _BFLOAT16_CAPABILITY:
        found = f"{oldest.name} has compute capability {version(oldest.capability)}: no bfloat16"
        yield Finding("gpus", "note", found, "set model.dtype: float32")
    for index, gpu in enumerate(gpus):
        if gpu.used > _FREE_SHARE * gpu.memory:
            found = f"GPU {index}: {gib(gpu.used)} of {gib(gpu.memory)} are in use"
            remedy = "end the processes that nvidia-smi lists, or lower roles.rollout.gpu_memory_utilization"
            yield Finding("gpus", "note", found, remedy)
    if len({gpu.name for gpu in gpus}) > 1:
        found = f"different GPUs: {', '.join(sorted({gpu.name for gpu in gpus}))}"
        yield Finding("gpus", "note", found, "choose one kind with CUDA_VISIBLE_DEVICES: the slowest sets the pace")


def check_links(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """What NCCL needs between GPUs: direct access, shared memory, locked memory."""
    graphics, resources = machine.graphics, machine.resources
    if len(graphics.gpus) < 2 and not (graphics.gpus and graphics.infiniband):
        return
    findings: list[Finding] = []
    if len(graphics.gpus) > 1 and resources.shm.total < _NCCL_SHM:
        found = f"{resources.shm.path} has {gib(resources.shm.total)}: NCCL fails between the GPUs of one machine"
        findings.append(Finding("nccl", "problem", found, shm_remedy(machine, GIB)))
    slow = [
        (a, b, answer)
        for a, row in enumerate(graphics.p2p)
        for b, answer in enumerate(row)
        if a < b and answer not in ("OK", "X")
    ]
    if slow:
        a, b, answer = slow[0]
        pairs = f"{len(slow)} pair(s) of GPUs"
        found = f"{pairs} cannot read each other's memory (GPU {a} and {b}: {answer}): NCCL copies through the host"
        remedy = "see nvidia-smi topo -m; in a virtual machine, have the host disable ACS and IOMMU for the GPUs"
        findings.append(Finding("nccl", "note", found, remedy))
    locked = resources.locked_memory
    if graphics.infiniband and locked != UNLIMITED and locked < _LOCKED_MEMORY:
        found = f"InfiniBand, but only {gib(locked)} of memory may be locked: NCCL cannot register its buffers"
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1), before ray start"
        findings.append(Finding("nccl", "problem", found, remedy))
    yield from findings
    if not findings:
        known = "all pairs connect directly" if graphics.p2p else "connections not known"
        nccl = next((v for n, v in machine.software.packages.items() if n.startswith("nvidia-nccl-")), "")
        yield Finding("nccl", "ok", f"NCCL {nccl or '(part of torch)'}, {known}")


def shm_remedy(machine: Machine, size: int) -> str:
    """How to enlarge shared memory, in a container or outside."""
    whole = -(-size // GIB)
    if machine.surroundings.container:
        return f"docker run --shm-size={whole}g (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    return f"mount -o remount,size={whole}G /dev/shm"
