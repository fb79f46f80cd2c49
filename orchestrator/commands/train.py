"""Commands that train, evaluate and export: `troupe run`, `troupe eval` and `troupe export`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import (
    AddressOption,
    JsonOption,
    OutOption,
    RunArgument,
    SetOption,
    SpecArgument,
    echo_json,
)
from troupe.orchestrator.errors import StopRequested, UsageError
from troupe.orchestrator.signals import STOPPED, exit_on_signals, taken

if TYPE_CHECKING:
    from troupe.orchestrator.controller import RunOutcome
    from troupe.orchestrator.runs.checkpoints import SavedRun
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.spec.chain import PlannedRun
    from troupe.orchestrator.telemetry.console import Console


def run(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest valid checkpoint.")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Restart and resume after a crash (failures.run_restarts).")
    ] = False,
    address: AddressOption = None,
) -> None:
    """Train: start or join Ray, place the workers and run every step."""
    if taken():
        exit_on_signals()  # until Ray starts, there is nothing to end in order
    from troupe.orchestrator.commands.runs import ready

    runs = ready(spec, set_, out, resume=resume)
    if supervise:
        sys.exit(_supervise(runs))
    train(spec, runs, resume, address)


def evaluate(
    spec: SpecArgument,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Folder of a model, checkpoint or run, or name on the hub (default: the spec's model).",
        ),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    best: Annotated[
        bool, typer.Option("--best", help="Of a run: the checkpoint of the best evaluation (checkpoint.best).")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file for the results with their intervals.")
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on the spec's held-out data and print the metrics.

    On prompts, only engines and reward workers are started. On offline data, the metrics are the loss and the metrics
    of the spec's algorithm.
    """
    from troupe.orchestrator import library
    from troupe.orchestrator.telemetry.console import format_value

    # Standard output holds the result only.
    metrics = library.evaluate(spec, model, set=set_, best=best, output=output, address=address, progress=sys.stderr)
    if as_json:
        echo_json(metrics)
        return
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        typer.echo(f"{name:<{width}}  {format_value(value)}")


def train(spec: Path, runs: Sequence[PlannedRun], resume: bool, address: str | None) -> None:
    """Train every run of a file that is not complete yet; then print where the results are and what can be done next.

    Also if a run fails after its first step: these runs need the report most. One that was asked to stop leaves it to
    `troupe report`: whoever asked may kill the process in some seconds.
    """
    from troupe.orchestrator.cluster.worker_server import started_ahead

    with started_ahead(runs[0].spec, address):
        _train(spec, runs, resume, address)


def _train(spec: Path, runs: Sequence[PlannedRun], resume: bool, address: str | None) -> None:
    from troupe.orchestrator.cluster.event_loop import share_heap
    from troupe.orchestrator.commands.runs import read_data
    from troupe.orchestrator.runs.session import RunRequest
    from troupe.orchestrator.telemetry.console import Console

    share_heap()  # before Ray has threads
    requests = [(planned, _request(planned, resume, address)) for planned in runs]
    left = [planned for planned, request in requests if isinstance(request, RunRequest)]
    read_data(left[1:])  # the first run reads its own
    consoles = [Console() for _ in requests]
    try:
        last = _train_each(requests, consoles)
    except BaseException as error:
        if any(console.progress().steps for console in consoles):  # otherwise the records are of another command
            asked = isinstance(error, KeyboardInterrupt | StopRequested)
            typer.echo(resume_steps(sys.argv[1:], runs, None if asked else write_run_report(runs)))
        raise
    report = None if last is not None and last.interrupted else write_run_report(runs)
    if last is not None and last.stopped:
        typer.echo(resume_steps(sys.argv[1:], runs, report))
        sys.exit(STOPPED)
    typer.echo(next_steps(spec, runs, report))


def _train_each(
    requests: Sequence[tuple[PlannedRun, RunRequest | SavedRun]], consoles: Sequence[Console]
) -> RunOutcome | None:
    """Train one run after the other, each shown on its console, until one is stopped. Raises TroupeError.

    Returns:
        The outcome of the last one, or None if all were complete; `stopped` also if others were not begun.
    """
    from troupe.orchestrator.data.ranked import write_ranked
    from troupe.orchestrator.library import train as train_run
    from troupe.orchestrator.runs.checkpoints import SavedRun, after_round

    last: RunOutcome | None = None
    for (planned, request), console in zip(requests, consoles, strict=True):
        if isinstance(request, SavedRun):
            steps, early = planned.spec.schedule.steps, request.ended_early
            why = f"step {request.step} of {steps}: {early}" if early else f"schedule.steps: {steps}"
            typer.echo(f"{planned.spec.name}: already complete in {planned.out} ({why})")
            continue
        for folder in planned.samples_of:
            write_ranked(folder)
        if planned.continues is not None:
            request = replace(request, spec=after_round(request.spec, planned.continues))
        last = train_run(request, console)
        if last.stopped or last.interrupted:
            return replace(last, stopped=last.stopped or planned is not requests[-1][0])
    return last


def _supervise(runs: Sequence[PlannedRun]) -> int:
    """Run this command without `--supervise` in a separate process, and again after a crash."""
    from troupe.orchestrator.runs.supervisor import supervise

    arguments = [argument for argument in sys.argv[1:] if argument != "--supervise"]
    restarts = max(planned.spec.failures.run_restarts for planned in runs)
    return supervise(
        [sys.executable, "-m", "troupe", *arguments],
        lambda: sum(_saved_steps(planned.out) for planned in runs),
        restarts,
        lambda line: typer.echo(line, err=True),
        lambda seconds: _pause(seconds, runs),
    )


