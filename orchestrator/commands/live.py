"""Commands that change an active run: the number of its workers, or its spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import (
    USER_ERROR,
    AnswerOption,
    JsonOption,
    OutOption,
    RunArgument,
    SetOption,
    SpecArgument,
    echo_json,
    exit_with,
)
from troupe.orchestrator.spec.load import plan_runs, read_document

if TYPE_CHECKING:
    from troupe.orchestrator.spec.rollout import RolloutSpec


def scale(
    run_folder: RunArgument,
    workers: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE=WORKERS]...", help="New number of workers of a role.")
    ] = None,
    timeout_s: AnswerOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Add or remove workers of an active run. Without ROLE=WORKERS, show the state of its roles."""
    from troupe.orchestrator.live.control import ask
    from troupe.orchestrator.live.diff import worker_changes

    states = ask(run_folder, worker_changes(workers or []), timeout_s)
    if as_json:
        echo_json(states)
        return
    for state in states:
        typer.echo(state)


def apply(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the differences without changing anything.")] = False,
    timeout_s: AnswerOption = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Apply a changed spec to an active run: show the differences, change what can change, refuse the rest."""
    runs = plan_runs(read_document(spec, set_), out)
    from troupe.orchestrator.live.control import ask
    from troupe.orchestrator.live.diff import compare

    wanted: RolloutSpec | None = runs[0].spec.rollouts
    if runs[0].stage or wanted is None:
        exit_with(f"{spec}: only a run with rollouts and without stages can change while it is active", USER_ERROR)
    comparison = compare(runs[0].out, wanted)
    if not as_json:
        for line in comparison.lines():
            typer.echo(line)
    states = () if dry_run else ask(runs[0].out, comparison.changes, timeout_s)
    if as_json:
        echo_json({"differences": comparison.differences, "roles": states})
    else:
        for state in states:
            typer.echo(state)
    if refused := comparison.refused:
        exit_with(f"{refused} of {len(comparison.differences)} difference(s) refused", USER_ERROR)
