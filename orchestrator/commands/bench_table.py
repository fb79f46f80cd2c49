"""Prints the results of `troupe bench`: one table, the bottleneck of each point, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from troupe.orchestrator.commands.options import UNBOUNDED, fitting_table, output_width
from troupe.orchestrator.insight.bench.bounds import best_of, bound_of
from troupe.orchestrator.insight.bench.points import Point, settings_label
from troupe.orchestrator.insight.bench.results import Measures, Result

_SAMPLES = ("sampling.", "data.", "model.")


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


def show(results: Sequence[Result], cores: int | None, points: Sequence[Point]) -> None:
    """Print everything to standard output; `points`: all that were to be measured."""
    console = Console(highlight=False, markup=False, width=output_width())
    console.print(render(results, console.width))
    for line in advice(results, cores):
        console.print(line, soft_wrap=True)
    if left := [point.label for point in points if all(point is not result.point for result in results)]:
        console.print(f"interrupted before: {'; '.join(left)}", soft_wrap=True)


def render(results: Sequence[Result], width: int = UNBOUNDED) -> Table:
    """A row for each point; for each number if they are too wide."""
    shown = [column for column in COLUMNS if any(column.text(m) for r in results if (m := r.measures) is not None)]
    rows = [
        [result.point.label or result.point.spec.name]
        + ["-" if result.measures is None else column.text(result.measures) for column in shown]
        for result in results
    ]
    return fitting_table("", ["point", *(column.title for column in shown)], rows, width)


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
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(settings_label(_of_samples(result.point)), []).append(result)
    for samples, group in groups.items():
        yield from _fastest(samples, group)


def _of_samples(point: Point) -> Mapping[str, Any]:
    """The swept fields that change which samples are made, and not how: among their values none is the fastest."""
    return {field: value for field, value in point.settings.items() if field.startswith(_SAMPLES)}


def _fastest(samples: str, results: Sequence[Result]) -> Iterator[str]:
    """The fastest point of those that make the same samples, and those that may be as fast."""
    best = best_of(results)
    lines = [line for line in best.point.lines if not line.startswith(_SAMPLES)] if best is not None else []
    if best is None or best.measures is None or not lines:
        return
    yield f"fastest{f' of {samples}' if samples else ''}: {best.measures.tokens_per_s:.0f} tokens/s with"
    for line in lines:
        yield f"    {line}"
    slowest = best.measures.slowest_batch
    alike = [
        one.point.label for one in results if one is not best and one.measures and one.measures.fastest_batch >= slowest
    ]
    if alike:
        yield f"    no slower, as far as its batches show: {'; '.join(alike)}"


def _spread(measures: Measures) -> str:
    """Half the range of the batches, in percent of the median; empty for a single batch."""
    if measures.batches < 2 or not measures.tokens_per_s:
        return ""
    return f"{50 * (measures.fastest_batch - measures.slowest_batch) / measures.tokens_per_s:.0f}"
