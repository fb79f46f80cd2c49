"""Uploads a trained model to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.hub import client
from troupe.orchestrator.spec.locations import is_name
from troupe.workers.contract.units import MIB


def contents(folder: Path, name: str, *, private: bool) -> Iterator[str]:
    """What a push uploads, line by line.

    Args:
        folder: Folder of the model.
        name: `org/name` of the repository.
        private: Whether a new repository is private.

    Raises:
        UsageError: The name is not one on the hub.
    """
    if not is_name(name):
        raise UsageError(f"--push {name}: expected ORG/NAME, a user or organization and the name of the model")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    kind = "private" if private else "public"
    yield f"{folder} to {client.Repo('model', name).url} ({kind} if it is new):"
    for path, size in zip(files, sizes, strict=True):
        yield f"  {path.relative_to(folder)}  {size / MIB:,.2f} MiB"
    yield f"{len(files)} files, {sum(sizes) / MIB:,.1f} MiB"


def push_model(folder: Path, name: str, *, private: bool) -> str:
    """Uploads the folder and returns the address of the repository. Raises HubError."""
    return client.push(folder, name, private=private, message="Upload a model trained with Troupe")
