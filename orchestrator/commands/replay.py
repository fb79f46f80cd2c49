"""The command that repeats the updates of a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import FAILURE, AddressOption, JsonOption, RunArgument, echo_json

if TYPE_CHECKING:
    from troupe.orchestrator.insight.replay import Repeated, ReplayOutcome

_SHOWN_METRICS = 8


def replay(
    run_folder: RunArgument,
    step: Annotated[int, typer.Option("--step", min=1, help="Step to repeat, as in metrics.jsonl.")],
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Repeat the updates of a step, without engines, and compare the weights with the run's.

    The replay starts from the newest checkpoint before the step (or from the initial model) and repeats every step
    since then on the batches that the run kept (output.replay_steps). The exit code is 0 if the weights are equal after
    every step.
    """
    from troupe.orchestrator.insight.replay import replay as replay_run
    from troupe.orchestrator.telemetry.console import Console

    outcome = replay_run(run_folder.absolute(), step, Console(sys.stderr), _quiet if as_json else _show, address)
    if as_json:
        steps = [{"equal": repeated.equal} | asdict(repeated) for repeated in outcome.steps]
        echo_json({"equal": outcome.equal} | asdict(outcome) | {"steps": steps})
    elif outcome.equal:
        typer.echo(f"the weights are those of the run after every step ({len(outcome.steps)} repeated)")
    else:
        _explain(outcome)
    if not outcome.equal:
        sys.exit(FAILURE)


def _show(repeated: Repeated) -> None:
    typer.echo(repeated.line())


def _quiet(repeated: Repeated) -> None:
    pass


def _explain(outcome: ReplayOutcome) -> None:
    """Print what is known about a replay that differs from its run."""
    typer.echo(outcome.start_problem or "the replay is not equal to the run")
    first = next((step for step in outcome.steps if not step.equal), None)
    if first is not None:
        for line in first.different_metrics()[:_SHOWN_METRICS]:
            typer.echo(f"  step {first.step}, {line}")
    for line in outcome.software:
        typer.echo(f"  {line}")
