"""Flags of `troupe deploy` that apply to one platform only, and how a Typer command takes them as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from troupe.orchestrator.errors import UsageError

_nodes = partial(typer.Option, rich_help_panel="Nodes")
_kubernetes = partial(typer.Option, rich_help_panel="Kubernetes")
_slurm = partial(typer.Option, rich_help_panel="Slurm")


@dataclass(frozen=True)
class Flags:
    """Base class; None, False and an empty list mean that the flag was not specified."""

    def given(self) -> dict[str, Any]:
        values = {field.name: vars(self)[field.name] for field in fields(self)}
        # Not `in (None, False, [])`: that would drop 0, which equals False.
        return {name: value for name, value in values.items() if not (value is None or value is False or value == [])}

    def refuse(self, why: str) -> None:
        """Raise UsageError if a flag was specified."""
        for name in self.given():
            raise UsageError(f"--{name.replace('_', '-')}: {why}")


@dataclass(frozen=True)
class NodeFlags(Flags):
    """Size of a node, and its environment: a Slurm node, or a pod on Kubernetes, which is a node to Ray."""

    gpus_per_node: Annotated[
        int | None, _nodes(help="GPUs per Slurm node (default: 0); most GPUs of a pod (default: 8).")
    ] = None
    cpus_per_node: Annotated[
        int | None, _nodes(help="CPUs per Slurm node (default: 128); most CPUs of a pod without GPUs (default: 16).")
    ] = None
    gib_per_node: Annotated[
        int | None, _nodes(help="Memory of a Slurm node, or of a pod with GPUs, in GiB (default: from the plan).")
    ] = None
    env: Annotated[list[str] | None, _nodes("--env", metavar="NAME=VALUE", help="Set an environment variable.")] = None


@dataclass(frozen=True)
class KubernetesFlags(Flags):
    """Flags of a KubeRay manifest."""

    image: Annotated[str | None, _kubernetes(help="Image (default: troupe-rl:VERSION-gpu or -cpu).")] = None
    namespace: Annotated[str | None, _kubernetes(help="Kubernetes namespace.")] = None
    cluster_only: Annotated[bool, _kubernetes("--cluster-only", help="Write a RayCluster without a job.")] = False
    pvc: Annotated[
        list[str] | None,
        _kubernetes("--pvc", metavar="CLAIM:/FOLDER", help="Mount a PersistentVolumeClaim in all pods."),
    ] = None
    root: Annotated[str | None, _kubernetes(help="Base of relative paths (default: the first --pvc).")] = None
    secret_env: Annotated[
        list[str] | None,
        _kubernetes("--secret-env", metavar="NAME=SECRET:KEY", help="Set a variable from a Secret's key."),
    ] = None
    shm_gib: Annotated[
        int | None, _kubernetes(help="Size of /dev/shm of a worker pod, in GiB (default: from the plan).")
    ] = None
    stop_s: Annotated[int | None, _kubernetes(help="Seconds a stopped run has to save (default: 600).")] = None


@dataclass(frozen=True)
class SlurmFlags(Flags):
    """Flags of an sbatch script."""

    nodes: Annotated[int | None, _slurm(help="Number of nodes (default: 1).")] = None
    exclusive: Annotated[bool, _slurm("--exclusive", help="Share the nodes with no other job.")] = False
    requeues: Annotated[
        int | None, _slurm(help="Times the job is queued again at its time limit, to resume (default: 20).")
    ] = None
    pyxis: Annotated[
        str | None, _slurm(metavar="IMAGE", help="Run in a container of Slurm's plugin pyxis (enroot).")
    ] = None
    apptainer: Annotated[str | None, _slurm(metavar="IMAGE", help="Run in a container of Apptainer.")] = None
    mount: Annotated[
        list[str] | None, _slurm("--mount", metavar="/FOLDER[:/INSIDE]", help="Mount a folder in the container.")
    ] = None
    prologue: Annotated[
        Path | None, _slurm(metavar="FILE", help="Bash lines to run first on the first node, such as `module load`.")
    ] = None


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each dataclass parameter of a Typer command by one option per field, in the signature it reads."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(field.name, parameter.kind, default=field.default, annotation=options[field.name])
            for field in fields(groups[name])
        ]

    @wraps(command)
    def flat(**values: Any) -> None:
        flags = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **flags)

    vars(flat)["__signature__"] = inspect.Signature(parameters)
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
