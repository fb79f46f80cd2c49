"""`troupe plan`: who goes where and how much memory that takes, against what there is, before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.errors import UsageError
from orchestrator.memory import GIB, Part, Where, WorkerMemory
from orchestrator.memory_plan import MemoryPlan, Seated, Sizes, gib, memory_plan
from orchestrator.placement import GPU_GIB, Node, demand, fit, place, role_sizes, room
from orchestrator.spec_any import AnySpec

COLUMNS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "avg": ("average",),
    "ref": ("reference",),
    "gather": ("gathered",),
    "activ": ("activations",),
    "logits": ("logits", "head", "kept"),
    "step": ("step",),
    "bufs": ("buffers", "transfer"),
    "kv": ("kv cache",),
    "load": ("loading",),
    "funcs": ("functions",),
    "proc": ("process",),
}
"""Headings of the table, and the parts that stand below each."""


@dataclass(frozen=True)
class PlanRow:
    """One worker's seat."""

    worker: str
    cpus: float
    gpus: float
    group: str
    bundle: int
    node: str
    """Empty: no room."""


@dataclass(frozen=True)
class Plan:
    """The seating of a spec on a set of nodes."""

    rows: tuple[PlanRow, ...]
    in_process: tuple[tuple[str, str], ...]
    """Roles that live inside other workers, and whose."""
    asked: dict[str, float]
    there: dict[str, float]
    misfit: str
    """Empty, or the first reservation that finds no room, else the first memory that does not suffice, and what to
    change."""
    memory: MemoryPlan


def plan(spec: AnySpec, nodes: Sequence[Node], known: Sizes | None = None) -> Plan:
    """Seat every worker of the spec on the nodes, and add up its memory.

    :param known: sizes of models, read before or to come from an earlier stage
    """
    sizes = role_sizes(spec)
    placements = place(sizes)
    seating = fit(placements, nodes)
    rows = tuple(
        PlanRow(
            f"{seat.role}-{seat.index}",
            seat.cpus,
            seat.gpus,
            placement.name,
            seat.bundle,
            seating.node_of.get((placement.name, seat.bundle), ""),
        )
        for placement in placements
        for seat in placement.seats
    )
    there = {"CPU": sum(n.cpus for n in nodes), "GPU": sum(n.gpus for n in nodes)}
    misfit = ""
    if seating.missing is not None:
        role = seating.missing.seats[0].role
        misfit = (
            f"no room for {seating.missing.name}: it asks for {seating.missing.request}; "
            f"lower roles.{role}.workers, .cpus or .gpus, or add nodes"
        )
    in_process = tuple((size.role, size.colocate_with or "") for size in sizes if size.in_process)
    seated = [Seated(row.worker, row.group, row.bundle, row.gpus, row.node) for row in rows]
    memory = memory_plan(spec, seated, nodes, known if known is not None else Sizes())
    return Plan(rows, in_process, demand(placements), there, misfit or memory.misfit, memory)


def local_node(cpus: int, spec: AnySpec) -> Node:
    """This machine as Troupe's own local cluster would offer it: roles may take turns on its cores."""
    return Node("this machine", max(float(cpus), room(spec)["CPU"]), 0.0, _own_memory())


