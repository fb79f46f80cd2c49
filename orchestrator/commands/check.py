"""Commands that start no run: check a spec, plan its memory, check this machine, an algorithm or an environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from troupe.orchestrator.commands.options import (
    FAILURE,
    AddressOption,
    JsonOption,
    SetOption,
    SpecArgument,
    algorithm_names,
    echo_json,
    exit_with,
    read_mapping,
)
from troupe.orchestrator.errors import UsageError
from troupe.workers.contract.text import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.orchestrator.plan.placement import Node
    from troupe.orchestrator.plan.speed import Rates
    from troupe.orchestrator.spec.chain import PlannedRun
    from troupe.orchestrator.spec.rollout import RolloutSpec
    from troupe.workers.contract.config import EnvironmentConfig
    from troupe.workers.contract.config_base import ModelConfig

env_app = typer.Typer(
    no_args_is_help=True, help="Check environments, install their packages, write their tasks as rows."
)
_START_S = 120.0


def validate(spec: SpecArgument, set_: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """Check a spec and the files and data it names; starts and writes nothing. Names on the hub are looked up.

    Models of the examples that this machine does not have yet are created by the run: their prompts are not checked.
    """
    from troupe.orchestrator.commands.runs import announce, read_data
    from troupe.orchestrator.runs.epochs import plan_counted
    from troupe.orchestrator.runs.prepare import check_models_to_create, checked, models_to_create
    from troupe.orchestrator.spec.derived.sizes import batch_description
    from troupe.orchestrator.spec.derived.warnings import warnings_of
    from troupe.orchestrator.spec.load import read_document

    runs = plan_counted(read_document(spec, set_), announce)
    check_models_to_create(runs)
    later = {planned.out: models_to_create(planned) for planned in runs}
    runs = checked(tuple(replace(run, borrowed=run.borrowed | later[run.out].keys()) for run in runs))
    described = read_data(runs)
    if as_json:
        echo_json([_valid(planned, lines) for planned, lines in zip(runs, described, strict=True)])
        return
    for planned, lines in zip(runs, described, strict=True):
        loaded = planned.spec
        length = f"{loaded.schedule.steps} steps of {batch_description(loaded)}"
        typer.echo(f"{spec}: {loaded.name} is valid: {loaded.algorithm.name}, {length}")
        for line in (*lines, *(f"warning: {warning}" for warning in warnings_of(loaded))):
            typer.echo(f"  {printable(line)}")
        for field, folder in later[planned.out].items():
            typer.echo(f"  {field}: {folder} is created when the run starts; prompts are not checked against it")


def _valid(planned: PlannedRun, data: Sequence[str]) -> dict[str, object]:
    """What is known of a valid run."""
    from troupe.orchestrator.spec.derived.sizes import batch_description
    from troupe.orchestrator.spec.derived.warnings import warnings_of

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
    cpus_per_node: Annotated[int | None, typer.Option(min=1, help="CPUs per node of --cluster (default: 128).")] = None,
    gib_per_node: Annotated[
        float, typer.Option(help="Host memory per node of --cluster, in GiB (0: not checked).")
    ] = 0.0,
    rates: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Results of troupe bench: the engines' speed is theirs, not predicted."),
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
    from troupe.orchestrator.commands.plan_table import show, unknown_sizes
    from troupe.orchestrator.commands.runs import announce
    from troupe.orchestrator.plan.plan import as_json as plan_json
    from troupe.orchestrator.plan.plan import plan_stages
    from troupe.orchestrator.runs.epochs import plan_counted
    from troupe.orchestrator.runs.prepare import with_configs
    from troupe.orchestrator.spec.load import read_document

    runs = plan_counted(read_document(spec, set_), announce)
    nodes = _nodes(cluster, address, cpus_per_node, gib_per_node)
    measured = None if rates is None else _rates(rates, runs, nodes)
    runs = _with_model_configs(tuple(map(with_configs, runs)))
    plans = list(plan_stages(runs, nodes, advise=True, rates=measured))
    if as_json:
        echo_json([plan_json(planned.spec.name, found) for planned, found in plans])
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: vLLM, compiler, GPUs, memory, disks, limits, network. Each finding names its remedy."""
    from troupe.orchestrator.insight.doctor import checks
    from troupe.orchestrator.insight.doctor.machine import gather

    findings = checks.examine(gather(Path.cwd()))
    healthy = checks.healthy(findings)
    _echo({"healthy": healthy, "findings": findings}, checks.as_text(findings), as_json)
    if not healthy:
        sys.exit(FAILURE)


