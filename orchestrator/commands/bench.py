"""`troupe bench`: throughput of the rollouts of a spec, without training."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from troupe.orchestrator.bench.points import Point, Sweep, grid, parse_sweep
from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    SetOption,
    SpecArgument,
    echo_json,
    json_text,
)
from troupe.orchestrator.commands.runs import checked, create_models
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.prepare import single
from troupe.orchestrator.signals import exit_on_signals, taken
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.stages import read_document

PAGE = "bench.html"


def bench(
    spec: SpecArgument,
    sweep: Annotated[
        list[str],
        typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Measure each of these values."),
    ] = [],  # noqa: B006
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a batch (default: schedule.prompts_per_step).")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Measured batches of every point.")] = 3,
    baseline: Annotated[
        Literal["vllm"] | None,
        typer.Option(help="vllm: also sample the same prompts with bare AsyncLLM, alternating with the others."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Also measure the trainers alone, on sequences as long as those sampled.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="Also measure updates of the engines' weights, by back-end.")
    ] = False,
    set_: SetOption = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Page to write (default: runs/NAME/bench.html).")
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure rollouts without training: tokens/s, latencies, caches and what bounds them, for every point of a sweep.

    Only engines (and environments) are started, and points that differ in sampling or in the number of engines share
    them. --train and --weights measure the fastest point afterwards. Writes one HTML page, and beside it the results as
    JSON, which `troupe plan --measured` reads. The exit code is 1 where something could not be measured.
    """
    if taken():
        exit_on_signals()  # until Ray starts, nothing has to be ended in order
    if output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    if output is not None and output.suffix == ".json":
        raise UsageError(f"--output {output}: name the page; its results are written beside it as JSON")
    points = _points(spec, [parse_sweep(text) for text in sweep], set_, prompts)
    from troupe.orchestrator.bench.bounds import best_of
    from troupe.orchestrator.bench.record import record_of
    from troupe.orchestrator.bench.training import TransferResult
    from troupe.orchestrator.bench_run import BenchRequest
    from troupe.orchestrator.bench_run import bench as measure
    from troupe.orchestrator.bench_training import TrainingRequest, measure_trainers, measure_transfers
    from troupe.orchestrator.commands.bench_table import show
    from troupe.orchestrator.reporting.console import Console
    from troupe.orchestrator.reporting.html.bench import write_page
    from troupe.workers.contract.atomic_file import write_atomic

    console = Console(sys.stderr)
    results = measure(BenchRequest(points, batches, address, baseline == "vllm"), console)
    trained, sent = None, list[TransferResult]()
    if (fastest := best_of(results)) is not None:
        request = TrainingRequest(fastest, batches, address)
        trained = measure_trainers(request, console) if train else None
        sent = measure_transfers(request, console) if weights else []
    cores = None if address or os.environ.get("RAY_ADDRESS") else os.cpu_count()
    record = record_of(results, cores, trained, sent)
    page = write_page(record, output or points[0].spec.run_folder / PAGE)
    write_atomic(page.with_suffix(".json"), json_text(record))
    if as_json:
        echo_json(record)
    else:
        show(results, cores, trained, sent)
        typer.echo(f"wrote {page}")
    if any(result.measures is None for result in [*results, *sent]) or (trained is not None and trained.problem):
        sys.exit(FAILURE)


def _points(path: Path, sweeps: list[Sweep], overrides: list[str], prompts: int | None) -> list[Point]:
    """The points of the sweep, with their models in place. Raises SpecError or UsageError."""

    def load(own: list[str]) -> RunSpec:
        runs = (single(read_document(path, [*overrides, *own]), str(path)),)
        create_models(runs)
        return checked(runs)[0].spec

    if prompts is not None and any(sweep.field == "schedule.prompts_per_step" for sweep in sweeps):
        raise UsageError("--prompts sets schedule.prompts_per_step, which --sweep varies; give one of them")
    return grid(load, sweeps, prompts)
