"""Prints the results of `troupe bench`: one table, what bounds the points, and what to change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from troupe.orchestrator.bench.bounds import best_of, bound_of
from troupe.orchestrator.bench.results import Measures, Result

_UNBOUNDED = 1000
"""Width of output that goes to no terminal."""


@dataclass(frozen=True)
class Column:
    """A column of the table; it is left out where no point has a value."""

    title: str
    text: Callable[[Measures], str]


COLUMNS = (
    Column("tok/s", lambda m: f"{m.tokens_per_s:.0f}"),
    Column("± %", lambda m: _spread(m)),
    Column("/engine", lambda m: f"{m.per_engine:.0f}"),
    Column("/GPU", lambda m: "" if m.per_gpu is None else f"{m.per_gpu:.0f}"),
    Column("scaling", lambda m: "" if m.efficiency is None else f"{m.efficiency:.0%}"),
    Column("bare tok/s", lambda m: "" if m.bare_tokens_per_s is None else f"{m.bare_tokens_per_s:.0f}"),
    Column("of bare", lambda m: "" if m.against_bare is None else f"{m.against_bare:.3f}"),
    Column("prefill/s", lambda m: f"{m.prefill_per_s:.0f}"),
    Column("decode/s", lambda m: f"{m.decode_per_s:.0f}"),
    Column("seq p50 s", lambda m: f"{m.latency_s.p50:.2f}"),
    Column("p99 s", lambda m: f"{m.latency_s.p99:.2f}"),
    Column("first p50 s", lambda m: f"{m.first_token_s.p50:.2f}"),
    Column("queued p99 s", lambda m: f"{m.queued_s.p99:.2f}"),
    Column("cached", lambda m: f"{m.cached:.0%}"),
    Column("KV max", lambda m: f"{m.most_kv_use:.0%}"),
    Column("preempted", lambda m: str(m.preemptions)),
    Column("running", lambda m: f"{m.running:.1f}"),
    Column("busy", lambda m: f"{m.busy:.0%}"),
)


def show(results: Sequence[Result], cores: int | None) -> None:
    """Print everything to standard output."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, markup=False, width=None if terminal else _UNBOUNDED)
    console.print(render(results))
    for line in advice(results, cores):
        console.print(line, soft_wrap=True)


def render(results: Sequence[Result]) -> Table:
    """The table of all points."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    fields = list(results[0].point.settings)
    for field in fields:
        table.add_column(field.rpartition(".")[2], justify="right")
    shown = [column for column in COLUMNS if any(column.text(m) for r in results if (m := r.measures) is not None)]
    for column in shown:
        table.add_column(column.title, justify="right")
    for result in results:
        cells = [str(value) for value in result.point.settings.values()]
        if result.measures is not None:
            cells += [column.text(result.measures) for column in shown]
        elif shown:
            cells.append("failed")
        table.add_row(*cells)
    return table


def advice(results: Sequence[Result], cores: int | None) -> Iterator[str]:
    """What bounds every point and what to change, and the fastest point as lines for the spec."""
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
    if best is not None and best.measures is not None and best.point.settings:
        yield f"fastest: {best.measures.tokens_per_s:.0f} tokens/s with"
        for line in best.point.lines:
            yield f"    {line}"


def _spread(measures: Measures) -> str:
    """Half the range of the turns, in percent of the median; empty for a single turn."""
    if measures.turns < 2 or not measures.tokens_per_s:
        return ""
    return f"{50 * (measures.fastest_turn - measures.slowest_turn) / measures.tokens_per_s:.0f}"