def _pause(seconds: float, runs: Sequence[PlannedRun]) -> None:
    """Wait with the lock of the run that was begun last: it has not died for good."""
    from troupe.orchestrator.live.lock import locked

    with ExitStack() as stack:
        for planned in [planned for planned in runs if planned.out.is_dir()][-1:]:
            with suppress(OSError, UsageError):  # the start that follows says it
                stack.enter_context(locked(planned.out, "its supervisor starts it again"))
        time.sleep(seconds)


def _saved_steps(out: Path) -> int:
    """Step of the newest checkpoint of a run, 0 if it has none."""
    from troupe.orchestrator.training.checkpoint import CheckpointStore

    return max(CheckpointStore(out / "checkpoints", keep=1).steps(), default=0)


def _request(planned: PlannedRun, resume: bool, address: str | None) -> RunRequest | SavedRun:
    """The request for one run, or the saved one if it resumes a run that is already complete.

    `--resume` resumes a plain spec; in a chain it skips complete stages, resumes the interrupted one and starts the
    rest.
    """
    from troupe.orchestrator.runs.checkpoints import saved_run
    from troupe.orchestrator.runs.session import RunRequest

    request = RunRequest(planned.spec, planned.out, resume, address)
    if not resume:
        return request
    done = saved_run(planned.spec, planned.out)
    if done.complete:
        return done
    return replace(request, resume=done.step > 0) if planned.stage else request


def write_run_report(runs: Sequence[PlannedRun]) -> Path | None:
    """The report of all runs that have recorded steps, next to their results; see `write_last_report`."""
    from troupe.orchestrator.insight.report.report import REPORT, write_last_report
    from troupe.orchestrator.spec.chain import results_folder

    return write_last_report([planned.out for planned in runs], results_folder(runs) / REPORT)


def next_steps(spec: Path, runs: Sequence[PlannedRun], report: Path | None = None) -> str:
    """Where the results are, what to try next and, in the last line, the report.

    Args:
        spec: File or example that was run.
        runs: All of its runs.
        report: The report that was written, or None if no report was.
    """
    from troupe.orchestrator.spec.base import RESOLVED_SPEC
    from troupe.orchestrator.spec.chain import results_folder
    from troupe.orchestrator.spec.examples import PREFIX

    last, name = runs[-1], str(spec)
    merge = " --merge" if last.spec.trains_adapters else ""  # an engine that evaluates loads no adapters
    commands = [(f"troupe export {last.out} trained/{merge}", "the trained model, for transformers and vLLM")]
    if last.spec.checkpoint.best is not None:
        commands.append((f"troupe export {last.out} best/ --best{merge}", "the model with the best evaluation"))
    if not last.stage and last.spec.evaluation is not None:
        commands.append((f"troupe eval {last.out / RESOLVED_SPEC} --model trained/", "its score on held-out data"))
    commands += _samples(last)
    if name.startswith(PREFIX):
        example = f"troupe init --from {name.removeprefix(PREFIX)}"
        commands += [(example, "this spec as a file to edit: run.yaml"), ("troupe init", "a spec for your own data")]
    return _lines(f"results are in {results_folder(runs)}", commands, report)


def resume_steps(arguments: Sequence[str], runs: Sequence[PlannedRun], report: Path | None) -> str:
    """The same for runs that were stopped or failed: where the results so far are, and how to resume.

    Args:
        arguments: Arguments of the command that was stopped or failed.
        runs: All runs of its file.
        report: The report that was written, or None if none was.
    """
    from troupe.orchestrator.platforms.ray_jobs import SENT
    from troupe.orchestrator.spec.chain import results_folder

    begun = [planned for planned in runs if planned.out.is_dir()] or runs
    again = ["troupe", *(argument for argument in arguments if argument != "--resume")]
    resume = ["--resume"] if arguments[:1] == ["run"] else []  # `troupe demo` resumes without being asked
    command = shlex.join([*again, *resume])
    if any(argument.startswith(SENT) for argument in arguments):  # a job's copy of the spec
        command = "troupe submit SPEC"
    commands = [(command, "resumes from the newest checkpoint"), *_samples(begun[-1])]
    if report is None:
        commands.append((shlex.join(["troupe", "report", *(str(run.out) for run in begun)]), "writes the report"))
    return _lines(f"results so far are in {results_folder(runs)}", commands, report)


def _samples(planned: PlannedRun) -> list[tuple[str, str]]:
    if planned.spec.rollouts is None:
        return []
    return [(f"troupe samples {planned.out}", "what the policy wrote, with its rewards")]


def _lines(results: str, commands: Sequence[tuple[str, str]], report: Path | None) -> str:
    width = max(len(command) for command, _ in commands)
    lines = [f"{results}; next:", *(f"  {command:<{width}}  {what}" for command, what in commands)]
    if report is not None:
        lines.append(f"report: open {report} in a browser")
    return "\n".join(lines)


def export(
    run_folder: RunArgument,
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write the Hugging Face model to.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest valid one).")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint of the best evaluation (checkpoint.best).")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Export the moving average of the weights (ema_decay).")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a whole model: adapters (roles.policy.lora) merged into it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run's trained policy as a Hugging Face model folder for transformers and vLLM.

    If the run trained adapters (roles.policy.lora), that is peft's folder of an adapter, or with --merge the whole
    model.
    """
    from troupe.orchestrator import library

    if best and step is not None:
        raise UsageError("--best and --step name different checkpoints; give one of them")
    named = library.export_checkpoint(run_folder, target, step=step, best=best, average=average, merge=merge)
    checkpoint, folder = named
    if as_json:
        echo_json({"checkpoint": checkpoint, "folder": folder})
    else:
        typer.echo(f"wrote {folder}")
