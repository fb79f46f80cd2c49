"""The `troupe` command: thin; every command is one call into the room that does the work."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from orchestrator.errors import StopRequested, TroupeError
from orchestrator.spec_any import any_schema
from orchestrator.spec_chain import ChainDocument, PlannedRun, is_chain, plan_runs, read_document
from orchestrator.spec_errors import SpecError
from orchestrator.spec_offline import OfflineSpec

if TYPE_CHECKING:
    from orchestrator.cast import WorkerClasses

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train language models with RL."
)

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="The YAML spec.")]
SetOption = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the spec.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder of the run (default: runs/NAME).")]
AddressOption = Annotated[str | None, typer.Option("--address", help="Ray cluster to join (default: start one here).")]

USER_ERROR = 2
FAILURE = 1
STOPPED = 130


def main() -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 a failure at run time, 2 a spec or command line that cannot work (each told
    in a line), 130 stopped by SIGINT or SIGTERM, with everything saved."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        app(standalone_mode=True)
    except SpecError as error:
        _leave(str(error), USER_ERROR)
    except StopRequested as error:
        _leave(str(error), STOPPED)
    except TroupeError as error:
        _leave("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), FAILURE)
    sys.exit(0)


def _leave(text: str, code: int) -> NoReturn:
    sys.stderr.write(text + "\n")
    sys.exit(code)


@app.command()
def run(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")] = False,
    address: AddressOption = None,
) -> None:
    """Train: start (or join) Ray, place the workers, run every step."""
    runs = _ready(spec, set_, out)
    from orchestrator.console import Console
    from orchestrator.run import RunRequest, newest_step
    from orchestrator.run import run as run_spec

    for planned in runs:
        request = RunRequest(planned.spec, planned.out, resume, address)
        if planned.stage and resume:
            done = newest_step(request)
            if done is not None and done >= planned.spec.schedule.steps:
                typer.echo(f"{planned.spec.name}: done before, in {planned.out}")
                continue
            request = replace(request, resume=done is not None)  # a stage that has not begun has nothing to resume
        console = Console()
        console.start(planned.spec.name, planned.spec.schedule.steps)
        try:
            outcome = run_spec(request, _worker_classes, console)
            console.finish(outcome.summary(request.out))
        finally:
            console.close()
        if outcome.stopped:
            sys.exit(STOPPED)


@app.command("eval")
def evaluate(
    spec: SpecArgument,
    model: Annotated[Path | None, typer.Option("--model", help="Model folder (default: the spec's).")] = None,
    set_: SetOption = [],  # noqa: B006
    address: AddressOption = None,
) -> None:
    """Evaluate a model on the spec's held-out prompts: engines and reward workers only."""
    overrides = [*set_, f"model.path={json.dumps(str(model))}"] if model is not None else set_
    runs = _ready(spec, overrides)
    if any(planned.stage for planned in runs):
        _leave(f"{spec}: has stages; evaluate with the spec.yaml that a stage's run has written", USER_ERROR)
    loaded = next(planned.spec for planned in runs)
    from orchestrator.console import Console
    from orchestrator.run import RunRequest
    from orchestrator.run import evaluate as evaluate_spec

    console = Console(sys.stderr)  # standard output is the result's alone
    metrics = evaluate_spec(RunRequest(loaded, loaded.run_folder, False, address), _worker_classes, console)
    typer.echo(json.dumps(metrics, indent=2))


@app.command()
def validate(spec: SpecArgument, set_: SetOption = []) -> None:  # noqa: B006
    """Check a spec, and what it names, without starting anything."""
    for planned in _ready(spec, set_):
        loaded = planned.spec
        if isinstance(loaded, OfflineSpec):
            size = f"{loaded.schedule.examples_per_step} examples"
        else:
            size = f"{loaded.samples_per_step} samples"
        typer.echo(f"{spec}: {loaded.name} is valid: {loaded.algorithm.name}, {size} a step")


