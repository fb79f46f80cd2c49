"""Prints the results of `troupe bench`: one table, the bottleneck of each point, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from troupe.orchestrator.commands.options import UNBOUNDED, natural_width, output_width
from troupe.orchestrator.insight.bench.bounds import best_of, bound_of
from troupe.orchestrator.insight.bench.results import Measures, Result
from troupe.orchestrator.insight.bench.trainers import TrainResult
from troupe.workers.contract.units import GIB


@dataclass(frozen=True)
class MeasureColumn:
    """A column of the table; it is left out if no point has a value."""

    title: str
    text: Callable[[Measures], str]


COLUMNS = (
    MeasureColumn("tok/s", lambda m: f"{m.tokens_per_s:.0f}"),
    MeasureColumn("± %", lambda m: _spread(m)),
    MeasureColumn("/engine", lambda m: f"{m.per_engine:.0f}"),
    MeasureColumn("/GPU", lambda m: "" if m.per_gpu is None else f"{m.per_gpu:.0f}"),
    MeasureColumn("prefill/s", lambda m: f"{m.prefill_per_s:.0f}"),
    MeasureColumn("decode/s", lambda m: f"{m.decode_per_s:.0f}"),
    MeasureColumn("seq p50 s", lambda m: f"{m.latency_s.p50:.2f}"),
    MeasureColumn("p99 s", lambda m: f"{m.latency_s.p99:.2f}"),
    MeasureColumn("first p50 s", lambda m: f"{m.first_token_s.p50:.2f}"),
    MeasureColumn("queued p99 s", lambda m: f"{m.queued_s.p99:.2f}"),
    MeasureColumn("cached", lambda m: f"{m.cached:.0%}"),
    MeasureColumn("KV max", lambda m: f"{m.most_kv_use:.0%}"),
    MeasureColumn("preempted", lambda m: str(m.preemptions)),
    MeasureColumn("running", lambda m: f"{m.running:.1f}"),
    MeasureColumn("busy", lambda m: f"{m.busy:.0%}"),
)


def show(results: Sequence[Result], cores: int | None, train: TrainResult | None) -> None:
    """Print everything to standard output."""
    console = Console(highlight=False, markup=False, width=output_width())
    for table in render(results, console.width):
        console.print(table)
    for line in advice(results, cores):
        console.print(line, soft_wrap=True)
    if train is not None and train.problem:
        console.print(f"trainers: not measured: {train.problem}", soft_wrap=True)
    elif train is not None:
        console.print(render_trainers(train, console.width))


def render_trainers(train: TrainResult, width: int = UNBOUNDED) -> Table:
    """A row for each role that trains; for each number if they are too wide."""
    heads = ["trainer", "workers", "tok/s", "MFU", "padding", "host GiB", "GPU GiB", "step s"]
    rows = [
        [
            one.role,
            str(one.workers),
            f"{one.tokens_per_s:.0f}",
            "" if one.mfu is None else f"{one.mfu:.1%}",
            f"{one.padding:.1%}",
            f"{one.host_bytes / GIB:.2f}",
            f"{one.gpu_bytes / GIB:.2f}" if one.gpu_bytes else "",
            f"{train.step_s:.2f}",
        ]
        for one in train.trainers
    ]
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    shown = [heads[i] for i in kept], [[row[i] for i in kept] for row in rows]
    wide = _table(*shown)
    table = wide if natural_width(wide) <= width else _transposed(*shown)
    table.caption = f"{train.sequences} sequences, {train.tokens} tokens a step"
    return table


def render(results: Sequence[Result], width: int = UNBOUNDED) -> Iterator[Table]:
    """The table of all points. One that is wider than `width` has a column for each point instead of a row.

    If that is too wide as well, it is continued in further tables.
    """
    heads, rows = _cells(results)
    wide = _table(heads, rows)
    if natural_width(wide) <= width:
        yield wide
        return
    first = 0
    while first < len(rows):
        count = len(rows) - first
        while count > 1 and natural_width(_transposed(heads, rows[first : first + count])) > width:
            count -= 1
        yield _transposed(heads, rows[first : first + count])
        first += count


def _cells(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """The heads of the columns, and a row for each point."""
    fields = [field.rpartition(".")[2] for field in results[0].point.settings]
    shown = [column for column in COLUMNS if any(column.text(m) for r in results if (m := r.measures) is not None)]
    rows: list[list[str]] = []
    for result in results:
        measures = result.measures
        numbers = ["-" for _ in shown] if measures is None else [column.text(measures) for column in shown]
        rows.append([*map(str, result.point.settings.values()), *numbers])
    return [*fields, *(column.title for column in shown)], rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A row for each point."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _transposed(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A column for each point."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for _ in rows:
        table.add_column(justify="right", no_wrap=True)
    for head, cells in zip(heads, zip(*rows, strict=True), strict=True):
        table.add_row(head, *cells)
    return table


def advice(results: Sequence[Result], cores: int | None) -> Iterator[str]:
    """The bottleneck of every point and what to change, and the fastest point as lines for the spec."""
    for result in results:
        name = result.point.label or result.point.spec.name
        bound = bound_of(result, results, cores)
        if bound is None:
            yield f"{name}: not measured: {result.problem}"
            continue
        yield f"{name}: bound by {bound.kind.value}: {bound.why}"
        for line in bound.lines:
            yield f"    {line}"
        if bound.note:
            yield f"    {bound.note}"
    best = best_of(results)
    if best is None or best.measures is None or not any(map(_is_free, best.point.settings)):
        return
    yield f"fastest: {best.measures.tokens_per_s:.0f} tokens/s with"
    for line in best.point.lines:
        yield f"    {line}"
    slowest = best.measures.slowest_batch
    alike = [
        one.point.label for one in results if one is not best and one.measures and one.measures.fastest_batch >= slowest
    ]
    if alike:
        yield f"    no slower, as far as its batches show: {'; '.join(alike)}"


def _is_free(field: str) -> bool:
    """Whether a swept field changes how samples are made, and not which ones."""
    return not field.startswith(("sampling.", "data.", "model."))


def _spread(measures: Measures) -> str:
    """Half the range of the batches, in percent of the median; empty for a single batch."""
    if measures.batches < 2 or not measures.tokens_per_s:
        return ""
    return f"{50 * (measures.fastest_batch - measures.slowest_batch) / measures.tokens_per_s:.0f}"
