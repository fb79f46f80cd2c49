"""The command that repeats the updates of a run."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import FAILURE, AddressOption, JsonOption, RunArgument, echo_json
from troupe.orchestrator.errors import UsageError

if TYPE_CHECKING:
    from troupe.orchestrator.insight.replay.repeat import Repeated
    from troupe.orchestrator.insight.replay.runs import Comparison, ReplayOutcome, ReplayRequest

_SHOWN_METRICS = 8


def replay(
    run_folder: RunArgument,
    step: Annotated[int, typer.Option("--step", min=1, help="Step to repeat, as in metrics.jsonl.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="CHECKOUT", help="Repeat with the code of this checkout too; find where they differ."),
    ] = None,
    resample: Annotated[
        bool, typer.Option("--resample", help="Sample the step again; find the first token that differs.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Repeat the updates of a step, without engines, and compare the weights with the run's.

    The replay starts from the newest checkpoint before the step (or from the initial model) and repeats every step
    since then on the batches that the run kept (output.replay_steps). The exit code is 0 if the weights are equal after
    every step.
    """
    run = run_folder.absolute()
    if sum((against is not None, resample, result is not None)) > 1:
        raise UsageError("--against and --resample are two questions: ask one at a time")
    if against is not None:
        _compare(run, step, against, address, as_json)
    elif resample:
        _resample(run, step, address, as_json)
    elif result is not None:
        _for_another(run, step, result)
    else:
        _replay(run, step, address, as_json)


def _replay(run: Path, step: int, address: str | None, as_json: bool) -> None:
    from troupe.orchestrator.insight.replay.runs import replay as replay_run
    from troupe.orchestrator.telemetry.console import Console

    outcome = replay_run(_request(run, step, address), Console(sys.stderr), _quiet if as_json else _show)
    if as_json:
        steps = [{"equal": repeated.equal} | asdict(repeated) for repeated in outcome.steps]
        echo_json({"equal": outcome.equal} | asdict(outcome) | {"steps": steps})
    elif outcome.equal:
        typer.echo(f"the weights are those of the run after every step ({len(outcome.steps)} repeated)")
    else:
        _explain(outcome)
    if not outcome.equal:
        sys.exit(FAILURE)


def _compare(run: Path, step: int, against: Path, address: str | None, as_json: bool) -> None:
    from troupe.orchestrator.insight.replay.against import require_checkout
    from troupe.orchestrator.insight.replay.runs import compare
    from troupe.orchestrator.telemetry.console import Console

    for given, remedy in ((address, "drop --address"), (os.environ.get("RAY_ADDRESS"), "unset RAY_ADDRESS")):
        if given:
            words = "--against starts its own Ray: the workers of a cluster have the code of the cluster"
            raise UsageError(f"{words}; {remedy}")
    request = _request(run, step, None)
    found = compare(request, require_checkout(against), Console(sys.stderr), _quiet if as_json else _show)
    if as_json:
        echo_json({"equal": found.difference is None} | asdict(found))
    else:
        typer.echo("\n".join(_differences(found, against)))
    if found.difference is not None:
        sys.exit(FAILURE)


def _for_another(run: Path, step: int, result: Path) -> None:
    """Repeats steps for another version of the code, which reads `result`."""
    from troupe.orchestrator.insight.replay.against import write_result
    from troupe.orchestrator.insight.replay.runs import replay as replay_run
    from troupe.orchestrator.telemetry.console import Console

    request = replace(_request(run, step, None), whole=True)
    outcome = replay_run(request, Console(sys.stderr), _quiet)
    write_result(result, outcome.steps)


def _resample(run: Path, step: int, address: str | None, as_json: bool) -> None:
    from troupe.orchestrator.insight.replay.resample import plan_resample
    from troupe.orchestrator.insight.replay.runs import resample as resample_run
    from troupe.orchestrator.telemetry.console import Console

    plan = plan_resample(run, step)
    found = resample_run(run, plan, address, Console(sys.stderr))
    if as_json:
        echo_json({"equal": found.equal} | asdict(found))
    else:
        typer.echo("\n".join(found.lines()))
    if not found.equal:
        sys.exit(FAILURE)


def _request(run: Path, step: int, address: str | None) -> ReplayRequest:
    from troupe.orchestrator.insight.replay.plan import plan_replay
    from troupe.orchestrator.insight.replay.runs import ReplayRequest

    return ReplayRequest(run, plan_replay(run, step), address)


def _show(repeated: Repeated) -> bool:
    typer.echo(repeated.line())
    return True


def _quiet(repeated: Repeated) -> bool:
    return True


def _explain(outcome: ReplayOutcome) -> None:
    """Print what is known about a replay that differs from its run."""
    typer.echo(outcome.start_problem or "the replay is not equal to the run")
    first = next((step for step in outcome.steps if not step.equal), None)
    if first is not None:
        for line in first.different_metrics()[:_SHOWN_METRICS]:
            typer.echo(f"  step {first.step}, {line}")
    for line in outcome.software:
        typer.echo(f"  {line}")


def _differences(found: Comparison, checkout: Path) -> list[str]:
    """Where two versions of the code differ, as text."""
    first = found.difference
    if first is None:
        return [f"{checkout} has the same weights after every step ({found.steps} repeated)"]
    lines = [f"{checkout} differs first in step {first.step}"]
    for role, names in first.names.items():
        lines.append(f"  {role}: {len(names)} of {first.parameters[role]} parameters; the first is {names[0]}")
    return [*lines, *(f"  {line}" for line in first.metrics[:_SHOWN_METRICS])]
