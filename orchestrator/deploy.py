"""From a spec's file and the flags of `troupe deploy` to the text that is written; the manifests themselves are
`orchestrator/kubernetes.py`, the sbatch script is `orchestrator/slurm.py`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import kubernetes, slurm
from orchestrator.errors import UsageError
from orchestrator.spec_chain import plan_runs, read_document, to_send
from orchestrator.spec_paths import absolute_paths, path_fields

Flags = Mapping[str, Any]
"""Fields of an `Options`, with what the command line gave for them; None where it gave nothing."""

_FLAG_OF = {"claims": "--pvc", "variables": "--env", "secrets": "--env-from-secret"}


@dataclass(frozen=True)
class Request:
    """A spec's file, and what both kinds of deployment want to know."""

    spec: Path
    overrides: Sequence[str] = ()
    name: str | None = None
    out: Path | None = None


def manifest(request: Request, flags: Flags) -> tuple[str, list[str]]:
    """The YAML stream for KubeRay, and what the user should know of it, a line each. Raises SpecError, UsageError."""
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    sent = to_send(document, runs)
    specs = [run.spec for run in runs]
    given = {field: value for field, value in flags.items() if value is not None}
    parsers = {"claims": kubernetes.parse_claim, "variables": kubernetes.parse_variable, "secrets": str}
    for field, parse in parsers.items():
        given[field] = tuple(parse(text) for text in given.get(field, ()))
    if "image" not in given:
        given["image"] = _image("gpu" if any(spec.device == "cuda" for spec in specs) else "cpu")
    options = kubernetes.Options(
        **{
            "name": request.name or sent.name,
            "ray_version": importlib.metadata.version("ray"),  # the images are built with the same
            "out": str(request.out) if request.out is not None else None,
            **given,
        }
    )
    data = absolute_paths(sent.model_dump(mode="json"), Path(options.start))
    documents = kubernetes.manifests(data, specs, options)
    return kubernetes.to_yaml(documents), [] if options.cluster_only else _unmounted(data, options)


def batch_script(request: Request, flags: Flags) -> str:
    """The sbatch script. Raises SpecError, UsageError."""
    document = read_document(request.spec, request.overrides)
    runs = plan_runs(document)
    defaults = {"nodes": 1, "gpus_per_node": 0, "cpus_per_node": 128, "environment": Path(sys.prefix)}
    given = {field: value for field, value in flags.items() if value is not None}
    options = slurm.Options(**defaults | given)
    command = [str(request.spec.absolute())]
    command += [part for override in request.overrides for part in ("--set", override)]
    command += ["--out", str(request.out)] if request.out is not None else []
    return slurm.script(request.name or to_send(document, runs).name, command, [run.spec for run in runs], options)


def refuse(flags: Flags, why: str) -> None:
    """Raises UsageError if any of them was given."""
    for field, value in flags.items():
        if value is not None:
            raise UsageError(f"{_FLAG_OF.get(field, '--' + field.replace('_', '-'))}: {why}")


def write(file: Path, text: str) -> None:
    """Raises UsageError where the file cannot be written."""
    try:
        file.write_text(text)
    except OSError as error:
        raise UsageError(f"--output {file}: {error.strerror or error}") from error


def _unmounted(data: dict[str, Any], options: kubernetes.Options) -> list[str]:
    out = ("output.folder", kubernetes.run_folder(data, options))
    return kubernetes.unmounted([*(f for f in path_fields(data) if f[0] != out[0]), out], options)


def _image(device: str) -> str:
    """The name that docs/deploy.md builds the image under."""
    try:
        return f"troupe-rl:{importlib.metadata.version('troupe-rl')}-{device}"
    except importlib.metadata.PackageNotFoundError:  # run from the source tree
        raise UsageError("--image: is needed where Troupe is not installed as a package") from None
