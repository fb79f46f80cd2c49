"""Arguments, options, exit codes and output that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.text import printable

if TYPE_CHECKING:
    from rich.table import Table


def _example_names(incomplete: str) -> list[str]:
    """The examples, once a word has begun: before that the shell completes files. Typer drops those that do not fit."""
    from troupe.orchestrator.spec.examples import PREFIX, examples

    return [PREFIX + name for name in examples()] if incomplete else []


def _run_folders() -> list[str]:
    """The runs below `runs/`, also of stages."""
    return sorted(
        str(file.parent) for pattern in ("*/spec.yaml", "*/*/spec.yaml") for file in Path("runs").glob(pattern)
    )


SpecArgument = Annotated[
    Path,
    typer.Argument(
        metavar="SPEC",
        autocompletion=_example_names,
        help="YAML spec of the run; examples:NAME: one of `troupe demo --list`.",
    ),
]
SetOption = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the spec.")]
_JOB_SERVER_VARIABLES = ["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"]


def _job_server(value: str) -> str:
    """Refuse what is no URL, under its name: on a cluster's nodes RAY_ADDRESS is often the address of the head."""
    if value.startswith(("http://", "https://")):
        return value
    name = next((name for name in _JOB_SERVER_VARIABLES if os.environ.get(name) == value), "--address")
    raise UsageError(
        f"{name} {value}: expected the job server's URL, as in http://HOST:8265; RAY_API_SERVER_ADDRESS or --address "
        "names it where RAY_ADDRESS is the head of a cluster"
    )


JobServerOption = Annotated[
    str,
    typer.Option(
        "--address",
        envvar=_JOB_SERVER_VARIABLES,
        callback=_job_server,
        show_envvar=False,
        help="URL of the job server, http://HOST:8265, if neither RAY_API_SERVER_ADDRESS nor RAY_ADDRESS has it.",
    ),
]
AnswerOption = Annotated[float, typer.Option("--timeout-s", min=0, help="Timeout for the run's response, in seconds.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id, as printed by `troupe submit`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
USER_ERROR = 2
FAILURE = 1
UNBOUNDED = 1000
"""Width of output that goes to no terminal."""


def _not_empty(value: str | None) -> str | None:
    """Refuse a value that a shell variable without a value leaves: it would mean the default."""
    if value is not None and not value.strip():
        raise typer.BadParameter("is empty")
    return value


def disk_folder(value: Path | None) -> Path | None:
    """Refuse a URL."""
    if value is None:
        return None
    from troupe.orchestrator.spec.checks.shared import NEEDS_DISK  # `troupe --help` imports this module, and no spec
    from troupe.orchestrator.spec.locations import is_url

    if is_url(value):
        raise typer.BadParameter(NEEDS_DISK)
    return value


def run_folder(value: Path) -> Path:
    """Refuse a folder that is no run, but has some in it."""
    from troupe.orchestrator.spec.base import RESOLVED_SPEC  # `troupe --help` imports this module, and no spec

    inside = [] if (value / RESOLVED_SPEC).exists() else sorted(value.glob(f"*/{RESOLVED_SPEC}"))
    if inside:
        raise UsageError(f"{value} is no run; the runs in it: {', '.join(str(one.parent) for one in inside[:8])}")
    return value


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", callback=run_folder, autocompletion=_run_folders, help="Run folder, as in runs/NAME."
    ),
]
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN",
        autocompletion=_run_folders,
        callback=lambda values: [run_folder(value) for value in values],
        help="Run folders, as in runs/NAME.",
    ),
]
OutOption = Annotated[Path | None, typer.Option("--out", callback=disk_folder, help="Run folder (default: runs/NAME).")]
AddressOption = Annotated[
    str | None, typer.Option("--address", callback=_not_empty, help="Ray cluster to join (default: start a local one).")
]


def echo_json(value: Any) -> None:
    """Print a value as JSON; dataclasses become objects, and paths text."""
    typer.echo(json_text(value))


def json_text(value: Any) -> str:
    """See `echo_json`."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def exit_with(text: str, code: int) -> NoReturn:
    """Write a line, unless it is empty, to standard error and exit with this code."""
    if text:
        sys.stderr.write(printable(text) + "\n")
    sys.exit(code)


def output_width() -> int | None:
    """Width for standard output, or None for the terminal's, or COLUMNS."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else UNBOUNDED


def fitting_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A table with a row for each item, whose name is in the first column. No number is ever cut.

    If that is wider than `width`, each value that is not empty has a row.
    """
    from rich import box  # `troupe --help` imports this module
    from rich.console import Console
    from rich.table import Table

    wide, tall = (
        Table(title=title or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False) for _ in range(2)
    )
    for number, head in enumerate(heads):
        wide.add_column(head, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        wide.add_row(*row)
    if Console(width=UNBOUNDED).measure(wide).maximum <= width:
        return wide
    tall.add_column(heads[0], overflow="fold")
    tall.add_column(no_wrap=True)
    tall.add_column(justify="right", overflow="fold")
    for name, *cells in rows:
        values = [(head, cell) for head, cell in zip(heads[1:], cells, strict=True) if cell]
        for number, (head, cell) in enumerate(values):
            tall.add_row("" if number else name, head, cell, end_section=number == len(values) - 1)
    return tall


def read_mapping(args: str, example: str) -> dict[str, Any]:
    """The mapping that `--args` is. Raises UsageError if it is none."""
    import yaml  # `troupe --help` imports this module

    try:
        values = yaml.safe_load(args)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"--args: expected a YAML mapping, as in '{example}', got {args[:60]!r}")
    return values
