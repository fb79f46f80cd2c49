"""The `troupe` command line: each command parses its flags, calls the module that does the work, and prints the
result."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
import yaml

from troupe.orchestrator.commands import audit, jobs, live, replay, why
from troupe.orchestrator.commands import samples as samples_command
from troupe.orchestrator.commands import trace as trace_command
from troupe.orchestrator.commands.environment import env_app
from troupe.orchestrator.commands.messages import os_error, typer_error
from troupe.orchestrator.commands.options import (
    FAILURE,
    STOPPED,
    USER_ERROR,
    AddressOption,
    OutOption,
    RunArgument,
    SetOption,
    SpecArgument,
    exit_with,
)
from troupe.orchestrator.commands.report import report
from troupe.orchestrator.commands.watch import watch
from troupe.orchestrator.errors import StopRequested, TroupeError, UsageError
from troupe.orchestrator.platforms.flags import KubernetesFlags, NodeFlags, SlurmFlags, with_flags
from troupe.orchestrator.spec.errors import SpecError
from troupe.orchestrator.spec.examples import MODELS_VARIABLE, models_folder
from troupe.orchestrator.spec.hub import uses_hub
from troupe.orchestrator.spec.load import spec_schema
from troupe.orchestrator.spec.stages import PlannedRun, plan_runs, read_document
from troupe.orchestrator.starter.demo import (
    DEFAULT,
    demo_folder,
    demo_spec,
    list_examples,
    named_models,
    next_steps,
    write_demo_report,
)

if TYPE_CHECKING:
    from troupe.orchestrator.capacity.placement import Node
    from troupe.orchestrator.run import RunRequest

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language models with reinforcement learning.",
)

app.add_typer(env_app, name="env")


def main() -> NoReturn:
    """Run the command and exit.

    Exit codes: 0 success, 1 failure at run time, 2 invalid spec or command line (one line per error), 130 stopped by
    SIGINT or SIGTERM after saving.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know a character
    try:
        code = app(prog_name="troupe", standalone_mode=False)
    except typer.TyperException as error:
        exit_with(typer_error(error), USER_ERROR)
    except typer.Abort:
        exit_with("aborted", FAILURE)
    except SpecError as error:
        exit_with(str(error), USER_ERROR)
    except UsageError as error:
        exit_with(f"error: {error}", USER_ERROR)
    except StopRequested as error:
        exit_with(str(error), STOPPED)
    except TroupeError as error:
        said = os_error(error) if isinstance(error, OSError) else str(error)
        exit_with("\n".join([f"error: {said}", *getattr(error, "__notes__", ())]), FAILURE)
    except MemoryError:
        exit_with("error: this machine has no memory left for the command", FAILURE)
    except OSError as error:
        exit_with(f"error: {os_error(error)}", FAILURE)
    except ImportError as error:
        exit_with(f"error: {error}; `troupe doctor` lists the packages that are missing here", FAILURE)
    sys.exit(code)


def _show_versions(asked: bool) -> None:
    if asked:
        from troupe.orchestrator.versions import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def troupe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_versions, is_eager=True, help="Print versions: troupe, torch, vLLM ..."
        ),
    ] = False,
) -> None:
    """Train language models with reinforcement learning."""


@app.command()
def run(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest valid checkpoint.")] = False,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Resume by itself after an unexpected end (failures.run_restarts).")
    ] = False,
    address: AddressOption = None,
) -> None:
    """Train: start or join Ray, place the workers and run every step."""
    runs = _ready(spec, set_, out, resume=resume)
    if supervise:
        sys.exit(_supervise(runs))
    _train(runs, resume, address)


