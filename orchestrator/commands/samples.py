"""`troupe samples`: the samples of a run, in the terminal or as a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troupe.orchestrator.commands.options import JsonOption, RunArgument, echo_json
from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.imports import missing_package

if TYPE_CHECKING:
    from troupe.orchestrator.insight.samples import SampleQuery
    from troupe.orchestrator.telemetry.run_folder import RunFolder

_SHOWN = 10
"""Default number of samples to show."""


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
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help=f"Most samples (default: {_SHOWN}; all in an export).")
    ] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", metavar="COLUMNS", help="Show a table of these columns.")
    ] = None,
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option("--export", metavar="FORMAT FILE", help="Write a file: jsonl, parquet or csv."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show or export what a run sampled, with rewards and what was trained."""
    if problem := missing_package("duckdb"):
        raise UsageError(f"troupe samples {problem}")
    from troupe.orchestrator.insight.samples import SampleQuery, split_columns
    from troupe.orchestrator.telemetry.run_folder import RunFolder

    run, chosen = RunFolder(run_folder), None if columns is None else split_columns(columns)
    if as_json and export is not None:
        raise UsageError("--json prints the samples and --export writes a file; give one of them")
    if as_json:
        _echo(run, SampleQuery(step, group, where, sort, limit or _SHOWN), chosen)
    elif export is not None:
        _export(run, SampleQuery(step, group, where, sort, limit), chosen, *export)
    else:
        _show(run, SampleQuery(step, group, where, sort, limit or _SHOWN), chosen)


def _export(run: RunFolder, query: SampleQuery, columns: Sequence[str] | None, form: str, path: Path) -> None:
    from troupe.orchestrator.insight.samples import Format, export_samples
    from troupe.workers.contract.samples import SAMPLES

    if form not in list(Format):
        raise UsageError(f"--export: {form!r} is no format: use {', '.join(Format)}")
    rows = export_samples(run, query, columns or SAMPLES.names, Format(form), path)
    typer.echo(f"wrote {rows} samples to {path}")


def _echo(run: RunFolder, query: SampleQuery, columns: Sequence[str] | None) -> None:
    """Print the samples as a list of objects; JSON has neither nan nor infinity: they become null, as in an export."""
    from troupe.orchestrator.insight.sample_view import CONVERSATION_COLUMNS
    from troupe.orchestrator.insight.samples import select_samples

    rows = select_samples(run, query, columns or CONVERSATION_COLUMNS).to_pylist()
    echo_json(_finite(rows))


def _finite(value: Any) -> Any:
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(run: RunFolder, query: SampleQuery, columns: Sequence[str] | None) -> None:
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
    more = "; --limit shows more, --export FORMAT FILE writes them" if matching > table.num_rows else ""
    typer.echo(f"{table.num_rows} of {matching} samples{more}")
