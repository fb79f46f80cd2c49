"""The file that `troupe deploy` writes: from a spec and the command's flags to a KubeRay manifest
(`orchestrator/platforms/kubernetes/`) or an sbatch script (`orchestrator/platforms/slurm.py`)."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.platforms.flags import KubernetesFlags, NodeFlags, SlurmFlags
from troupe.orchestrator.platforms.kubernetes.documents import manifests, notes, to_yaml, unmounted
from troupe.orchestrator.platforms.kubernetes.options import KubernetesOptions
from troupe.orchestrator.platforms.kubernetes.pods import Limits
from troupe.orchestrator.platforms.kubernetes.values import Variable, parse_claim, parse_secret_variable, parse_variable
from troupe.orchestrator.platforms.slurm import Container, Runtime, SlurmOptions, parse_mount, script
from troupe.orchestrator.spec.chain import PlannedRun, to_send
from troupe.orchestrator.spec.derived.paths import absolute_paths
from troupe.orchestrator.spec.examples import example_name
from troupe.orchestrator.spec.load import plan_runs, read_document


@dataclass(frozen=True)
class Request:
    """A spec file and the flags that both platforms share."""

    spec: Path
    overrides: Sequence[str] = ()
    name: str | None = None
    """Name of the job, or None for the spec's."""
    out: Path | None = None
    """Run folder as pods or nodes see it, or None for the spec's."""


def deployment(
    request: Request, slurm: bool, nodes: NodeFlags, kubernetes: KubernetesFlags, for_slurm: SlurmFlags
) -> tuple[str, list[str]]:
    """Build the file for Slurm or for Kubernetes. Returns the text of the file, and notes for the user, one line each.
    Raises SpecError if the spec is invalid; UsageError if a flag is invalid or belongs to the other platform."""
    if slurm:
        kubernetes.refuse("not available with --slurm")
        return batch_script(request, nodes, for_slurm)
    for_slurm.refuse("requires --slurm")
    return manifest(request, nodes, kubernetes)


def manifest(request: Request, nodes: NodeFlags, flags: KubernetesFlags) -> tuple[str, list[str]]:
    """Build a KubeRay manifest. Returns the YAML stream, and notes for the user, one line each. Raises SpecError if the
    spec is invalid; UsageError if a flag is invalid."""
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    sent = to_send(document, runs)
    options = _options(request, sent.name, runs, nodes, flags)
    data = absolute_paths(sent.model_dump(mode="json"), Path(options.base))
    text = to_yaml(manifests(data, runs, options))
    return text, [*([] if options.cluster_only else unmounted(data, options)), *notes(runs, options)]


def _options(
    request: Request, name: str, runs: Sequence[PlannedRun], nodes: NodeFlags, flags: KubernetesFlags
) -> KubernetesOptions:
    device = "gpu" if any(run.spec.device == "cuda" for run in runs) else "cpu"
    size, given = nodes.given(), flags.given()
    same = ("namespace", "cluster_only", "root", "shm_gib", "stop_s")
    return KubernetesOptions(
        name=request.name or name,
        image=flags.image if flags.image is not None else _image(device),
        ray_version=importlib.metadata.version("ray"),  # the images are built with the same version
        out=str(request.out) if request.out is not None else None,
        claims=tuple(parse_claim(text) for text in flags.pvc or ()),
        variables=_variables(nodes),
        secret_variables=tuple(parse_secret_variable(text) for text in flags.secret_env or ()),
        limits=Limits(gpus=size.get("gpus_per_node", Limits.gpus), cpus=size.get("cpus_per_node", Limits.cpus)),
        gib_per_node=nodes.gib_per_node,
        **{name: given[name] for name in same if name in given},
    )


def batch_script(
    request: Request, nodes: NodeFlags, flags: SlurmFlags, environment: Path = Path(sys.prefix)
) -> tuple[str, list[str]]:
    """(sbatch script, notes for the user); `environment` is at the same path on every node. Raises SpecError;
    UsageError, also if the nodes cannot hold the run."""
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    given = flags.given()
    container = _container(flags, request)
    for name in ("pyxis", "apptainer", "mount", "prologue"):
        given.pop(name, None)
    size = {name: number for name, number in nodes.given().items() if name != "env"}
    options = SlurmOptions(
        environment=None if container else environment,
        variables=_variables(nodes),
        container=container,
        prologue="" if flags.prologue is None else _lines(flags.prologue),
        **size,
        **given,
    )
    command = [str(request.spec if example_name(request.spec) else request.spec.absolute())]
    command += [part for override in request.overrides for part in ("--set", override)]
    command += ["--out", str(request.out)] if request.out is not None else []
    return script(request.name or to_send(document, runs).name, command, runs, options)


def _variables(nodes: NodeFlags) -> tuple[Variable, ...]:
    return tuple(parse_variable(text) for text in nodes.env or ())


def _container(flags: SlurmFlags, request: Request) -> Container | None:
    """The container of a Slurm job. Raises UsageError for flags that contradict each other, or a bad mount."""
    if flags.pyxis is not None and flags.apptainer is not None:
        raise UsageError("--apptainer: give either --pyxis or --apptainer")
    runtime: Runtime = "pyxis" if flags.pyxis is not None else "apptainer"
    image = flags.pyxis if flags.pyxis is not None else flags.apptainer
    if image is None:
        if flags.mount:
            raise UsageError("--mount: needs a container, --pyxis IMAGE or --apptainer IMAGE")
        return None
    mounts = [parse_mount(text) for text in flags.mount or ()]
    if not example_name(request.spec):
        folder = str(request.spec.absolute().parent)
        mounts.append((folder, folder))
    return Container(runtime, image, tuple(dict.fromkeys(mounts)))


def _lines(file: Path) -> str:
    """The text of a prologue. Raises UsageError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").rstrip("\n") + "\n"
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--prologue {file}: {why}") from error


def write(file: Path, text: str) -> None:
    """Write the file. Raises UsageError if it cannot be written."""
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error


def _image(device: str) -> str:
    """The name under which docs/guides/clusters.md builds the image."""
    try:
        return f"troupe-rl:{importlib.metadata.version('troupe-rl')}-{device}"
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        raise UsageError("--image: required, because Troupe is not installed as a package") from None
