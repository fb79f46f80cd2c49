"""Packages that only some features need: which extra of `troupe-rl` installs each, and what to say if it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "agents": ("aiohttp", "mcp", "openai"),
    "data": ("datasets", "duckdb", "ijson"),
    "demo": ("gguf",),
    "gym": ("reasoning_gym",),
    "lora": ("peft",),
    "math": ("math_verify",),
    "metrics": ("prometheus_client", "tensorboard"),
    "trackers": ("mlflow", "wandb"),
}
"""Modules by the extra in `pyproject.toml` that installs them."""


class PackageMissing(ValueError):
    """A feature needs a package that is not installed; the message names it, and the command that installs it."""


def missing(module: str) -> str:
    """What a feature needs that imports a module of `EXTRAS`; empty if it is installed. Imports nothing.

    Returns:
        The end of a sentence: `needs the package mcp: pip install 'troupe-rl[agents]'`.
    """
    try:
        there = find_spec(module) is not None
    except ImportError:
        there = False
    if there:
        return ""
    extra = next(extra for extra, modules in EXTRAS.items() if module in modules)
    return f"needs the package {module.replace('_', '-')}: pip install 'troupe-rl[{extra}]'"


def require(module: str, feature: str) -> None:
    """Raise PackageMissing if a feature needs a module of `EXTRAS` that is not installed."""
    if problem := missing(module):
        raise PackageMissing(f"{feature} {problem}")


def missing_for(error: ImportError) -> str:
    """What an import that failed needs, in the form of `missing`; empty if it lacks no package of an extra."""
    module = (error.name or "").partition(".")[0]
    known = any(module in modules for modules in EXTRAS.values())
    return missing(module) if known else ""
