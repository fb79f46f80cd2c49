"""The file that `troupe deploy` writes: from a spec and the command's flags to a KubeRay manifest
(`orchestrator/platforms/kubernetes/`) or an sbatch script (`orchestrator/platforms/slurm.py`)."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.platforms.flags import KubernetesFlags, SlurmFlags
from orchestrator.platforms.kubernetes.documents import manifests, run_folder, to_yaml, unmounted
from orchestrator.platforms.kubernetes.options import Options, parse_claim, parse_variable
from orchestrator.platforms.slurm import Options as SlurmOptions
from orchestrator.platforms.slurm import script
from orchestrator.spec.paths import absolute_paths, path_fields
from orchestrator.spec.stages import plan_runs, read_document, to_send


@dataclass(frozen=True)
class Request:
    """A spec file and the flags that both platforms share."""

    spec: Path
    overrides: Sequence[str] = ()
    name: str | None = None
    """Name of the job; None: the spec's."""
    out: Path | None = None
    """Run folder as pods or nodes see it; None: the spec's."""


def deployment(
    request: Request, slurm: bool, kubernetes: KubernetesFlags, for_slurm: SlurmFlags
) -> tuple[str, list[str]]:
    """Build the file for Slurm or for Kubernetes.

    Returns:
        The text of the file, and notes for the user, one line each.

    Raises:
        SpecError: The spec is invalid.
        UsageError: A flag is invalid or belongs to the other platform.
    """
    if slurm:
        kubernetes.refuse("not available with --slurm")
        return batch_script(request, for_slurm), []
    for_slurm.refuse("requires --slurm")
    return manifest(request, kubernetes)


def manifest(request: Request, flags: KubernetesFlags) -> tuple[str, list[str]]:
    """Build a KubeRay manifest.

    Returns:
        The YAML stream, and notes for the user, one line each.

    Raises:
        SpecError: The spec is invalid.
        UsageError: A flag is invalid.
    """
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    sent = to_send(document, runs)
    specs = [run.spec for run in runs]
    scalars = {name: value for name, value in flags.given().items() if not isinstance(value, list)}
    if "image" not in scalars:
        scalars["image"] = _image("gpu" if any(spec.device == "cuda" for spec in specs) else "cpu")
    options = Options(
        name=request.name or sent.name,
        ray_version=importlib.metadata.version("ray"),  # the images are built with the same version
        out=str(request.out) if request.out is not None else None,
        claims=tuple(parse_claim(text) for text in flags.pvc),
        variables=tuple(parse_variable(text) for text in flags.env),
        secrets=tuple(flags.env_from_secret),
        **scalars,
    )
    data = absolute_paths(sent.model_dump(mode="json"), Path(options.base))
    text = to_yaml(manifests(data, specs, options))
    return text, [] if options.cluster_only else _unmounted(data, options)


def batch_script(request: Request, flags: SlurmFlags, environment: Path = Path(sys.prefix)) -> str:
    """Build an sbatch script.

    Args:
        request: The spec and the shared flags.
        flags: Size of the Slurm job.
        environment: Virtual environment with Troupe, at the same path on every node.

    Raises:
        SpecError: The spec is invalid.
        UsageError: A flag is invalid, or the nodes cannot hold the run.
    """
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    options = SlurmOptions(environment=environment, **flags.given())
    command = [str(request.spec.absolute())]
    command += [part for override in request.overrides for part in ("--set", override)]
    command += ["--out", str(request.out)] if request.out is not None else []
    return script(request.name or to_send(document, runs).name, command, [run.spec for run in runs], options)


def write(file: Path, text: str) -> None:
    """Write the file. Raises UsageError if it cannot be written."""
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error


def _unmounted(data: dict[str, Any], options: Options) -> list[str]:
    out = ("output.folder", run_folder(data, options))
    return unmounted([*(f for f in path_fields(data) if f[0] != out[0]), out], options)


def _image(device: str) -> str:
    """The name under which docs/guides/clusters.md builds the image."""
    try:
        return f"troupe-rl:{importlib.metadata.version('troupe-rl')}-{device}"
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        raise UsageError("--image: required, because Troupe is not installed as a package") from None
