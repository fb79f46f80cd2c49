"""`troupe why`: why a run is slow, stuck or dead."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from troupe.orchestrator.commands.options import RunArgument


def why(
    run_folder: RunArgument,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=5.0, help="Time in which to answer, in seconds.")
    ] = 10.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print cause, summary, blocked_by and evidence as JSON.")
    ] = False,
) -> None:
    """Say why a run is slow, stuck or dead: what it waits for, since when, and what that does. Also when it hangs."""
    from troupe.orchestrator.insight.why.client import text_of
    from troupe.orchestrator.insight.why.client import why as ask

    report = ask(run_folder, timeout_s)
    if as_json:
        typer.echo(json.dumps({**asdict(report.diagnosis), "time": report.time, "seconds": report.seconds}, indent=2))
    else:
        typer.echo(text_of(report))
