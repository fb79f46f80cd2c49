"""What is imported by name: objects that a spec names, and packages that only some features need."""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class NameProblem(ValueError):
    """A name leads to nothing: it is unknown, its module cannot be imported, or has no such attribute."""


def locate(name: str, shipped: Mapping[str, str], kind: str, form: str) -> tuple[str, str]:
    """Module and attribute of a `shipped` name or of `package.module:attribute`. Raises NameProblem."""
    module, colon, attribute = shipped.get(name, name).partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), attribute]):
        return module, attribute
    near = difflib.get_close_matches(name, shipped, n=1)
    built_in = f"; built-in {kind.rpartition(' ')[2]}s: {', '.join(shipped)}" if shipped else ""
    hint = f"; did you mean {near[0]!r}?" if near else built_in
    use = f"use a built-in name or {form}" if shipped else f"use {form}"
    raise NameProblem(f"no {kind} {name!r}: {use}{hint}")


def import_attribute(name: str, module: str, attribute: str) -> Any:
    """The attribute of a module, which messages call `name`. Raises NameProblem if it cannot be imported."""
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # the module may be the user's
        if isinstance(error, ImportError) and (problem := missing_package_for(error)):
            raise NameProblem(f"{name}: {problem}") from error
        raise NameProblem(f"{name}: cannot import {module}: {type(error).__name__}: {error}") from error
    if found is None:
        raise NameProblem(f"{name}: module {module} has no {attribute!r}")
    return found


def resolve(path: str) -> Any:
    """What `module:name` in a row of a table names. It is imported here: model libraries take seconds to import."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "agents": ("aiohttp", "mcp", "openai"),
    "data": ("datasets", "duckdb", "ijson"),
    "demo": ("gguf",),
    "gym": ("reasoning_gym",),
    "lora": ("peft",),
    "math": ("math_verify", "sympy"),
    "metrics": ("prometheus_client", "tensorboard"),
    "trackers": ("mlflow", "swanlab", "trackio", "wandb"),
}
"""Modules by the extra in `pyproject.toml` that installs them."""


class PackageMissing(ValueError):
    """A feature needs a package that is not installed; the message names it, and the command that installs it."""


def missing_package(module: str) -> str:
    """The end of a sentence on the package that a module of `EXTRAS` lacks, or empty if installed. Imports nothing."""
    try:
        there = find_spec(module) is not None
    except ImportError:
        there = False
    if there:
        return ""
    extra = next(extra for extra, modules in EXTRAS.items() if module in modules)
    return f"needs the package {module.replace('_', '-')}: pip install 'troupe-rl[{extra}]'"


def require_package(module: str, feature: str) -> None:
    """Raise PackageMissing if a feature needs a module of `EXTRAS` that is not installed."""
    if problem := missing_package(module):
        raise PackageMissing(f"{feature} {problem}")


def missing_package_for(error: ImportError) -> str:
    """What an import that failed needs, in the form of `missing_package`; empty if it lacks no package of an extra."""
    module = (error.name or "").partition(".")[0]
    known = any(module in modules for modules in EXTRAS.values())
    return missing_package(module) if known else ""


class _Later(ModuleType):
    """A module that is imported when something in it is used, not when it is named."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        named = sys.modules.get(self.__name__) is self
        return _Named(self.__name__, name) if named else getattr(importlib.import_module(self.__name__), name)


@dataclass(frozen=True)
class _Named:
    """A function or class of a module that is imported when it is called."""

    module: str
    name: str

    def __call__(self, *values: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*values, **named)


_OF_FEW_TASKS = ("cellpylib", "sympy", "sympy.geometry", "sympy.parsing.sympy_parser", "sympy.polys.monomials")
"""Modules that few tasks of reasoning-gym use, and which take longer to import than all tasks."""


def gym_factory() -> Any:
    """The module `reasoning_gym.factory`. Its package imports every task, but here not what few of them use. Raises
    ImportError."""
    later = {name: sys.modules.setdefault(name, _Later(name)) for name in _OF_FEW_TASKS}
    try:
        with without_collections():
            return importlib.import_module("reasoning_gym.factory")
    finally:
        for name in (name for name, module in later.items() if isinstance(module, _Later)):
            del sys.modules[name]


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block: while a large package is imported, collections take a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each of these packages that is installed."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
