"""Commands that start nothing: check a spec, plan its memory, check this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    SetOption,
    SpecArgument,
    echo_json,
    exit_with,
)
from troupe.orchestrator.commands.runs import create_models, read_data
from troupe.orchestrator.plan.placement import CPUS_PER_NODE
from troupe.orchestrator.runs.prepare import check_models_to_create, checked, models_to_create
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.orchestrator.spec.derived.paths import uses_hub
from troupe.orchestrator.spec.derived.sizes import batch_description
from troupe.orchestrator.spec.derived.warnings import warnings_of
from troupe.orchestrator.spec.load import plan_runs, read_document, spec_schema

if TYPE_CHECKING:
    from troupe.orchestrator.plan.placement import Node


def validate(spec: SpecArgument, set_: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """Check a spec and the files and data it names; starts and writes nothing. Names on the hub are looked up.

    Models of the examples that this machine does not have yet are created by the run: their prompts are not checked.
    """
    runs = plan_runs(read_document(spec, set_))
    check_models_to_create(runs)
    later = {planned.out: models_to_create(planned) for planned in runs}
    runs = checked(tuple(replace(run, borrowed=run.borrowed | later[run.out].keys()) for run in runs))
    described = read_data(runs)
    if as_json:
        echo_json([_valid(planned, lines) for planned, lines in zip(runs, described, strict=True)])
        return
    for planned, lines in zip(runs, described, strict=True):
        loaded = planned.spec
        typer.echo(f"{spec}: {loaded.name} is valid: {loaded.algorithm.name}, {batch_description(loaded)} per step")
        for line in (*lines, *(f"warning: {warning}" for warning in warnings_of(loaded))):
            typer.echo(f"  {line}")
        for field, folder in later[planned.out].items():
            typer.echo(f"  {field}: {folder} is created when the run starts; prompts are not checked against it")


def _valid(planned: PlannedRun, data: Sequence[str]) -> dict[str, object]:
    """What is known of a valid run."""
    loaded = planned.spec
    return {
        "name": loaded.name,
        "algorithm": loaded.algorithm.name,
        "steps": loaded.schedule.steps,
        "batch": batch_description(loaded),
        "run_folder": planned.out,
        "data": list(data),
        "warnings": warnings_of(loaded),
    }


def plan(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    address: AddressOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster as NODESxGPUS[xTYPE], as in 2x8 or 2x8xH200; auto: the local Ray cluster."),
    ] = None,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="CPUs per node of --cluster.")] = CPUS_PER_NODE,
    gib_per_node: Annotated[
        float, typer.Option(help="Host memory per node of --cluster, in GiB (0: not checked).")
    ] = 0.0,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            metavar="FOLDER",
            help="Folder (or JSON file) of a `troupe bench` of this spec: what it measured replaces estimates.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: placement, memory in bytes, what does not fit.")
    ] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Exit with 0 even where the size of a model is not known.")
    ] = False,
) -> None:
    """Show the placement and the memory of every worker, part by part, compared with the resources of the cluster.

    The exit code is 1 if something does not fit, or the size of a model is not known.
    """
    runs = plan_runs(read_document(spec, set_))
    create_models(runs)
    runs = _with_model_configs(runs)
    from troupe.orchestrator.commands.plan_table import show, unknown_sizes
    from troupe.orchestrator.plan.measured import Recorded
    from troupe.orchestrator.plan.plan import as_json as plan_json
    from troupe.orchestrator.plan.plan import plan_stages

    recorded = None if measured is None else Recorded.read(measured)
    nodes = _nodes(cluster, address, cpus_per_node, gib_per_node)
    plans = list(plan_stages(runs, nodes, advise=True, recorded=recorded))
    if as_json:
        typer.echo(json.dumps([plan_json(planned.spec.name, found) for planned, found in plans], indent=2))
    else:
        for planned, found in plans:
            if planned.stage:
                typer.echo(f"{planned.spec.name}:")
            show(found)
    if misfit := plans[-1][1].misfit:
        exit_with(f"{spec}: {misfit}", FAILURE)
    unknown = unknown_sizes([found.memory for _, found in plans])
    if unknown and not allow_unknown:
        lines = "\n".join(f"{spec}: {line}; --allow-unknown plans without its workers" for line in unknown)
        exit_with(lines, FAILURE)


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="Spec whose needs this machine must meet.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: packages, GPUs, memory, disks, limits, network. Each finding names its remedy."""
    runs = None if spec is None else plan_runs(read_document(spec, set_))
    from troupe.orchestrator.insight.doctor import checks
    from troupe.orchestrator.insight.doctor.machine import gather

    findings = checks.examine(gather(Path.cwd()), None if runs is None else checks.needs_of(runs))
    typer.echo(checks.as_json(findings) if as_json else checks.as_text(findings))
    if not checks.healthy(findings):
        sys.exit(FAILURE)


def schema() -> None:
    """Print the JSON Schema of a spec."""
    typer.echo(json.dumps(spec_schema(), indent=2))


def _with_model_configs(runs: tuple[PlannedRun, ...]) -> tuple[PlannedRun, ...]:
    """The runs with folders that hold `config.json` instead of models on the hub, to plan with."""
    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_configs

    planned_runs = []
    for planned in runs:
        spec, findings = pin_configs(planned.spec)
        for path, message in findings:
            typer.echo(f"note: {path}: {message}", err=True)
        planned_runs.append(replace(planned, spec=spec))
    return tuple(planned_runs)


def _nodes(cluster: str | None, address: str | None, cpus: int, gib: float) -> list[Node] | None:
    """Nodes of the cluster that --cluster or --address names, or None for this machine."""
    if cluster is not None and cluster != "auto":
        from troupe.orchestrator.plan.plan import described_nodes

        return described_nodes(cluster, cpus, gib)
    if cluster is None and address is None:
        return None
    from troupe.orchestrator.cluster.ray_cluster import Cluster

    return Cluster.list_nodes(address or "auto")