@app.command()
def demo(
    spec: Annotated[str, typer.Option(metavar="EXAMPLE", help="Example to run, as --list shows it.")] = DEFAULT,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps (default: the example's).")] = None,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder (default: runs/demo, or runs/NAME with --spec NAME).")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(envvar=MODELS_VARIABLE, help="Folder for the models (default: in the user's cache folder)."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the examples and exit.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Create both models and exit.")] = False,
) -> None:
    """Create two small models, once, and train one of them on this machine; a second call resumes.

    The default teaches SmolLM2-135M one-digit sums with GRPO, in some minutes on two cores.
    """
    if list_:
        typer.echo(list_examples())
        return
    if models is not None:
        os.environ[MODELS_VARIABLE] = str(models)
    if prepare:
        _create_models(None)
        typer.echo(f"the models are in {models_folder()}")
        return
    example, overrides = demo_spec(spec, steps)
    runs = _ready(example, [*overrides, *set_], out or demo_folder(spec))
    resume = any(any((planned.out / "checkpoints").glob("step-*")) for planned in runs)
    _train(runs, resume, None)
    typer.echo(next_steps(example, runs, write_demo_report(runs)))


def _supervise(runs: Sequence[PlannedRun]) -> int:
    """Run this command without `--supervise` in a process of its own, again after an unexpected end."""
    from troupe.orchestrator.supervisor import supervise

    arguments = [argument for argument in sys.argv[1:] if argument != "--supervise"]
    restarts = max(planned.spec.failures.run_restarts for planned in runs)
    return supervise(
        [sys.executable, "-m", "troupe", *arguments],
        lambda: sum(_saved_steps(planned.out) for planned in runs),
        restarts,
        lambda line: typer.echo(line, err=True),
    )


def _saved_steps(out: Path) -> int:
    """Step of the newest checkpoint of a run, 0 where it has none."""
    from troupe.orchestrator.training.checkpoint import CheckpointStore

    return max(CheckpointStore(out / "checkpoints", keep=1).steps(), default=0)


def _train(runs: Sequence[PlannedRun], resume: bool, address: str | None) -> None:
    """Train every run of a file that is not complete yet."""
    from troupe.orchestrator.reporting.console import Console
    from troupe.orchestrator.run import run as run_spec
    from troupe.orchestrator.worker_classes import worker_classes

    requests = [(planned, _request(planned, resume, address)) for planned in runs]
    _read_data([planned for planned, request in requests if request is not None][1:])  # the first run reads its own
    for planned, request in requests:
        if request is None:
            steps = planned.spec.schedule.steps
            typer.echo(f"{planned.spec.name}: already complete in {planned.out} (schedule.steps: {steps})")
            continue
        console = Console()
        console.start(planned.spec.name, planned.spec.schedule.steps)
        try:
            outcome = run_spec(request, worker_classes, console)
            console.finish(outcome.summary(request.out))
        finally:
            console.close()
        if outcome.stopped:
            sys.exit(STOPPED)


@app.command("eval")
def evaluate(
    spec: SpecArgument,
    model: Annotated[Path | None, typer.Option("--model", help="Model folder (default: the spec's model).")] = None,
    set_: SetOption = [],  # noqa: B006
    address: AddressOption = None,
) -> None:
    """Evaluate a model on the spec's held-out data and print the metrics as JSON.

    On prompts, only engines and reward workers are started; on offline data, the metrics are the loss and the metrics
    of the spec's algorithm.
    """
    runs = plan_runs(read_document(spec, set_))
    if any(planned.stage for planned in runs):
        exit_with(f"{spec}: cannot evaluate a file with stages; use the spec.yaml in a stage's run folder", USER_ERROR)
    overrides = set_ if model is None else [*set_, *runs[0].spec.with_model(model)]
    loaded = _ready(spec, overrides)[0].spec
    from troupe.orchestrator.reporting.console import Console
    from troupe.orchestrator.run import RunRequest
    from troupe.orchestrator.run import evaluate as evaluate_spec
    from troupe.orchestrator.worker_classes import worker_classes

    console = Console(sys.stderr)  # standard output holds the result only
    metrics = evaluate_spec(RunRequest(loaded, loaded.run_folder, False, address), worker_classes, console)
    typer.echo(json.dumps(metrics, indent=2))


