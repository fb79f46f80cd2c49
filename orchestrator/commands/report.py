"""Commands that show what a run recorded: `troupe report`, `watch`, `samples` and `trace`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import JsonOption, RunArgument, RunsArgument, echo_json
from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.imports import missing_package

if TYPE_CHECKING:
    from troupe.orchestrator.insight.samples import SampleQuery
    from troupe.orchestrator.telemetry.run_folder import RunFolder

_STEPS = re.compile(r"(\d*)(:?)(\d*)")


def report(
    run_folders: RunsArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write, - for standard output (default: report.html in the first run's folder).",
        ),
    ] = None,
    samples_mib: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most MiB of samples in the file; of more, evenly spread steps are kept (default: 24, of 120 steps).",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print state and verdicts as JSON instead of writing a file.")
    ] = False,
) -> None:
    """Write a report of one or several runs: verdicts, curves and samples in one HTML file, for any browser.

    The file needs no network and no server. Several runs are drawn over each other.
    """
    from troupe.orchestrator.insight.report.report import REPORT, report_text, write_report
    from troupe.orchestrator.insight.verdicts.apply import report_of
    from troupe.orchestrator.telemetry.run_folder import RunFolder
    from troupe.workers.contract.units import MIB

    if output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    budget = None if samples_mib is None else samples_mib * MIB
    runs = [RunFolder(folder) for folder in run_folders]
    reports = {str(run.path): report_of(run) for run in runs}
    if as_json:
        echo_json(reports)
        return
    if output == Path("-"):
        typer.echo(report_text(run_folders, budget), nl=False)
        return
    file = write_report(run_folders, output or run_folders[0] / REPORT, budget)
    for folder, found in reports.items():
        for line in found.lines():
            typer.echo(f"{folder}: {line}")
    typer.echo(f"wrote {file} ({file.stat().st_size / MIB:.1f} MiB)")


def watch(
    run_folders: RunsArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 8300,
) -> None:
    """Serve the report of active runs in the browser and keep it current, until interrupted.

    Only this machine can open it, and it changes nothing. From another machine: ssh -L 8300:127.0.0.1:8300 HOST.
    """
    from troupe.orchestrator.insight.watch import WatchServer

    with WatchServer(run_folders, port) as server:
        typer.echo(f"watching {', '.join(map(str, run_folders))} at {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("")


def samples(
    run_folder: RunArgument,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only samples of this step.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Only this group: its number in the step, from 0, or a prompt_uid.")
    ] = None,
    where: Annotated[
        str | None, typer.Option("--where", metavar="SQL", help="A condition, as in 'reward < 0 AND step > 40'.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMNS", help="Order, as in reward or -reward,step.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most samples.")] = 10,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="COLUMNS", help="Show a table of these columns.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run sampled, with rewards and what was trained."""
    if problem := missing_package("duckdb"):
        raise UsageError(f"troupe samples {problem}")
    from troupe.orchestrator.insight.samples import SampleQuery, split_columns
    from troupe.orchestrator.telemetry.run_folder import RunFolder

    run, chosen = RunFolder(run_folder), None if columns is None else split_columns(columns)
    (_echo if as_json else _show_samples)(run, SampleQuery(step, group, where, sort, limit), chosen)


def _echo(run: RunFolder, query: SampleQuery, columns: Sequence[str] | None) -> None:
    """Print the samples as a list of objects."""
    from troupe.orchestrator.insight.sample_view import CONVERSATION_COLUMNS
    from troupe.orchestrator.insight.samples import select_samples

    echo_json(select_samples(run, query, columns or CONVERSATION_COLUMNS).to_pylist())


def _show_samples(run: RunFolder, query: SampleQuery, columns: Sequence[str] | None) -> None:
    from rich.console import Console

    from troupe.orchestrator.insight.sample_view import CONVERSATION_COLUMNS, show_samples, show_table
    from troupe.orchestrator.insight.samples import count_samples, select_samples

    console = Console(markup=False, emoji=False, highlight=False)
    table = select_samples(run, query, columns or CONVERSATION_COLUMNS)
    if columns is None:
        show_samples(console, table)
    else:
        show_table(console, table)
    matching = count_samples(run, query)
    more = "; --limit shows more" if matching > table.num_rows else ""
    typer.echo(f"{table.num_rows} of {matching} samples{more}")


def trace(
    run_folder: RunArgument,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write (default: trace.json in the run folder).")
    ] = None,
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
    file = out or run_folder / "trace.json"
    write_trace(trace_events(timeline), file)
    if as_json:
        echo_json({"file": file, "calls": timeline.num_rows})
    else:
        typer.echo(f"wrote {file}: {timeline.num_rows} calls; open it in https://ui.perfetto.dev")


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
