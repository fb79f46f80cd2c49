"""Arguments, options and exit codes that several commands share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from troupe.orchestrator.signals import STOPPED as STOPPED

SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="YAML spec of the run; examples:NAME: one of `troupe demo --list`.")
]
SetOption = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the spec.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Run folder (default: runs/NAME).")]


def _not_empty(value: str | None) -> str | None:
    """Refuse a value that a shell variable without a value leaves: it would mean the default."""
    if value is not None and not value.strip():
        raise typer.BadParameter("is empty")
    return value


AddressOption = Annotated[
    str | None,
    typer.Option("--address", callback=_not_empty, help="Ray cluster to join (default: start a local one)."),
]
JobServerOption = Annotated[str, typer.Option("--address", help="URL of the cluster's job server, http://HOST:8265.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, as in runs/NAME.")]
RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, as in runs/NAME.")]
AnswerOption = Annotated[float, typer.Option("--timeout-s", min=0, help="Timeout for the run's response, in seconds.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id, as printed by `troupe submit`.")]

USER_ERROR = 2
FAILURE = 1


def exit_with(text: str, code: int) -> NoReturn:
    """Write a line (empty: none) to standard error and exit with this code."""
    if text:
        sys.stderr.write(text + "\n")
    sys.exit(code)