def schema(
    of: Annotated[
        Literal["spec", "error", "report"],
        typer.Argument(
            metavar="KIND", help="spec: a spec; error, report: what --json prints of an error, or of verdicts."
        ),
    ] = "spec",
) -> None:
    """Print the JSON Schema of a spec, of errors or of verdicts."""
    from pydantic import TypeAdapter

    from troupe.orchestrator.insight.verdicts.apply import RunReport
    from troupe.orchestrator.spec.errors import Failure
    from troupe.orchestrator.spec.load import spec_schema

    printed = {"error": Failure, "report": dict[str, RunReport]}
    typer.echo(json.dumps(TypeAdapter(printed[of]).json_schema() if of in printed else spec_schema(), indent=2))


def _with_model_configs(runs: tuple[PlannedRun, ...]) -> tuple[PlannedRun, ...]:
    """The runs with folders that hold `config.json` instead of models on the hub, to plan with."""
    from troupe.orchestrator.spec.derived.paths import uses_hub

    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_configs

    planned_runs = []
    for planned in runs:
        spec, findings = pin_configs(planned.spec)
        for path, message in findings:
            typer.echo(printable(f"note: {path}: {message}"), err=True)
        planned_runs.append(replace(planned, spec=spec))
    return tuple(planned_runs)


def _nodes(cluster: str | None, address: str | None, cpus: int | None, gib: float) -> list[Node] | None:
    """Nodes of the cluster that --cluster or --address names, or None for this machine."""
    if cluster is not None and cluster != "auto":
        from troupe.orchestrator.plan.placement import CPUS_PER_NODE
        from troupe.orchestrator.plan.plan import described_nodes

        return described_nodes(cluster, CPUS_PER_NODE if cpus is None else cpus, gib)
    if cluster is None and address is None:
        return None
    from troupe.orchestrator.cluster.ray_nodes import nodes_at

    return nodes_at(address or "auto")


def _rates(file: Path, runs: Sequence[PlannedRun], nodes: list[Node] | None) -> Rates:
    """What `troupe bench` measured of the engines of the only run."""
    from troupe.orchestrator.insight.bench.rates import read_rates

    if len(runs) > 1:
        raise UsageError("--rates: a file with stages is several runs; use the spec.yaml in a stage's run folder")
    return read_rates(file, runs[0].spec, {node.gpu_type for node in nodes or () if node.gpus})


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=algorithm_names,
            help="Algorithm to describe; package.module:attribute for a custom one.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check a custom algorithm on random batches: gradients, order, splits, masks, edge cases."
        ),
    ] = False,
    args: Annotated[str, typer.Option(help="Its arguments, as a YAML mapping.")] = "{}",
    as_json: JsonOption = False,
) -> None:
    """List the algorithms, or describe one with its formula, source and defaults."""
    from troupe.orchestrator.algorithms.description import described_row, description, listed, listing, named
    from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
    from troupe.orchestrator.algorithms.section import is_custom, unknown_algorithm
    from troupe.orchestrator.algorithms.table import ALGORITHMS

    if name is not None and is_custom(name):
        _custom_algorithm(name, args, check, as_json)
    elif check:
        raise UsageError("--check is for a custom algorithm, package.module:attribute")
    elif name is None:
        _echo(listed(), listing(), as_json)
    elif name in ALGORITHMS or name in OFFLINE_ALGORITHMS:
        _echo(described_row(named(name)), description(name), as_json)
    else:
        raise UsageError(unknown_algorithm(name))


def _echo(value: Any, text: str, as_json: bool) -> None:
    if as_json:
        echo_json(value)
    else:
        typer.echo(text)


def _custom_algorithm(name: str, args: str, check: bool, as_json: bool) -> None:
    from troupe.orchestrator.algorithms.custom import report
    from troupe.orchestrator.algorithms.description import describe_row, described_row
    from troupe.orchestrator.algorithms.section import custom_row
    from troupe.workers.algorithms.custom_checks import Available, check_custom
    from troupe.workers.contract.algorithm_config import CustomConfig

    try:
        config = CustomConfig(name=name, args=read_mapping(args, "{beta: 0.1}"))
        row = custom_row(config)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from None
    if not check:
        _echo(described_row(row), describe_row(row), as_json)
        return
    available = Available(importance=row.loss.importance.mode != "none")
    checks = check_custom(config, available=available)
    _echo(checks, report(checks), as_json)
    if any(one.problem for one in checks):
        sys.exit(FAILURE)


