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

from orchestrator.errors import StopRequested, TroupeError, UsageError
from orchestrator.spec_any import AnySpec, any_schema
from orchestrator.spec_chain import PlannedRun, plan_runs, read_document, to_send
from orchestrator.spec_errors import SpecError
from orchestrator.spec_files import RESOLVED_SPEC
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
JobServerOption = Annotated[str, typer.Option("--address", help="The cluster's job server, http://HOST:8265.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
AnswerOption = Annotated[float, typer.Option("--timeout-s", help="Longest wait for the run's answer, in seconds.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `troupe submit` printed it.")]

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
    except UsageError as error:
        _leave(f"error: {error}", USER_ERROR)
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
    """Evaluate a model on the spec's held-out data: on prompts with engines and reward workers only, on given examples
    with the loss and the figures of its algorithm."""
    runs = plan_runs(read_document(spec, set_))
    if any(planned.stage for planned in runs):
        _leave(f"{spec}: has stages; evaluate with the spec.yaml that a stage's run has written", USER_ERROR)
    overrides = set_ if model is None else [*set_, *_other_model(runs[0].spec, model)]
    loaded = _ready(spec, overrides)[0].spec
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
    from orchestrator.algorithms import unknown_algorithm
    from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS

    if name is None:
        typer.echo(listing())
    elif name in ALGORITHMS or name in OFFLINE_ALGORITHMS:
        typer.echo(description(name))
    else:
        _leave(f"error: {unknown_algorithm(name)}", USER_ERROR)


@app.command()
def export(
    run_folder: RunArgument,
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
    address: JobServerOption,
    set_: SetOption = [],  # noqa: B006
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log until it ends.")] = False,
    job: Annotated[str | None, typer.Option("--submission-id", help="The job's id (default: Ray makes one).")] = None,
    working_dir: Annotated[Path | None, typer.Option(help="Folder to send along (your reward functions).")] = None,
    requirements: Annotated[
        Path | None, typer.Option(help="Requirements file with what your reward functions need, pinned.")
    ] = None,
) -> None:
    """Send a spec to a cluster as a Ray job."""
    document = read_document(spec, set_)
    loaded = to_send(document, plan_runs(document))
    for option, path in (("--working-dir", working_dir), ("--requirements", requirements)):
        if path is not None and not path.exists():
            _leave(f"{option}: no such {'folder' if path is working_dir else 'file'}: {path}", USER_ERROR)
    from orchestrator.jobs import JobServer, Submission

    server = JobServer(address)
    job = server.submit(loaded, Submission(job, working_dir, requirements))
    typer.echo(f"submitted {job}")
    if not follow:
        typer.echo(f"follow it with: troupe logs {job} --address {address} --follow")
    elif not server.follow(job, typer.echo):
        sys.exit(FAILURE)


@app.command()
def jobs(address: JobServerOption) -> None:
    """List a cluster's jobs, the newest first."""
    from orchestrator.jobs import JobServer

    for state in JobServer(address).jobs():
        typer.echo(state.line())


@app.command()
def status(job: JobArgument, address: JobServerOption) -> None:
    """Say how a job stands."""
    from orchestrator.jobs import JobServer

    typer.echo(JobServer(address).state(job).line())


@app.command()
def logs(
    job: JobArgument,
    address: JobServerOption,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends.")] = False,
) -> None:
    """Show what a job prints."""
    from orchestrator.jobs import JobServer

    server = JobServer(address)
    if not follow:
        typer.echo(server.logs(job), nl=False)
    elif not server.follow(job, typer.echo):
        sys.exit(FAILURE)


@app.command()
def stop(
    job: JobArgument,
    address: JobServerOption,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for its end, in seconds.")] = 600.0,
) -> None:
    """Have a job save and leave, and wait for its end; submitting the spec again goes on."""
    from orchestrator.jobs import JobServer

    typer.echo(JobServer(address).stop(job, timeout_s).line())


@app.command()
def scale(
    run_folder: RunArgument,
    workers: Annotated[
        list[str] | None, typer.Argument(metavar="[ROLE=WORKERS]...", help="Number of workers a role should have.")
    ] = None,
    timeout_s: AnswerOption = 30.0,
) -> None:
    """Add or take away workers of a run that goes on; without ROLE=WORKERS, say how its roles stand."""
    from orchestrator.control import ask
    from orchestrator.live_spec import worker_changes

    for state in ask(run_folder, worker_changes(workers or []), timeout_s):
        typer.echo(state)


@app.command()
def apply(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the differences, and change nothing.")] = False,
    timeout_s: AnswerOption = 30.0,
) -> None:
    """Bring a run that goes on up to a changed spec: show what differs, change what can be, refuse the rest."""
    runs = plan_runs(read_document(spec, set_), out)
    from orchestrator.control import ask
    from orchestrator.live_spec import differences
    from orchestrator.spec import Spec, load_spec

    wanted = runs[0].spec
    if runs[0].stage or not isinstance(wanted, Spec):
        _leave(f"{spec}: a spec of one run with rollouts is needed; nothing else changes while it goes on", USER_ERROR)
    found = differences(load_spec(runs[0].out / RESOLVED_SPEC), wanted)
    for difference in found:
        typer.echo(difference)
    if not found:
        typer.echo("nothing differs")
    refused = [difference for difference in found if difference.refused]
    changes = {difference.field: difference.new for difference in found if not difference.refused}
    if not dry_run:
        for state in ask(runs[0].out, changes, timeout_s):
            typer.echo(state)
    if refused:
        _leave(f"{len(refused)} of {len(found)} difference(s) refused", USER_ERROR)


@app.command()
def deploy(
    spec: SpecArgument,
    set_: SetOption = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write (default: print it).")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run, as pods or nodes see it.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job (default: the spec's).")] = None,
    image: Annotated[str | None, typer.Option(help="Image (default: troupe-rl:VERSION-gpu or -cpu).")] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace.")] = None,
    cluster_only: Annotated[bool, typer.Option("--cluster-only", help="A RayCluster without a job.")] = False,
    pvc: Annotated[list[str], typer.Option("--pvc", metavar="CLAIM:/FOLDER", help="Mount a claim in all pods.")] = [],  # noqa: B006
    root: Annotated[str | None, typer.Option(help="Start of relative paths (default: the first --pvc).")] = None,
    env: Annotated[
        list[str], typer.Option("--env", metavar="NAME=SECRET:KEY", help="A variable from a Secret's key.")
    ] = [],  # noqa: B006
    env_from_secret: Annotated[
        list[str], typer.Option("--env-from-secret", metavar="SECRET", help="Every key of a Secret as a variable.")
    ] = [],  # noqa: B006
    auth_secret: Annotated[
        str | None, typer.Option(help="Secret with Ray's token as `auth_token` (default: KubeRay makes one).")
    ] = None,
    shm_gib: Annotated[int | None, typer.Option(help="/dev/shm of a worker pod (default: half its memory).")] = None,
    gib_per_cpu: Annotated[int | None, typer.Option(help="Memory of a pod for each CPU (default 4).")] = None,
    gib_per_gpu: Annotated[int | None, typer.Option(help="Memory of a pod for each GPU (default 64).")] = None,
    ttl_s: Annotated[int | None, typer.Option(help="Seconds a finished cluster is kept (default 300).")] = None,
    retries: Annotated[int | None, typer.Option(help="New clusters after failures (default 1).")] = None,
    deadline_s: Annotated[int | None, typer.Option(help="Longest life (default: the spec's bounds).")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch script instead of a manifest.")] = False,
    nodes: Annotated[int | None, typer.Option(help="With --slurm: nodes (default 1).")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="With --slurm: GPUs of a node (default 0).")] = None,
    cpus_per_node: Annotated[int | None, typer.Option(help="With --slurm: CPUs of a node (default 128).")] = None,
) -> None:
    """Write a spec as a KubeRay manifest, or as an sbatch script for Slurm."""
    for_slurm = {"nodes": nodes, "gpus_per_node": gpus_per_node, "cpus_per_node": cpus_per_node}
    for_kubernetes = {
        "image": image,
        "namespace": namespace,
        "cluster_only": cluster_only or None,
        "claims": pvc or None,
        "root": root,
        "variables": env or None,
        "secrets": env_from_secret or None,
        "auth_secret": auth_secret,
        "shm_gib": shm_gib,
        "gib_per_cpu": gib_per_cpu,
        "gib_per_gpu": gib_per_gpu,
        "ttl_s": ttl_s,
        "retries": retries,
        "deadline_s": deadline_s,
    }
    from orchestrator.deploy import Request, batch_script, manifest, refuse, write

    request = Request(spec, set_, name, out)
    if slurm:
        refuse(for_kubernetes, "is not for --slurm")
        text, notes = batch_script(request, for_slurm), []
    else:
        refuse(for_slurm, "is for --slurm")
        text, notes = manifest(request, for_kubernetes)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if output is None:
        typer.echo(text, nl=False)
    else:
        write(output, text)
        typer.echo(f"wrote {output}")


def _ready(path: Path, overrides: list[str], out: Path | None = None) -> tuple[PlannedRun, ...]:
    """The runs of a file (one, but for a chain), with everything they name there."""
    runs = plan_runs(read_document(path, overrides), out)
    problems = list(dict.fromkeys(problem for planned in runs for problem in planned.missing()))
    if problems:
        raise SpecError(problems)
    return runs


def _other_model(spec: AnySpec, model: Path) -> list[str]:
    """Overrides that put another model in the place of the spec's."""
    overrides = [f"model.path={json.dumps(str(model))}"]
    if isinstance(spec, OfflineSpec) and spec.roles.reference is not None and spec.roles.reference.model is None:
        # What it is compared with stays the model that training started from.
        overrides.append(f"roles.reference.model={spec.model.model_dump_json()}")
    return overrides


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
