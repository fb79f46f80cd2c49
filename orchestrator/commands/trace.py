"""`troupe trace`: the timeline of a run as a file for Perfetto, and how busy every role was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import JsonOption, RunArgument, echo_json
from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.orchestrator.insight.utilization import RoleTime, StepBound
    from troupe.orchestrator.telemetry.run_folder import RunFolder

_STEPS = re.compile(r"(\d*)(:?)(\d*)")
_MOST_STEPS = 20
"""Steps whose bound is printed; the last ones."""


def trace(
    run_folder: RunArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write, as in trace.json.")],
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only these steps, both included; A:, :B or one step.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the timeline of a run as a trace file for ui.perfetto.dev."""
    from troupe.orchestrator.insight.trace import trace_events, write_trace
    from troupe.orchestrator.telemetry.run_folder import RunFolder

    run, (first, last) = RunFolder(run_folder), _range(steps)
    timeline = run.timeline_of(first, last)
    if not timeline.num_rows:
        known = list(run.timeline_files())
        there = f": there are steps {known[0]} to {known[-1]}" if known else ""
        raise UsageError(f"{run.path} has no timeline{' of these steps' if steps else ''}{there}")
    roles, bounds = _utilization(run, timeline)
    write_trace(trace_events(timeline), out)
    if as_json:
        echo_json(
            {
                "file": out,
                "calls": timeline.num_rows,
                "roles": [{**asdict(one), "idle_s": one.idle_s, "share": one.share} for one in roles],
                "steps": [{**asdict(one), "bound_s": one.bound_s, "limit": one.limit} for one in bounds],
            }
        )
        return
    if bounds:
        _show(roles, bounds[-_MOST_STEPS:])
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


def _utilization(run: RunFolder, timeline: pa.Table) -> tuple[list[RoleTime], list[StepBound]]:
    """How busy every role was during the steps, and the bound of each step; nothing without steps."""
    import pyarrow as pa

    from troupe.orchestrator.insight.utilization import busy_roles, step_bounds, step_windows

    steps = step_windows(timeline)
    if not steps:
        return [], []
    last = max(steps)
    timeline = pa.concat_tables([timeline, run.crossing(last, steps[last][1])])
    return busy_roles(timeline, list(steps.values())), step_bounds(timeline)


def _show(roles: Sequence[RoleTime], bounds: Sequence[StepBound]) -> None:
    """Prints how busy every role was, and the bottleneck of each step."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    busy = Table("role", title="busy", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("workers", "busy s", "idle s", "busy"):
        busy.add_column(name, justify="right")
    for role in roles:
        busy.add_row(role.role, str(role.workers), f"{role.busy_s:.2f}", f"{role.idle_s:.2f}", f"{role.share:.0%}")
    limits = Table(
        "step", title="bound of a step: max(R, T)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name in ("seconds", "R engines", "T trainers", "max(R, T)", "of the step"):
        limits.add_column(name, justify="right")
    for one in bounds:
        times = (one.wall_s, one.rollout_s, one.train_s, one.bound_s)
        share = one.bound_s / one.wall_s if one.wall_s > 0 else 0.0
        limits.add_row(str(one.step), *(f"{seconds:.2f}" for seconds in times), f"{share:.0%} ({one.limit})")
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(busy)
    console.print(limits)
