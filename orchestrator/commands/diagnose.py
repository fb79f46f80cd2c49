"""Commands that examine a run: `troupe why`, `audit` and `replay`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    RunArgument,
    SetOption,
    echo_json,
    json_text,
)
from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    from troupe.orchestrator.insight.replay import Repeated, ReplayOutcome

_SHOWN_METRICS = 8


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
        echo_json({**asdict(report.diagnosis), "time": report.time, "seconds": report.seconds})
    else:
        typer.echo(text_of(report, run_folder))


def audit(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC|RUN", help="YAML spec (its initial weights) or run folder (its newest checkpoint)."
        ),
    ],
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    address: AddressOption = None,
) -> None:
    """Score sampled tokens in an engine, in the trainer and in plain float32 transformers, and explain the gaps.

    Starts one engine and the policy with the run's own settings. Of a run folder, the newest checkpoint is pushed to
    the engine as the run pushes it. Exit code 1: rounding does not explain a gap.
    """
    from troupe.orchestrator.commands.runs import announce
    from troupe.orchestrator.runs.audit import audit as audit_run
    from troupe.orchestrator.runs.epochs import plan_counted
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.spec.base import RESOLVED_SPEC
    from troupe.orchestrator.spec.derived.paths import uses_hub
    from troupe.orchestrator.spec.errors import SpecError
    from troupe.orchestrator.spec.load import read_document
    from troupe.orchestrator.telemetry.console import Console

    is_run = target.is_dir()
    document = read_document(target / RESOLVED_SPEC if is_run else target, set_)
    runs = plan_counted(document, announce, target if is_run else None)
    planned = runs[0]
    if planned.stage:
        raise UsageError(f"{target}: cannot audit a file with stages; name a stage's run folder")
    if problems := planned.missing():
        raise SpecError(problems)
    if uses_hub(planned.spec):
        from troupe.orchestrator.hub.resolve import pin_run

        planned = pin_run(planned, resume=is_run)
    console = Console(sys.stderr)  # standard output holds the report only
    try:
        report = audit_run(RunRequest(planned.spec, planned.out, is_run, address), console)
    finally:
        console.close()
    typer.echo(json_text(report.as_json()) if as_json else "\n".join(report.lines()))
    if not report.passed:
        sys.exit(FAILURE)


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