@app.command()
def plan(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    address: AddressOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="A described cluster, NODESxGPUS[xTYPE], as in 2x8 or 2x8xH200; auto: the live one here."),
    ] = None,
    cpus_per_node: Annotated[int, typer.Option(help="CPUs of a node of --cluster.")] = 128,
    gib_per_node: Annotated[float, typer.Option(help="Host memory of a node of --cluster (0: not checked).")] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: seats, memory in bytes, what does not fit.")
    ] = False,
) -> None:
    """Who goes where and how much memory it takes, part by part, against what the cluster has."""
    runs = plan_runs(read_document(spec, set_))
    from orchestrator import plan as plans
    from orchestrator.memory_plan import Sizes

    if cluster == "auto":
        cluster, address = None, address or "auto"
    if cluster is not None:
        nodes = plans.described_nodes(cluster, cpus_per_node, gib_per_node)
    elif address is not None:
        from orchestrator.actor_group import Cluster

        nodes = Cluster.look(address)
    else:
        nodes = None
    sizes, told, misfit = Sizes(), [], ""
    for planned in runs:
        there = [plans.local_node(os.cpu_count() or 1, planned.spec)] if nodes is None else nodes
        seating = plans.plan(planned.spec, there, sizes)
        trained = sizes.of(planned.spec.model)
        if trained is not None:
            sizes.known[str(planned.model)] = trained  # a later stage may start from it
        told.append(plans.as_json(planned.spec.name, seating))
        if not as_json:
            if planned.stage:
                typer.echo(f"{planned.spec.name}:")
            plans.show(seating)
        misfit = seating.misfit
        if misfit:
            break
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    if misfit:
        _leave(f"{spec}: {misfit}", FAILURE)


@app.command()
def schema() -> None:
    """Print the spec's JSON Schema."""
    typer.echo(json.dumps(any_schema(), indent=2))


@app.command("algorithms")
def algorithms_(name: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None) -> None:
    """List the algorithms, or show one with its formula, source and defaults."""
    from orchestrator.algorithm_reference import description, listing
    from orchestrator.algorithm_table import ALGORITHMS
    from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS
    from orchestrator.spec_errors import nearest

    if name is None:
        typer.echo(listing())
    elif name in ALGORITHMS or name in OFFLINE_ALGORITHMS:
        typer.echo(description(name))
    else:
        hint = nearest(name, [*ALGORITHMS, *OFFLINE_ALGORITHMS]) or "`troupe algorithms` lists them"
        _leave(f"error: no algorithm '{name[:60]}' ({hint})", USER_ERROR)


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the Hugging Face model folder goes.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint (default: the newest valid one).")] = None,
    average: Annotated[bool, typer.Option("--average", help="The moving average of the weights (ema_decay).")] = False,
) -> None:
    """Write a run's trained policy as a Hugging Face folder that transformers and vLLM load."""
    from orchestrator.checkpoint import AVERAGE, MODEL, export_model

    model = AVERAGE if average else MODEL
    typer.echo(f"wrote {export_model(run_folder / 'checkpoints', target, step, model)}")


@app.command()
def submit(
    spec: SpecArgument,
    address: Annotated[str, typer.Option("--address", help="The cluster's job server, http://HOST:8265.")],
    set_: SetOption = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log until it ends.")] = False,
    working_dir: Annotated[Path | None, typer.Option(help="Folder to send along (your reward functions).")] = None,
) -> None:
    """Send a spec to a cluster as a Ray job."""
    document = read_document(spec, set_)
    runs = plan_runs(document)
    loaded = ChainDocument(document.data["name"], document.data) if is_chain(document) else runs[0].spec
    from orchestrator.jobs import submit_spec

    code = submit_spec(loaded, address, follow=follow, working_dir=working_dir, echo=typer.echo)
    sys.exit(code)


def _ready(path: Path, overrides: list[str], out: Path | None = None) -> tuple[PlannedRun, ...]:
    """The runs of a file (one, but for a chain), with everything they name there."""
    runs = plan_runs(read_document(path, overrides), out)
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    return runs


def _worker_classes() -> WorkerClasses:
    from orchestrator.cast import WorkerClasses
    from workers.critic import CriticWorker
    from workers.offline import ExamplePolicyWorker, RewardTrainer
    from workers.policy import PolicyWorker
    from workers.reference import ReferenceWorker
    from workers.reward import RewardWorker
    from workers.rollout import RolloutWorker

    return WorkerClasses(
        RolloutWorker,
        PolicyWorker,
        CriticWorker,
        ReferenceWorker,
        RewardWorker,
        example_policy=ExamplePolicyWorker,
        reward_trainer=RewardTrainer,
    )


if __name__ == "__main__":
    main()
