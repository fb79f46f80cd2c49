"""`troupe report`: one HTML file about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.errors import UsageError

RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, as in runs/NAME.")]


def report(
    run_folders: RunsArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write (default: report.html in the first run's folder)."),
    ] = None,
    samples_mib: Annotated[
        int, typer.Option(min=0, help="Most MiB of samples in the file; of more, evenly spread steps are kept.")
    ] = 24,
) -> None:
    """Write a report of one or several runs: verdicts, curves, timeline and samples in one HTML file, for any browser.

    The file needs no network and no server. Several runs are drawn over each other.
    """
    from orchestrator.reporting.html.report import MIB, REPORT, Budget, write_report

    if output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    file = write_report(run_folders, output or run_folders[0] / REPORT, Budget(samples=samples_mib * MIB))
    typer.echo(f"wrote {file} ({file.stat().st_size / MIB:.1f} MiB)")
