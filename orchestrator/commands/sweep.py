"""`troupe sweep`: many runs of one spec with other values, compared with intervals over seeds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    SpecArgument,
    disk_folder,
    echo_json,
    fitting_table,
    output_width,
)
from troupe.orchestrator.errors import UsageError, nearest
from troupe.orchestrator.signals import STOPPED

if TYPE_CHECKING:
    from troupe.orchestrator.insight.sweep.sweep import SweepRequest, SweepRun
    from troupe.orchestrator.insight.sweep.trials import Trial
    from troupe.orchestrator.spec.chain import PlannedRun
    from troupe.orchestrator.spec.yaml_reader import Document


def sweep(
    spec: SpecArgument,
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="FIELD=VALUE,...",
            help="Try each of these values; one value is that of all trials; LOW..HIGH is a range for --random.",
        ),
    ] = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Trials of each setting, which differ in the seed.")] = 1,
    random: Annotated[
        int | None, typer.Option(min=1, help="Settings to draw at random (default: every combination).")
    ] = None,
    halve: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEP",
            help="End trials early that are below the best third at this step, or at 3, 9, ... times as many.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Metric to compare (default: the held-out one, else reward or loss)."),
    ] = None,
    lowest: Annotated[bool, typer.Option("--lowest", help="The lowest value of the metric is the best.")] = False,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Trials that run at the same time.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", callback=disk_folder, help="Folder (default: runs/NAME-sweep).")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a sweep: complete trials stay, interrupted ones resume.")
    ] = False,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a spec with other values and several seeds, and say which setting is best, with intervals.

    Each trial is a `troupe run` in a separate process and folder. All specs are checked before the first one starts.
    Ctrl-C stops all trials, which save; --resume continues. Writes sweep.json and a page. The exit code is 1 if a
    trial failed.
    """
    from troupe.orchestrator.cluster.ray_environment import cluster_to_join
    from troupe.orchestrator.insight.sweep.sweep import RECORD, SweepRequest, SweepRun
    from troupe.orchestrator.live.lock import locked

    if metric is not None:
        _check_metric(metric)
    elif halve is not None:
        raise UsageError("--halve compares trials while they run: name the --metric")
    trials = _trials(spec, set_, seeds, random, out)
    folder = trials[0].folder.parent
    if (
        at_once > 1
        and cluster_to_join(address) is None
        and any(role.gpus for trial in trials for run in trial.runs for role in run.spec.roles.present().values())
    ):
        raise UsageError("--at-once with GPUs needs a cluster that divides them: `ray start --head`, --address auto")
    if (folder / RECORD).exists() and not resume:
        raise UsageError(f"{folder} already contains a sweep: use --resume or another --out")
    folder.mkdir(parents=True, exist_ok=True)
    request = SweepRequest(trials, folder, metric, lowest, at_once, halve, address)
    with locked(folder):
        _run(SweepRun(request, lambda line: typer.echo(line, err=True)), request, as_json=as_json)


def _run(running: SweepRun, request: SweepRequest, *, as_json: bool) -> None:
    """Run a sweep, show the results and exit with its code."""
    running.resume()
    stopped = False
    try:
        running.run()
    except KeyboardInterrupt:
        stopped = True
    record, page = running.record(), running.write_page()
    if as_json:
        echo_json(record)
    else:
        _show(record)
        if page is not None:
            typer.echo(f"report: open {page} in a browser")
    if stopped:
        typer.echo(f"stopped; the same command with --resume continues {request.folder}", err=True)
        sys.exit(STOPPED)
    if any(trial["status"] not in ("complete", "stopped early", "waiting") for trial in _trials_of(record)):
        sys.exit(FAILURE)


def _trials(spec: Path, assignments: list[str], seeds: int, random: int | None, out: Path | None) -> list[Trial]:
    """The trials, with their models in place. Raises SpecError or UsageError."""
    from troupe.orchestrator.commands.runs import announce, create_models, read_data
    from troupe.orchestrator.insight.sweep.trials import drawn, grid, parse_axes, plan_trials
    from troupe.orchestrator.runs.epochs import plan_counted
    from troupe.orchestrator.runs.prepare import checked
    from troupe.orchestrator.spec.load import read_document

    fixed, varied = parse_axes(assignments, ranges=random is not None)

    def plan(own: list[str], folder: Path | None) -> tuple[Document, tuple[PlannedRun, ...]]:
        document = read_document(spec, own)
        return document, plan_counted(document, announce, folder)

    settings = grid(varied) if random is None else drawn(varied, random, seed=0)
    trials = plan_trials(plan, fixed, settings, seeds, out)
    runs = tuple(run for trial in trials for run in trial.runs)
    create_models(runs)
    runs = checked(runs)
    read_data([*{str(run.spec.data): run for run in runs}.values()])
    left = iter(runs)
    return [trial.pinned([*islice(left, len(trial.runs))]) for trial in trials]


def _check_metric(name: str) -> None:
    """Raise UsageError if no run has this metric."""
    from troupe.orchestrator.telemetry.metrics import metric_named, metric_sections

    if metric_named(name) is None:
        known = [row.name for rows in metric_sections().values() for row in rows]
        raise UsageError(f"--metric {name}: there is no such metric ({nearest(name, known) or 'see the reference'})")


def _trials_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [trial for setting in record["settings"] for trial in setting["trials"]]


def _show(record: Mapping[str, Any]) -> None:
    """Print the settings as a table, what failed, and the best one."""
    from rich.console import Console

    console = Console(markup=False, emoji=False, highlight=False, width=output_width())
    heads = ("setting", "seeds", record["metric"] or "metric", "95% interval", "status")
    console.print(fitting_table("", heads, [*map(_row, record["settings"])], console.width))
    for trial in _trials_of(record):
        if trial["status"] == "failed":
            typer.echo(f"{trial['folder']}: failed: {trial['reason']}")
    typer.echo(record["sentence"])


def _row(setting: Mapping[str, Any]) -> Sequence[str]:
    from troupe.orchestrator.insight.sweep.results import interval

    statuses = [trial["status"] for trial in setting["trials"]]
    mean = "" if setting["mean"] is None else f"{setting['mean']:.4g}"
    seeds, others = f"{statuses.count('complete')} of {len(statuses)}", ", ".join(sorted({*statuses} - {"complete"}))
    return setting["label"], seeds, mean, interval(setting["low"], setting["high"]), others or "complete"
