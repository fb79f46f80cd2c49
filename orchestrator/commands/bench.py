"""`troupe bench`: throughput of the rollouts of a spec, without training."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    SetOption,
    SpecArgument,
    echo_json,
    json_text,
)
from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.signals import exit_on_signals, taken

if TYPE_CHECKING:
    from troupe.orchestrator.insight.bench.engines import BenchRequest
    from troupe.orchestrator.insight.bench.points import Point, Sweep
    from troupe.orchestrator.insight.bench.results import Result
    from troupe.orchestrator.spec.base import RunSpec


def bench(
    spec: SpecArgument,
    sweep: Annotated[
        list[str], typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Measure each of these values.")
    ] = [],  # noqa: B006
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a batch (default: schedule.prompts_per_step).")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Measured batches of every point.")] = 3,
    set_: SetOption = [],  # noqa: B006
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON file for the results (default: runs/NAME/bench.json).")
    ] = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure rollouts without training: tokens/s, latencies, caches and the bottleneck, for every point of a sweep.

    Only engines (and environments) are started, and points that differ in sampling or in the number of engines share
    them. Writes the results as JSON after every point, so that they also hold what was measured before an
    interruption. The exit code is 1 if something could not be measured.
    """
    if taken():
        exit_on_signals()  # until Ray starts, there is nothing to end in order
    from troupe.orchestrator.cluster.worker_server import started_ahead
    from troupe.orchestrator.insight.bench.points import parse_sweep
    from troupe.orchestrator.spec.locations import is_url

    if output is not None and output.is_dir():
        raise UsageError(f"--output {output} is a folder; name a file in it")
    if output is not None and is_url(output):
        raise UsageError(f"--output {output} is a URL; write the results to a disk")
    points = _points(spec, [parse_sweep(text) for text in sweep], set_, prompts)
    file = output or points[0].spec.run_folder / "bench.json"
    with started_ahead(points[0].spec, address):  # it imports while this process does
        from troupe.orchestrator.insight.bench.engines import BenchRequest

        complete = _measure(BenchRequest(points, batches, address), file, as_json)
    if not complete:
        sys.exit(FAILURE)


def _measure(rollouts: BenchRequest, file: Path, as_json: bool) -> bool:
    """Measure, write the results after every point, and print everything; whether all could be measured."""
    from troupe.orchestrator.cluster.ray_environment import cluster_to_join
    from troupe.orchestrator.insight.bench.engines import bench as measure
    from troupe.orchestrator.telemetry.console import Console

    console = Console(sys.stderr)
    cores = None if cluster_to_join(rollouts.address) is not None else os.cpu_count()
    measured = _Measured(file, cores)
    try:
        measure(rollouts, console, measured.keep)
    finally:
        if measured.rollouts:
            measured.show(rollouts.points, as_json=as_json)
    return not any(result.problem for result in measured.rollouts)


class _Measured:
    """What has been measured so far; written whenever something is added."""

    def __init__(self, file: Path, cores: int | None) -> None:
        """`cores` are the machine's, or None for a cluster, whose free resources are unknown."""
        self._file = file
        self._cores = cores
        self.rollouts: Sequence[Result] = ()

    def keep(self, results: Sequence[Result]) -> None:
        """Keep the results of the points instead of the ones before."""
        from troupe.workers.contract.atomic_file import write_atomic

        self.rollouts = results
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file, json_text(self._record()))

    def show(self, points: Sequence[Point], *, as_json: bool) -> None:
        """Print everything to standard output; `points`: all that were to be measured."""
        from troupe.orchestrator.commands.bench_table import show

        if as_json:
            echo_json(self._record())
            return
        show(self.rollouts, self._cores, points)
        typer.echo(f"wrote {self._file}")

    def _record(self) -> dict[str, Any]:
        from troupe.orchestrator.insight.bench.bounds import record_of

        return record_of(self.rollouts, self._cores)


def _points(path: Path, sweeps: list[Sweep], overrides: list[str], prompts: int | None) -> list[Point]:
    """The points of the sweep, with their models in place. Raises SpecError or UsageError."""
    from troupe.orchestrator.commands.runs import announce, create_models
    from troupe.orchestrator.insight.bench.points import grid
    from troupe.orchestrator.runs.prepare import checked, single
    from troupe.orchestrator.spec.load import read_document

    def load(own: list[str]) -> RunSpec:
        runs = (single(read_document(path, [*overrides, *own]), str(path), announce),)
        create_models(runs)
        return checked(runs)[0].spec

    if prompts is not None and any(sweep.field == "schedule.prompts_per_step" for sweep in sweeps):
        raise UsageError("--prompts sets schedule.prompts_per_step, which --sweep varies; give one of them")
    return grid(load, sweeps, prompts)
