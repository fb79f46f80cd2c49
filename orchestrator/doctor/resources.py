"""Checks of processors, memory, shared memory, disks and limits."""

from __future__ import annotations

from collections.abc import Iterator

from troupe.orchestrator.doctor.graphics import shm_remedy
from troupe.orchestrator.doctor.machine import UNLIMITED, Finding, Folder, Machine, Needs, gib
from troupe.workers.contract.units import GIB

_LEAST_MEMORY = 4 * GIB
"""An engine and a trainer without a model take 2.3 GiB."""
_LEAST_SHM = GIB
_LEAST_DISK = GIB
_LITTLE_DISK = 10 * GIB
_FULL_DISK = 0.95
"""Share of a disk from which on Ray refuses to spill objects to it."""
_FEW_FILES, _ENOUGH_FILES, _GOOD_FILES = 1024, 4096, 65536
_FEW_PROCESSES = 4096


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
        yield Finding("shm", "problem", found, shm_remedy(machine, wanted))
    elif needs.weight_file > shm.free:
        text = f"{found}; the weights of {needs.name} take {gib(needs.weight_file)}"
        if tmp is not None and tmp.free < needs.weight_file:
            text = f"{text}, and {tmp.path} has {gib(tmp.free)} free"
            yield Finding("shm", "problem", text, shm_remedy(machine, wanted))
        else:
            yield Finding("shm", "note", f"{text}: they go to the disk", shm_remedy(machine, wanted))
    elif shm.total < _LEAST_SHM:
        yield Finding("shm", "note", f"{found}: Ray keeps its objects on the disk", shm_remedy(machine, wanted))
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
    elif folder.use == "Ray's folder" and folder.total and 1 - folder.free / folder.total > _FULL_DISK:
        text = f"{found}: Ray moves no objects to a disk that is over 95% full"
        yield Finding("disk", "note", text, move)
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