def _own_memory() -> int:
    """Memory of this machine, or of the control group it is confined to, in bytes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def described_nodes(text: str, cpus: int, node_gib: float = 0.0) -> list[Node]:
    """Nodes of a cluster given as NODESxGPUS (2x8: two nodes of eight GPUs) or NODESxGPUSxTYPE (2x8xH200), each with
    `cpus` cores and `node_gib` GiB of host memory (0: not known)."""
    match = re.fullmatch(r"([1-9]\d{0,4})x(\d{1,3})(?:x(.+))?", text)
    if match is None:
        raise UsageError(f"--cluster: '{text}' is not NODESxGPUS, as in 2x8, or NODESxGPUSxTYPE, as in 2x8xH200")
    if match[3] is not None and match[3].upper() not in GPU_GIB:
        raise UsageError(f"--cluster: no GPU type '{match[3][:60]}' (there are: {', '.join(GPU_GIB)})")
    gpu = int(GPU_GIB[match[3].upper()] * GIB) if match[3] is not None else 0
    # Of a described cluster the type of GPU may be known, and no other label.
    kind = match[3].upper() if match[3] is not None else None
    size = (float(cpus), float(match[2]), int(node_gib * GIB), gpu)
    return [Node(f"node-{i}", *size, accelerator=kind) for i in range(int(match[1]))]


def render(seating: Plan) -> Table:
    """The seating as a table for the terminal."""
    table = Table(title="who goes where")
    for column in ("worker", "cpus", "gpus", "placement group", "bundle", "node"):
        table.add_column(column, justify="right" if column in ("cpus", "gpus", "bundle") else "left")
    for row in seating.rows:
        table.add_row(
            row.worker, f"{row.cpus:g}", f"{row.gpus:g}", row.group, str(row.bundle), row.node or "[red]no room[/red]"
        )
    for role, host in seating.in_process:
        table.add_row(role, "-", "-", f"inside {host}", "-", "-")
    asked, there = seating.asked, seating.there
    table.caption = (
        f"asked: {asked['CPU']:g} CPU, {asked['GPU']:g} GPU; the cluster has {there['CPU']:g} CPU, {there['GPU']:g} GPU"
    )
    return table


def render_memory(memory: MemoryPlan, where: Where) -> Table:
    """Memory of every worker in GiB, part by part; workers that need the same share a row."""
    workers = [worker for worker in memory.workers if worker.where == where]
    present = {part.name for worker in workers for part in worker.parts if part.bytes}
    columns = [heading for heading, names in COLUMNS.items() if present.intersection(names)]
    title = "memory of each GPU, GiB" if where == "gpu" else "host memory, GiB"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("worker", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("total", justify="right", no_wrap=True)
    for name, worker in _alike(workers):
        sizes = [sum(part.bytes for part in worker.parts if part.name in COLUMNS[heading]) for heading in columns]
        table.add_row(name, *(gib(size) if size else "" for size in sizes), gib(worker.total))
    return table


def _alike(workers: Sequence[WorkerMemory]) -> Iterator[tuple[str, WorkerMemory]]:
    """`policy-0..3` and one of them, for workers of a role that need the same."""
    groups: dict[tuple[str, str, tuple[Part, ...]], list[WorkerMemory]] = {}
    for worker in workers:
        role, _, _ = worker.worker.rpartition("-")
        groups.setdefault((role, worker.where, worker.parts), []).append(worker)
    for same in groups.values():
        first, last = same[0].worker, same[-1].worker.rpartition("-")[2]
        yield (first if len(same) == 1 else f"{first}..{last}"), same[0]


def notes(memory: MemoryPlan) -> Iterator[str]:
    """What stands below the tables: caches, nodes, and models whose size is not known."""
    caches: dict[str, list[str]] = {}
    for engine, cache in memory.caches.items():
        text = f"a KV cache of {gib(cache.bytes)} GiB holds {cache.sequences} sequences of {cache.longest} tokens"
        caches.setdefault(text, []).append(engine)
    for text, engines in caches.items():
        yield f"{engines[0] if len(engines) == 1 else f'{engines[0]}..{len(engines) - 1}'}: {text}"
    for node in memory.nodes:
        parts = " + ".join(f"{part.name} {gib(part.bytes)}" for part in node.parts)
        there = f" of {gib(node.capacity)}" if node.capacity else ""
        yield f"{node.node}, host: {gib(node.total)}{there} GiB = {parts or 'nothing'}"
    for path, why in memory.unknown.items():
        yield f"sizes unknown of {path}: {why}; its workers are not counted (--set model.path=FOLDER)"


def as_json(name: str, seating: Plan) -> dict[str, Any]:
    """The plan as plain data; memory in bytes."""
    memory = seating.memory
    return {
        "name": name,
        "seats": [asdict(row) for row in seating.rows],
        "inside": dict(seating.in_process),
        "asked": seating.asked,
        "there": seating.there,
        "memory": [
            {"worker": w.worker, "of": w.where, "parts": _by_name(w.parts), "total": w.total} for w in memory.workers
        ],
        "kv_caches": {engine: asdict(cache) for engine, cache in memory.caches.items()},
        "nodes": [
            {"node": n.node, "parts": _by_name(n.parts), "total": n.total, "capacity": n.capacity or None}
            for n in memory.nodes
        ],
        "unknown": dict(memory.unknown),
        "misfit": seating.misfit or None,
    }


def _by_name(parts: Sequence[Part]) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


def show(seating: Plan) -> None:
    """Print the seating and its memory."""
    console = Console()
    console.print(render(seating))
    for where in ("gpu", "host"):
        if any(worker.where == where for worker in seating.memory.workers):
            console.print(render_memory(seating.memory, where))
    for note in notes(seating.memory):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