@env_app.command()
def check(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="YAML spec with a section roles.environment.")],
    say: Annotated[list[str], typer.Option("--say", help="Text of a turn; repeat for further turns.")] = [],  # noqa: B006
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play, each with a row of data.train.")] = 1,
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Play episodes in each environment without a model and print the conversations with their tokens and loss masks.

    With --say the policy's turns are these texts, and the last one is repeated; then it is played with random tokens.
    The exit code is 1 if an episode failed.
    """
    from troupe.orchestrator.commands.runs import announce
    from troupe.orchestrator.runs.epochs import plan_counted
    from troupe.orchestrator.spec.load import read_document
    from troupe.workers.contract.environments import OK

    planned = [run.spec for run in plan_counted(read_document(spec, set_), announce)]
    played: list[dict[str, Any]] = []
    for one in planned:
        # A stage's model may not be trained yet; its tokenizer is the first stage's.
        model = one.model if Path(one.model.path).is_dir() else planned[0].model
        if one.rollouts is not None:
            found = _play(one.rollouts, model, say, episodes)
            if not as_json:
                for episode in found:
                    typer.echo("\n".join(episode["lines"]))
            played += found
    if not any(one.rollouts is not None and one.rollouts.roles.environments() for one in planned):
        raise UsageError(f"{spec}: there is no roles.environment to check")
    if as_json:
        echo_json([{name: value for name, value in episode.items() if name != "lines"} for episode in played])
    if failed := sum(episode["status"] != OK for episode in played):
        exit_with(f"{failed} of {len(played)} episodes failed", FAILURE)


@env_app.command()
def install(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Built-in environment: verifiers, gymnasium, ...")],
    with_: Annotated[
        list[str], typer.Option("--with", metavar="PACKAGE", help="A package besides, such as your own environment.")
    ] = [],  # noqa: B006
) -> None:
    """Make the virtual environment of a built-in environment, from a lock; done before, it takes no time.

    `roles.environment.python` names another one.
    """
    from troupe.orchestrator.starter.environments import install

    install(name, with_, typer.echo)


@env_app.command()
def rows(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment that has tasks itself.")],
    args: Annotated[str, typer.Option(help="Its arguments: a YAML mapping, such as '{taskset: glossary}'.")] = "{}",
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("rows.jsonl"),
    limit: Annotated[int, typer.Option(min=1, help="Most rows.")] = 1000,
    python: Annotated[str | None, typer.Option(help="Its interpreter, as in roles.environment.python.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write the tasks of an environment as rows of data, each with its index or seed."""
    from troupe.orchestrator.starter.environments import own_rows

    if output.exists() and not force:
        raise UsageError(f"{output} exists; --force overwrites it, --output names another file")
    found = own_rows(name, read_mapping(args, "{taskset: glossary}"), limit, python)
    output.write_text("".join(json.dumps(row) + "\n" for row in found))
    typer.echo(f"wrote {output}: {len(found)} rows with {', '.join(found[0])}")


def _play(spec: RolloutSpec, model: ModelConfig, say: list[str], episodes: int) -> list[dict[str, Any]]:
    environments = spec.roles.environments()
    if not environments:
        return []
    from troupe.orchestrator.data.mixture import group_settings
    from troupe.orchestrator.data.prompts import load_train_pool
    from troupe.workers.contract.config import EnvironmentConfig

    pool = load_train_pool(spec.data, spec.failures.on_bad_row, plain=spec.model.plain)
    settings, played = group_settings(spec, pool), list[dict[str, Any]]()
    for name, role in environments.items():
        rows = list(islice((row for row in range(pool.rows) if settings[row].environment == name), episodes))
        found = _episodes(spec, model, role.part(EnvironmentConfig), pool.table.take(rows), say) if rows else []
        if name:
            heading = f"# roles.environment.{name}" + ("" if rows else ": no source of data.train plays in it")
            found = [{"environment": name, **one} for one in found] or [{"environment": name, "lines": []}]
            found[0]["lines"] = [heading, *found[0]["lines"]]
        played += found
    return played


def _episodes(
    spec: RolloutSpec, model: ModelConfig, config: EnvironmentConfig, rows: pa.Table, say: list[str]
) -> list[dict[str, Any]]:
    """Play an episode in an environment with each of these rows of a PROMPTS table."""
    from troupe.workers.isolation.probe import ProbeFailed, ask

    request = {
        "config": config.model_dump(),
        "model": model.model_dump(),
        "max_tokens": spec.sampling.max_tokens,
        "max_model_len": spec.roles.rollout.max_model_len,
        "rows": rows.select(["messages", "answer", "metadata"]).to_pylist(),
        "said": say,
        "seed": spec.seed,
    }
    timeout_s = _START_S + len(rows) * 2 * config.episode_timeout_s
    try:
        return ask("troupe.workers.engine.episode_check:report", request, timeout_s)
    except ProbeFailed as error:
        raise UsageError(error.raised or f"the check failed: {error}") from None
