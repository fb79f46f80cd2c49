"""Checks of GPUs and their driver, processors, memory, shared memory, disks, limits and loopback."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.cluster.ray_environment import ADDRESS_VARIABLE, address_problem, sockets_problem
from troupe.orchestrator.insight.doctor.machine import UNLIMITED, Finding, Folder, Machine, Needs, gib, version
from troupe.workers.contract.units import GIB, MIB

_BFLOAT16_CAPABILITY = (8, 0)
_FREE_SHARE = 0.1
"""Share of a GPU's memory that may be in use without a note: engines take 0.85 of it by default."""
_NCCL_SHM = 256 * MIB
_LEAST_MEMORY = 4 * GIB
"""An engine and a trainer without a model take 2.3 GiB."""
_LEAST_SHM = GIB
_LEAST_DISK = GIB
_LITTLE_DISK = 10 * GIB
_FEW_FILES, _ENOUGH_FILES, _GOOD_FILES = 1024, 4096, 65536
_FEW_PROCESSES = 4096


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
        else:
            remedy = "install NVIDIA's driver; in a container: docker run --gpus all (Kubernetes: nvidia.com/gpu)"
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
    if oldest.capability < _BFLOAT16_CAPABILITY:
        found = f"{oldest.name} has compute capability {version(oldest.capability)}: no bfloat16"
        yield Finding("gpus", "note", found, "set model.dtype: float32")
    for index, gpu in enumerate(gpus):
        if gpu.used > _FREE_SHARE * gpu.memory:
            found = f"GPU {index}: {gib(gpu.used)} of {gib(gpu.memory)} are in use"
            remedy = "end the processes that nvidia-smi lists, or lower roles.rollout.gpu_memory_utilization"
            yield Finding("gpus", "note", found, remedy)