@app.command()
def init(
    model: Annotated[str | None, typer.Option(help="Model folder in Hugging Face format.")] = None,
    data: Annotated[str | None, typer.Option(help="JSON Lines file, or reasoning_gym:TASK.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Algorithm (default: grpo).")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of the machine (default: those it has).")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Their type, such as H100 (default: as detected).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=0, help="Longest response (0: 64 on CPUs, 1024 on GPUs).")] = 0,
    name: Annotated[str | None, typer.Option(help="Name of the run (default: from model and algorithm).")] = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="EXAMPLE", help="Write this example (`troupe demo --list`) instead.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("run.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a first spec that fits this machine, with a comment for each field; in a terminal, ask what is missing."""
    from troupe.orchestrator.starter.command import Flags, complete, copy_of, text_of, write

    if output.exists() and not force:
        exit_with(f"error: {output} exists; --force overwrites it, --output names another file", USER_ERROR)

    def ask(question: str, default: str) -> str:
        return str(typer.prompt(question, default=default or None))

    flags = Flags(model, data, algorithm, gpus, gpu_type, name, steps, max_tokens)
    if from_ is not None:
        text = copy_of(from_, flags, output)
    else:
        text = text_of(complete(flags, ask if sys.stdin.isatty() else None), output)
    write(text, output, force)
    typer.echo(f"wrote {output}; next: troupe validate {output}")


@app.command()
def validate(spec: SpecArgument, set_: SetOption = []) -> None:  # noqa: B006
    """Check a spec and the files and data it names, without starting anything. Names on the hub are looked up."""
    runs = _ready(spec, set_)
    for planned, lines in zip(runs, _read_data(runs), strict=True):
        loaded = planned.spec
        typer.echo(f"{spec}: {loaded.name} is valid: {loaded.algorithm.name}, {loaded.batch_description} per step")
        for line in (*lines, *(f"warning: {warning}" for warning in loaded.warnings())):
            typer.echo(f"  {line}")


@app.command()
def plan(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    address: AddressOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Cluster as NODESxGPUS[xTYPE], as in 2x8 or 2x8xH200; auto: the local Ray cluster."),
    ] = None,
    cpus_per_node: Annotated[int, typer.Option(min=1, help="CPUs per node of --cluster.")] = 128,
    gib_per_node: Annotated[
        float, typer.Option(help="Host memory per node of --cluster, in GiB (0: not checked).")
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: placement, memory in bytes, what does not fit.")
    ] = False,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Exit with 0 even where the size of a model is not known.")
    ] = False,
) -> None:
    """Show the placement and the memory of every worker, part by part, compared with the resources of the cluster.

    The exit code is 1 where something does not fit, or the size of a model is not known.
    """
    runs = plan_runs(read_document(spec, set_))
    _create_models(runs)
    runs = _with_model_configs(runs)
    from troupe.orchestrator.capacity.plan import as_json as plan_json
    from troupe.orchestrator.capacity.stages import plan_stages
    from troupe.orchestrator.reporting.plan_table import show, unknown_sizes

    plans = list(plan_stages(runs, _nodes(cluster, address, cpus_per_node, gib_per_node), advise=True))
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


@app.command()
def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="Spec whose needs this machine must meet.")
    ] = None,
    set_: SetOption = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine: packages, GPUs, memory, disks, limits, network. Each finding names its remedy."""
    runs = None if spec is None else plan_runs(read_document(spec, set_))
    from troupe.orchestrator.doctor import checks
    from troupe.orchestrator.doctor.facts import gather
    from troupe.orchestrator.doctor.needs import needs_of

    findings = checks.examine(gather(Path.cwd()), None if runs is None else needs_of(runs))
    typer.echo(checks.as_json(findings) if as_json else checks.as_text(findings))
    if not checks.healthy(findings):
        sys.exit(FAILURE)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec."""
    typer.echo(json.dumps(spec_schema(), indent=2))


@app.command("algorithms")
def algorithms_(
    name: Annotated[
        str | None, typer.Argument(help="Algorithm to describe in full; package.module:attribute for one of your own.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Check one of your own on random batches: gradients, order, splits, masks, edge cases."
        ),
    ] = False,
    args: Annotated[str, typer.Option(help="Its arguments, as a YAML mapping.")] = "{}",
) -> None:
    """List the algorithms, or describe one with its formula, source and defaults."""
    from troupe.orchestrator.algorithms.description import description, listing
    from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
    from troupe.orchestrator.algorithms.section import is_custom, unknown_algorithm
    from troupe.orchestrator.algorithms.table import ALGORITHMS

    if name is not None and is_custom(name):
        _own_algorithm(name, args, check)
    elif check:
        exit_with("error: --check is for an algorithm of your own, package.module:attribute", USER_ERROR)
    elif name is None:
        typer.echo(listing())
    elif name in ALGORITHMS or name in OFFLINE_ALGORITHMS:
        typer.echo(description(name))
    else:
        exit_with(f"error: {unknown_algorithm(name)}", USER_ERROR)


@app.command()
def export(
    run_folder: RunArgument,
    target: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder to write the Hugging Face model to.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest valid one).")
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="Export the moving average of the weights (ema_decay).")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Upload the model to the Hugging Face hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: a new repository is public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --push: do not ask before uploading.")] = False,
) -> None:
    """Export a run's trained policy as a Hugging Face model folder for transformers and vLLM."""
    from troupe.orchestrator.training.checkpoint import AVERAGE, MODEL, exported_model, write_model

    if target is None and push is None:
        exit_with("error: export where? Name a FOLDER, or --push ORG/NAME", USER_ERROR)
    source = exported_model(run_folder / "checkpoints", step, AVERAGE if average else MODEL)
    if target is not None:
        typer.echo(f"wrote {write_model(source, target)}")
    if push is not None:
        _push(source, push, private=not public, ask=not yes)


for command in (jobs.submit, jobs.jobs, jobs.status, jobs.logs, jobs.stop, live.scale, live.apply, report, watch):
    app.command()(command)
app.command()(samples_command.samples)
app.command()(replay.replay)
app.command()(audit.audit)
app.command()(trace_command.trace)
app.command()(why.why)


@app.command()
@with_flags
def deploy(
    spec: SpecArgument,
    node_size: NodeFlags,
    kubernetes: KubernetesFlags,
    for_slurm: SlurmFlags,
    set_: SetOption = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write (default: print it).")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Run folder, as pods or nodes see it.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job (default: the spec's).")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write an sbatch script instead of a manifest.")] = False,
) -> None:
    """Write a spec as a KubeRay manifest, or as an sbatch script for Slurm."""
    from troupe.orchestrator.platforms.manifest import Request, deployment, write

    text, notes = deployment(Request(spec, set_, name, out), slurm, node_size, kubernetes, for_slurm)
    if output is not None:
        write(output, text)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(text if output is None else f"wrote {output}", nl=output is not None)


def _ready(
    path: Path, overrides: list[str], out: Path | None = None, *, resume: bool = False
) -> tuple[PlannedRun, ...]:
    """Load every run of a file, with names on the hub pinned to commits.

    Raises:
        SpecError: A spec is invalid, or a file or repository it names does not exist.
    """
    runs = plan_runs(read_document(path, overrides), out)
    _create_models(runs)
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    if not any(uses_hub(planned.spec) for planned in runs):
        return runs
    from troupe.orchestrator.hub.resolve import pin_run

    return tuple(pin_run(planned, resume=resume) for planned in runs)


def _create_models(runs: Sequence[PlannedRun] | None) -> None:
    """Create the models of the examples that runs name, or all of them, where this machine does not have them yet."""
    from troupe.orchestrator.starter.demo_models import MODELS, DemoModelError, make_models

    folder = models_folder()
    names = MODELS if runs is None else [name for name in named_models(runs, folder) if name in MODELS]
    try:
        make_models(names, folder, lambda line: typer.echo(line, err=True))
    except DemoModelError as error:
        raise TroupeError(str(error)) from None


def _with_model_configs(runs: tuple[PlannedRun, ...]) -> tuple[PlannedRun, ...]:
    """The runs with folders that hold `config.json` in the place of models on the hub, to plan with."""
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


def _push(folder: Path, name: str, *, private: bool, ask: bool) -> None:
    """Upload a model's folder to the hub, after listing what it holds."""
    from troupe.orchestrator.hub.push import contents, push_model

    for line in contents(folder, name, private=private):
        typer.echo(line)
    if ask:
        typer.confirm("Upload?", abort=True)
    typer.echo(f"pushed {push_model(folder, name, private=private)}")


def _read_data(runs: Sequence[PlannedRun]) -> list[list[str]]:
    """Read all data of several runs; a description of the data of each. Raises SpecError where data cannot be used."""
    from troupe.orchestrator.data.prompt_check import check_prompts
    from troupe.orchestrator.data.readers import DataError
    from troupe.orchestrator.data.summary import describe, read_pools

    problems = []
    described = []
    for planned in runs:
        if uses_hub(planned.spec):
            from troupe.orchestrator.hub.resolve import describe as describe_hub

            described.append(describe_hub(planned.spec))  # nothing is downloaded before the run
            continue
        try:
            pools = read_pools(planned.spec)
        except DataError as error:
            problems.append(planned.problem("data", str(error)))
            continue
        found = check_prompts(planned.spec, pools)
        problems += [planned.problem(field, problem) for field, problem in found.problems]
        described.append([*describe(pools), *found.lines])
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return described


def _own_algorithm(name: str, args: str, check: bool) -> None:
    """Describe or check an algorithm of the user's own."""
    from troupe.orchestrator.algorithms.custom import report
    from troupe.orchestrator.algorithms.description import describe_row
    from troupe.orchestrator.algorithms.section import custom_row
    from troupe.workers.algorithms.custom_checks import check_custom
    from troupe.workers.contract.config import CustomConfig

    try:
        values = yaml.safe_load(args)
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"--args: expected a YAML mapping, as in '{{beta: 0.1}}', got {args[:60]!r}")
    try:
        config = CustomConfig(name=name, args=values)
        row = custom_row(config)
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from None
    if not check:
        typer.echo(describe_row(row))
        return
    checks = check_custom(config)
    typer.echo(report(checks))
    if any(one.problem for one in checks):
        sys.exit(FAILURE)


def _request(planned: PlannedRun, resume: bool, address: str | None) -> RunRequest | None:
    """The request for one run; None where it resumes a run that is already complete.

    `--resume` resumes a plain spec; in a chain it skips complete stages, resumes the interrupted one and starts the
    rest.
    """
    from troupe.orchestrator.run import RunRequest, saved_step

    request = RunRequest(planned.spec, planned.out, resume, address)
    if not resume:
        return request
    done = saved_step(request)
    if done >= planned.spec.schedule.steps:
        return None
    return replace(request, resume=done > 0) if planned.stage else request


def _nodes(cluster: str | None, address: str | None, cpus: int, gib: float) -> list[Node] | None:
    """Nodes of the cluster that --cluster or --address names; None: this machine."""
    if cluster is not None and cluster != "auto":
        from troupe.orchestrator.capacity.plan import described_nodes

        return described_nodes(cluster, cpus, gib)
    if cluster is None and address is None:
        return None
    from troupe.orchestrator.cluster.ray_cluster import Cluster

    return Cluster.list_nodes(address or "auto")


if __name__ == "__main__":
    main()
