"""`troupe report`: one HTML file about one or several runs, and what is wrong with them in the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import RunsArgument
from troupe.orchestrator.errors import UsageError


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
        int, typer.Option(min=0, help="Most MiB of samples in the file; of more, evenly spread steps are kept.")
    ] = 24,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdicts as JSON instead of writing a file.")
    ] = False,
) -> None:
    """Write a report of one or several runs: verdicts, curves, timeline and samples in one HTML file, for any browser.

    The file needs no network and no server. Several runs are drawn over each other.
    """
    from troupe.orchestrator.insight.report.report import REPORT, Budget, report_text, write_report
    from troupe.orchestrator.insight.verdicts.running import alarm_lines, verdicts_of
    from troupe.orchestrator.telemetry.run_folder import RunFolder
    from troupe.workers.contract.units import MIB

    if output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    runs = [RunFolder(folder) for folder in run_folders]
    verdicts = {str(run.path): verdicts_of(run) for run in runs}
    if as_json:
        plain = {folder: [asdict(verdict) for verdict in found] for folder, found in verdicts.items()}
        typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))
        return
    if output == Path("-"):
        typer.echo(report_text(run_folders, Budget(samples=samples_mib * MIB)), nl=False)
        return
    file = write_report(run_folders, output or run_folders[0] / REPORT, Budget(samples=samples_mib * MIB))
    for folder, found in verdicts.items():
        for line in alarm_lines(found):
            typer.echo(f"{folder}: {line}")
    typer.echo(f"wrote {file} ({file.stat().st_size / MIB:.1f} MiB)")