def shm_remedy(size: int) -> str:
    """How to enlarge shared memory, outside a container and in one."""
    whole = -(-size // GIB)
    return (
        f"mount -o remount,size={whole}G /dev/shm; in a container: docker run --shm-size={whole}g (Kubernetes: an "
        "emptyDir with medium Memory at /dev/shm)"
    )


def check_cpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Cores, and how many of them may be used."""
    resources = machine.resources
    usable = resources.usable_cpus
    limited = f"{usable:g} of {resources.cpus} cores may be used" if usable < resources.cpus else ""
    if usable < 1:
        found = f"{limited}: workers will miss their timeouts"
        yield Finding("cpus", "problem", found, "raise the limit (docker run --cpus=2, or the pod's limits)")
    elif limited:
        remedy = f"set roles.*.threads so that they add up to at most {max(1, int(usable))}, or raise the limit"
        yield Finding("cpus", "note", f"{limited}: threads for all cores would slow each other down", remedy)
    else:
        yield Finding("cpus", "ok", f"{resources.cpus} cores")


def check_memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Host memory against the control group's limit and the spec's plan."""
    resources = machine.resources
    limit = resources.memory_limit
    size = resources.memory if limit == UNLIMITED else min(limit, resources.memory)
    of = f"{gib(size)}" + (f" (limit; the machine has {gib(resources.memory)})" if size < resources.memory else "")
    found = f"{gib(resources.available)} available of {of}"
    if needs.host_memory > size:
        remedy = f"use a smaller model or smaller batches: troupe plan shows what {needs.name} takes"
        yield Finding("memory", "problem", f"{needs.name} needs {gib(needs.host_memory)} at its peak; {found}", remedy)
    elif size < _LEAST_MEMORY:
        found = f"{found}; an engine and a trainer take over 2 GiB without their model"
        yield Finding("memory", "problem", found, "use a machine, or a limit, of 8 GiB or more")
    elif resources.available < max(_LEAST_MEMORY, needs.host_memory):
        wanted = f"; {needs.name} needs {gib(needs.host_memory)} at its peak" if needs.host_memory else ""
        yield Finding("memory", "note", found + wanted, "end other processes before a run (ps aux --sort -rss | head)")
    else:
        yield Finding("memory", "ok", found)


def check_shm(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Shared memory, where weights are published and Ray keeps its objects."""
    shm = machine.resources.shm
    found = f"{shm.path} has {gib(shm.free)} free of {gib(shm.total)}"
    wanted = max(2 * needs.weight_file, _LEAST_SHM)
    tmp = next((folder for folder in machine.resources.folders if folder.use == "temporary folder"), None)
    if not shm.writable or not shm.total:
        found = f"{shm.path} is missing or cannot be written: neither Ray nor vLLM starts"
        yield Finding("shm", "problem", found, shm_remedy(wanted))
    elif len(machine.graphics.gpus) > 1 and shm.total < _NCCL_SHM:
        yield Finding("shm", "problem", f"{found}: NCCL fails between the GPUs of one machine", shm_remedy(wanted))
    elif needs.weight_file > shm.free:
        text = f"{found}; the weights of {needs.name} take {gib(needs.weight_file)}"
        if tmp is not None and tmp.free < needs.weight_file:
            text = f"{text}, and {tmp.path} has {gib(tmp.free)} free"
            yield Finding("shm", "problem", text, shm_remedy(wanted))
        else:
            yield Finding("shm", "note", f"{text}: they go to the disk", shm_remedy(wanted))
    elif shm.total < _LEAST_SHM:
        yield Finding("shm", "note", f"{found}: Ray keeps its objects on the disk", shm_remedy(wanted))
    else:
        used = f"; the weights of {needs.name} take {gib(needs.weight_file)}" if needs.weight_file else ""
        yield Finding("shm", "ok", found + used)


def check_disk(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The folders that runs write to."""
    findings = [finding for folder in machine.resources.folders for finding in _folder(folder, needs)]
    yield from findings
    if not findings:
        least = min(machine.resources.folders, key=lambda folder: folder.free, default=None)
        yield Finding("disk", "ok", f"at least {gib(least.free)} free ({least.path})" if least else "no folder checked")


def _folder(folder: Folder, needs: Needs) -> Iterator[Finding]:
    found = f"{folder.use} {folder.path}: {gib(folder.free)} free of {gib(folder.total)}"
    move = _MOVES.get(folder.use, "free some space")
    checkpoints = needs.checkpoint * needs.checkpoints if folder.use == "working folder" else 0
    if not folder.writable:
        yield Finding("disk", "problem", f"{folder.use} {folder.path} cannot be written", move)
    elif folder.free < _LEAST_DISK:
        yield Finding("disk", "problem", found, move)
    elif folder.free < checkpoints:
        text = f"{found}; {needs.name} keeps {needs.checkpoints} checkpoints of {gib(needs.checkpoint)}"
        yield Finding("disk", "problem", text, "lower checkpoint.keep, or choose another folder with troupe run --out")
    elif folder.free < _LITTLE_DISK:
        yield Finding("disk", "note", f"{found}: little for checkpoints of a large model", move)


_MOVES = {
    "working folder": "free some space, or write runs elsewhere: troupe run --out FOLDER",
    "temporary folder": "export TMPDIR=/a/folder/with/room",
    "Ray's folder": "export RAY_TMPDIR=/a/folder/with/room",
}


def check_limits(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Open files and processes."""
    soft, hard = machine.resources.open_files
    processes = machine.resources.processes
    findings: list[Finding] = []
    if 0 <= soft < _ENOUGH_FILES:
        target = _GOOD_FILES if hard == UNLIMITED else min(hard, _GOOD_FILES)
        raised = f"ulimit -n {target}" if target > soft else "raise nofile in /etc/security/limits.conf to 65536"
        level = "problem" if soft < _FEW_FILES else "note"
        found = f"{soft} open files; Ray opens several for each worker and connection"
        findings.append(Finding("limits", level, found, raised))
    if 0 <= processes < _FEW_PROCESSES:
        found = f"{processes} processes and threads; each worker has up to a few hundred threads"
        remedy = f"ulimit -u {4 * _FEW_PROCESSES} (docker run --pids-limit=-1)"
        findings.append(Finding("limits", "problem" if processes < _FEW_PROCESSES // 4 else "note", found, remedy))
    yield from findings
    if not findings:
        shown = "unlimited" if processes == UNLIMITED else str(processes)
        yield Finding("limits", "ok", f"{'unlimited' if soft == UNLIMITED else soft} open files, {shown} processes")


def check_network(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Loopback and proxies: Ray's processes talk over 127.0.0.1."""
    if machine.loopback:
        remedy = "bring it up (ip link set lo up), and allow connections on lo in the firewall"
        yield Finding("network", "problem", f"no connection to 127.0.0.1: {machine.loopback}", remedy)
    elif machine.proxy:
        found = f"{machine.proxy} also applies to 127.0.0.1: Ray's connections go through the proxy"
        yield Finding("network", "note", found, "export no_proxy=localhost,127.0.0.1")
    else:
        yield Finding("network", "ok", "127.0.0.1 answers")


def check_ray(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The environment of Ray: a temporary folder with room for the names of its sockets, and the address to join."""
    found: list[Finding] = []
    if machine.temporary and (wrong := sockets_problem(machine.temporary)):
        what, _, remedy = wrong.partition(": ")
        found.append(Finding("ray", "problem", what, remedy))
    if machine.ray_address and (wrong := address_problem(machine.ray_address)):
        what, _, remedy = wrong.partition(": ")
        found.append(Finding("ray", "problem", f"{ADDRESS_VARIABLE} {machine.ray_address} {what}", remedy))
    yield from found or [Finding("ray", "ok", "its sockets have room, and its address can be one")]
