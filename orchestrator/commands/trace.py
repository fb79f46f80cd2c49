"""`troupe trace`: the timeline of a run as a file for Perfetto, and how busy every role was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import RunArgument
from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.orchestrator.reporting.run_folder import RunFolder

_STEPS = re.compile(r"(\d*)(:?)(\d*)")
_MOST_STEPS = 20
"""Steps whose bound is printed; the last ones."""


def trace(
    run_folder: RunArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, as in trace.json.")],
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only these steps, both included; A:, :B or one step.")
    ] = None,
) -> None:
    """Write the timeline of a run as a trace file for ui.perfetto.dev."""
    from troupe.orchestrator.reporting.run_folder import RunFolder
    from troupe.orchestrator.reporting.trace import trace_events, write_trace

    run, (first, last) = RunFolder(run_folder), _range(steps)
    timeline = run.timeline_of(first, last)
    if not timeline.num_rows:
        known = list(run.timeline_files())
        there = f": there are steps {known[0]} to {known[-1]}" if known else ""
        raise UsageError(f"{run.path} has no timeline{' of these steps' if steps else ''}{there}")
    _summarize(run, timeline)
    events = trace_events(timeline)
    write_trace(events, out)
    typer.echo(f"wrote {out}: {timeline.num_rows} calls; open it in https://ui.perfetto.dev")


def _range(steps: str | None) -> tuple[int | None, int | None]:
    """First and last step of `A:B`."""
    found = _STEPS.fullmatch(":" if steps is None else steps)
    if found is None or not (found[1] or found[2]):
        raise UsageError(f"--steps: {steps!r} is no range of steps: use A:B, A:, :B or one number")
    first = int(found[1]) if found[1] else None
    last = (int(found[3]) if found[3] else None) if found[2] else first
    if first is not None and last is not None and last < first:
        raise UsageError(f"--steps: {steps!r} ends before it begins")
    return first, last


def _summarize(run: RunFolder, timeline: pa.Table) -> None:
    """Prints how busy every role was during the steps, and the bottleneck of each."""
    import pyarrow as pa
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from troupe.orchestrator.reporting.utilization import busy_roles, step_bounds, step_windows

    steps = step_windows(timeline)
    if not steps:
        return
    windows, last = list(steps.values()), max(steps)
    timeline = pa.concat_tables([timeline, run.crossing(last, steps[last][1])])
    roles = Table("role", title="busy", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("workers", "busy s", "idle s", "busy"):
        roles.add_column(name, justify="right")
    for one in busy_roles(timeline, windows):
        times = f"{one.busy_s:.2f}", f"{max(0.0, one.wall_s - one.busy_s):.2f}", f"{one.share:.0%}"
        roles.add_row(one.role, str(one.workers), *times)
    bounds = Table(
        "step", title="bound of a step: max(R, T)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("seconds", "R engines", "T trainers", "max(R, T)", "of the step"):
        bounds.add_column(name, justify="right")
    for one in step_bounds(timeline)[-_MOST_STEPS:]:
        times = (one.wall_s, one.rollout_s, one.train_s, one.bound_s)
        share = one.bound_s / one.wall_s if one.wall_s > 0 else 0.0
        bounds.add_row(str(one.step), *(f"{seconds:.2f}" for seconds in times), f"{share:.0%} ({one.limit})")
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(roles)
    console.print(bounds)
