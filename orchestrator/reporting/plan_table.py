"""Prints the plan of a run: tables of placements and of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.capacity.fit import MemoryPlan, gib
from orchestrator.capacity.plan import Plan
from orchestrator.capacity.worker_memory import Part, Where, WorkerMemory

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
"""Headings of the memory table, and the parts that each adds up."""


def render(seating: Plan) -> Table:
    """The placement of workers as a table for the terminal."""
    table = Table(title="placement")
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
        f"requested: {asked['CPU']:g} CPU, {asked['GPU']:g} GPU; "
        f"the cluster has {there['CPU']:g} CPU, {there['GPU']:g} GPU"
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
    """`policy-0..3` and one of these workers, for workers of a role that need the same memory."""
    groups: dict[tuple[str, str, tuple[Part, ...]], list[WorkerMemory]] = {}
    for worker in workers:
        role, _, _ = worker.worker.rpartition("-")
        groups.setdefault((role, worker.where, worker.parts), []).append(worker)
    for same in groups.values():
        first, last = same[0].worker, same[-1].worker.rpartition("-")[2]
        yield (first if len(same) == 1 else f"{first}..{last}"), same[0]


def notes(memory: MemoryPlan) -> Iterator[str]:
    """Lines below the tables: caches, nodes, and models whose size is not known."""
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
        yield f"size of {path} is not known: {why}; its workers are not counted (--set model.path=FOLDER)"


def show(seating: Plan) -> None:
    """Print the placement of workers and their memory."""
    console = Console()
    console.print(render(seating))
    for where in ("gpu", "host"):
        if any(worker.where == where for worker in seating.memory.workers):
            console.print(render_memory(seating.memory, where))
    for note in notes(seating.memory):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
