"""A spec as an sbatch script that starts Ray on the job's nodes and trains. Pure: starts no process."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.plan.placement import CPUS_PER_NODE, Node
from troupe.orchestrator.plan.plan import Plan, plan_stages
from troupe.orchestrator.platforms.kubernetes.values import Variable
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import PlannedRun
from troupe.workers.contract.units import GIB

_LARGEST = 100_000
"""Upper limit of every resource number: a larger one is a typing error."""
_RAY_GIB = 1
"""Memory of Ray's own processes on a node."""
_HEADROOM = 1.1


Runtime = Literal["pyxis", "apptainer"]


@dataclass(frozen=True)
class Container:
    """A container in which Ray and the run are started on every node."""

    runtime: Runtime
    image: str
    mounts: tuple[tuple[str, str], ...] = ()
    """(folder on the node, folder inside). The submission folder and /tmp are mounted besides."""


@dataclass(frozen=True)
class SlurmOptions:
    """Resources and place of the Slurm job. Raises UsageError for a number out of range."""

    environment: Path | None
    """Virtual environment with Troupe, at the same path on every node, or None for the container's."""
    variables: tuple[Variable, ...] = ()
    container: Container | None = None
    prologue: str = ""
    """Bash lines that the script runs first."""
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int = CPUS_PER_NODE
    gib_per_node: int | None = None
    """Memory of each node. If None, the sum of the plan, or all of it on exclusive nodes."""
    exclusive: bool = False
    """Whether no other job may run on the nodes."""
    requeues: int = 20
    """Times that the job is queued again at its time limit."""
    join_timeout_s: int = 600
    """Longest wait for the nodes to join, in seconds."""
    notice_s: int = 300
    """Seconds before the time limit at which Slurm signals the run to save and exit."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise UsageError(problem)


def _problems(options: SlurmOptions) -> Iterator[str]:
    numbers = {
        "--nodes": (options.nodes, 1),
        "--gpus-per-node": (options.gpus_per_node, 0),
        "--cpus-per-node": (options.cpus_per_node, 1),
        "--gib-per-node": (options.gib_per_node, 1),
        "--requeues": (options.requeues, 0),
    }
    for flag, (number, least) in numbers.items():
        if number is not None and not least <= number <= _LARGEST:
            yield f"{flag}: must be between {least} and {_LARGEST}, got {number}"


def script(
    name: str, command: Sequence[str], runs: Sequence[PlannedRun], options: SlurmOptions
) -> tuple[str, list[str]]:
    """(sbatch script, notes for the user); `command`: arguments of `troupe run` without the address. Raises
    UsageError if the name is invalid, a role requires node labels, or the nodes cannot hold a run."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise UsageError("--name: only letters, digits, '.', '_' and '-' are allowed, starting with a letter or digit")
    plans = list(_plans(runs, options))
    unknown = {model.path: model.why for planned in plans for model in planned.memory.unknown}
    memory = _memory_gib(plans, options) if not unknown or options.exclusive else options.gib_per_node
    lines = [
        f"--job-name={name}",
        f"--nodes={options.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={options.cpus_per_node}",
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *([] if memory is None else [f"--mem={memory}G" if memory else "--mem=0"]),
        *(["--exclusive"] if options.exclusive else []),
        # To the script alone: a signal to all processes would end Ray before the run has saved.
        f"--signal=B:USR1@{options.notice_s}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    numbers = {
        "cpus": options.cpus_per_node,
        "gpus": options.gpus_per_node,
        "join_timeout_s": options.join_timeout_s,
        "requeues": options.requeues,
    }
    text = (
        "#!/bin/bash\n"
        + "".join(f"#SBATCH {line}\n" for line in lines)
        + options.prologue
        + "".join(f"export {each.variable}={shlex.quote(each.value)}\n" for each in options.variables)
        + "# Written by `troupe deploy --slurm`. Pass account, partition and time to sbatch:\n"
        "#   sbatch --partition=... --time=... THIS-FILE\n"
        "# To stop the run so that it saves: scancel --batch --signal=TERM JOB\n"
        f"environment={shlex.quote('' if options.environment is None else str(options.environment))}\n"
        + "".join(f"{name}=({shlex.join(words)})\n" for name, words in _container(options).items())
        + " ".join(f"{key}={value}" for key, value in numbers.items())
        + f"\nrun=(troupe run {shlex.join(command)} --address auto --resume --supervise)\n{_end()}"
    )
    rule = "the job asks for no memory (set --gib-per-node or --exclusive, or deploy where the model is)"
    why = "; ".join(unknown.values())
    return text, [f"memory is not planned ({why}): {rule}"] if memory is None else []


def parse_mount(text: str) -> tuple[str, str]:
    """(folder on the node, folder inside) of `/FOLDER` or `/FOLDER:/INSIDE`. Raises UsageError."""
    outside, _, inside = text.partition(":")
    inside = inside or outside
    if not (outside.startswith("/") and inside.startswith("/")) or "," in text or ":" in inside:
        raise UsageError(f"--mount {text}: expected /FOLDER or /FOLDER:/INSIDE, absolute and without commas")
    return outside, inside


def _container(options: SlurmOptions) -> dict[str, list[str]]:
    """Words of the script: `inside`, in front of a command on a node, and `container`, arguments of srun."""
    if options.container is None:
        return {"inside": [], "container": []}
    mounts = [":".join(mount) for mount in options.container.mounts]
    if options.container.runtime == "pyxis":
        given = ",".join(["/tmp:/tmp", *mounts])
        return {
            "inside": [],
            "container": [f"--container-image={options.container.image}", f"--container-mounts={given}"],
        }
    gpus = ["--nv"] if options.gpus_per_node else []
    binds = [f"--bind={mount}" for mount in ["/tmp:/tmp", *mounts]]
    return {"inside": ["apptainer", "exec", *gpus, *binds, options.container.image], "container": []}


def _plans(runs: Sequence[PlannedRun], options: SlurmOptions) -> Iterator[Plan]:
    memory = (options.gib_per_node or 0) * GIB
    size = (float(options.cpus_per_node), float(options.gpus_per_node), memory)
    nodes = [Node(f"node-{i}", *size) for i in range(options.nodes)]
    for run in runs:
        _refuse_labels(run.spec)
    for _, planned in plan_stages(runs, nodes, advise=True):
        if planned.misfit:
            raise UsageError(planned.misfit)
        yield planned


def _memory_gib(plans: Sequence[Plan], options: SlurmOptions) -> int:
    """Memory of a node in GiB; 0: all of it. It covers what is written to /dev/shm, such as Ray's object store."""
    if options.gib_per_node is not None or options.exclusive:
        return options.gib_per_node or 0
    # Every node may hold a copy of a step's tables; the plan counts them on the first.
    batch = max(part.bytes for planned in plans for part in planned.memory.nodes[0].parts if part.name == "batch")
    workers = max(node.total for planned in plans for node in planned.memory.nodes)
    return math.ceil(_HEADROOM * ((workers + batch) / GIB + _RAY_GIB))


def _refuse_labels(spec: RunSpec) -> None:
    for role, resources in spec.roles.present().items():
        if resources.node_labels:
            why = "Slurm nodes have no Ray labels; select nodes with sbatch --constraint"
            raise UsageError(f"roles.{role}.node_labels: {why}")


def _end() -> str:
    """The part that is the same in every script."""
    return files("troupe.orchestrator.platforms").joinpath("sbatch.sh").read_text(encoding="utf-8")
