"""Prints the plan of a run: tables of placements and of memory.

A table that is wider than the terminal is printed in another form, so that no number is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from textwrap import fill

from rich import box
from rich.console import Console
from rich.table import Table

from troupe.orchestrator.commands.options import UNBOUNDED, fitting_table, output_width
from troupe.orchestrator.plan.fit import MemoryPlan, SharedUse, UnknownModel, gib
from troupe.orchestrator.plan.memory import HEADROOM
from troupe.orchestrator.plan.plan import FASTER_BFLOAT16, Plan
from troupe.orchestrator.plan.worker_memory import PERIODS, Part, Where, WorkerMemory
from troupe.orchestrator.roles.names import role_of

COLUMNS = {
    "weights": ("weights",),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "avg": ("average",),
    "ref": ("reference", "teachers", "teacher adapters"),
    "gather": ("gathered",),
    "activ": ("activations", "fragments"),
    "logits": ("logits", "head", "kept"),
    "score": ("scoring",),
    "step": ("step",),
    "bufs": ("buffers", "transfer"),
    "kv": ("kv cache",),
    "graphs": ("graphs",),
    "load": ("loading",),
    "moved": ("moved",),
    "funcs": ("functions",),
    "proc": ("process",),
}
"""Headings of the memory table, and the parts that each adds up."""
_wrapped = partial(fill, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def render(plan: Plan) -> Table:
    """The placement of workers. What is long wraps at its words."""
    table = Table(title="placement", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("worker", no_wrap=True)
    table.add_column("cpus, gpus", no_wrap=True)
    table.add_column("group/bundle on node", overflow="fold")
    for row in plan.rows:
        place = f"{row.group}/{row.bundle} on {row.node}" if row.node else f"{row.group}: [red]no room[/red]"
        table.add_row(row.worker, f"{row.cpus:g}, {row.gpus:g}", place)
    for role, host in plan.in_process:
        table.add_row(role, "-", f"inside {host}")
    return table


def render_memory(memory: MemoryPlan, where: Where, width: int = UNBOUNDED) -> Table:
    """Memory of every worker in GiB, part by part, at most `width` columns wide.

    Workers that need the same share a row; if rows are too wide, every part has one.
    """
    workers = [worker for worker in memory.workers if worker.where == where]
    present = {part.name for worker in workers for part in worker.parts if part.bytes}
    columns = [heading for heading, names in COLUMNS.items() if present.intersection(names)]
    rows = [
        [name, *(gib(size) if (size := _size(worker, heading)) else "" for heading in columns), gib(worker.total)]
        for name, worker in _alike(workers)
    ]
    title = "memory of each GPU, GiB" if where == "gpu" else "host memory, GiB"
    return fitting_table(title, ["worker", *columns, "total"], rows, width)


def render_periods(memory: MemoryPlan, width: int = UNBOUNDED) -> Table:
    """What shared GPUs need in each period of a step, and what their workers would need at once, in GiB.

    If rows are wider than `width`, every number has one.
    """
    headings = (*PERIODS, "most", "at once", "GPU")
    alike: dict[tuple[int, ...], list[SharedUse]] = {}
    for use in memory.shared:
        numbers = (*use.periods.values(), use.most, use.alone, use.capacity)
        alike.setdefault(numbers, []).append(use)
    rows = [
        [", ".join(uses[0].workers) + (f" (and {len(uses) - 1} more)" if len(uses) > 1 else ""), *map(gib, numbers)]
        for numbers, uses in alike.items()
    ]
    return fitting_table("shared GPUs, GiB", ["workers", *headings], rows, width)


def _size(worker: WorkerMemory, heading: str) -> int:
    return sum(part.bytes for part in worker.parts if part.name in COLUMNS[heading])


def _alike(workers: Sequence[WorkerMemory]) -> Iterator[tuple[str, WorkerMemory]]:
    """`policy-0..3` and one of these workers, for workers of a role that need the same memory."""
    groups: dict[tuple[str, str, tuple[Part, ...]], list[WorkerMemory]] = {}
    for worker in workers:
        groups.setdefault((role_of(worker.worker), worker.where, worker.parts), []).append(worker)
    for same in groups.values():
        first, last = same[0].worker, same[-1].worker.rpartition("-")[2]
        yield (first if len(same) == 1 else f"{first}..{last}"), same[0]


def notes(memory: MemoryPlan) -> Iterator[str]:
    """Lines below the tables: caches, nodes, what is nearly full, and models whose size is not known."""
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
    for line in memory.warnings:
        yield f"warning: {line}; the estimates can be wrong by {100 * HEADROOM:.0f}%"
    for model in memory.unknown:
        yield f"warning: {_unknown(model)}; its workers are not counted"


def predictions(plan: Plan) -> Iterator[str]:
    """The predicted speed of a step, and the division of its GPUs."""
    if plan.faster_dtype:
        yield f"model.dtype: {FASTER_BFLOAT16} (--set model.dtype={plan.faster_dtype})"
    speed = plan.predicted
    if speed is None:
        return
    parts, how = f"sampling {speed.sampling_s:.1f} s, " if speed.sampling_gpus else "", "a roofline"
    if (rates := speed.rates) is None:
        how += "; sequences as long as allowed"
    else:
        lengths = f"{rates.prompt_tokens:,.0f} + {rates.response_tokens:,.0f} tokens"
        how = f"measured: {rates.tokens_per_s:,.0f} tokens/s an engine, sequences of {lengths}; the rest by {how}"
    yield (
        f"predicted ({how}): {speed.tokens_per_gpu:,.0f} tokens/s/GPU; a step of "
        f"{speed.step_s:.1f} s: {parts}training {speed.training_s:.1f} s at {speed.mfu:.0%} MFU, weights "
        f"{speed.transfer_s:.1f} s"
    )
    if not speed.divided:
        return
    waits, better = speed.idle, "no other division that fits is faster"
    age = f"samples are {speed.staleness:.1f} versions old; " if speed.staleness else ""
    if (one := plan.balance) is not None:
        better = f"{one.sampling} and {one.training} would take {one.step_s:.1f} s a step"
    sampled = f"{speed.sampling_gpus} GPUs sample and wait {waits[0]:.0%} of a step"
    yield f"balance: {sampled}, {speed.training_gpus} train and wait {waits[1]:.0%}; {age}{better}"


def unknown_sizes(plans: Sequence[MemoryPlan]) -> list[str]:
    """One line for each model whose size is not known: its section, why, and what to change.

    Models that stages train from these are not named: they have the same cause.
    """
    return list(dict.fromkeys(_unknown(model) for plan in plans for model in plan.unknown if not model.trained))


def _unknown(model: UnknownModel) -> str:
    text = f"{model.section}.path: the size of {model.path} is not known: {model.why}"
    remedy = f" (--set {model.section}.path=FOLDER names a folder with its config.json)"
    return text if model.trained else text + remedy


def show(plan: Plan, console: Console | None = None) -> None:
    """Print the placement of workers and their memory, on standard output unless there is a console."""
    if console is None:
        console = Console(width=output_width())
    console.print(render(plan))
    for where in ("gpu", "host"):
        if any(worker.where == where for worker in plan.memory.workers):
            console.print(render_memory(plan.memory, where, console.width))
    if plan.memory.shared:
        console.print(render_periods(plan.memory, console.width))
    asked, there = (f"{size['CPU']:g} CPU, {size['GPU']:g} GPU" for size in (plan.asked, plan.there))
    requested = f"requested: {asked}; the cluster has {there}"
    for note in (requested, *notes(plan.memory), *predictions(plan)):
        lines = note if console.width == UNBOUNDED else _wrapped(note, console.width)
        console.print(lines, markup=False, highlight=False, soft_wrap=True)
