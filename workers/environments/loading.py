"""Loading of environments by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.environments.base import Environment

SHIPPED = {
    "agent": "workers.environments.agent:Agent",
    "guess_number": "workers.environments.guess_number:GuessNumber",
    "retry": "workers.environments.retry:Retry",
    "single_turn": "workers.environments.single_turn:SingleTurn",
    "tools": "workers.environments.tools:Tools",
}
METHODS = ("start", "step", "close")


class EnvironmentLoadError(ValueError):
    """An environment cannot be used: unknown, not importable, not an environment, or not with these arguments."""


class EnvironmentArgumentsError(EnvironmentLoadError):
    """An environment does not take its arguments."""


def locate(name: str) -> tuple[str, str]:
    """Module and class of a built-in name or of `package.module:Class`. Imports nothing.

    Raises:
        EnvironmentLoadError: it is neither.
    """
    module, colon, attribute = SHIPPED.get(name, name).partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), attribute]):
        return module, attribute
    near = difflib.get_close_matches(name, SHIPPED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; built-in environments: {', '.join(SHIPPED)}"
    raise EnvironmentLoadError(f"no environment {name!r}: use a built-in name or package.module:Class{hint}")


def load(name: str, args: Mapping[str, Any]) -> Callable[[], Environment]:
    """Import an environment and check that it can be created with its arguments.

    Args:
        name: A built-in name, or `package.module:Class`. The class needs the methods `start`, `step` and `close`; it
            need not derive from `Environment`.
        args: Keyword arguments of the class.

    Returns:
        A function that creates the environment of one episode.

    Raises:
        EnvironmentLoadError: the import fails, or there is no such class, or it is not an environment.
        EnvironmentArgumentsError: it does not take the arguments, or refuses them with a ValueError or TypeError.
    """
    module_name, attribute = locate(name)
    try:
        found = vars(importlib.import_module(module_name)).get(attribute)
    except Exception as error:
        raise EnvironmentLoadError(f"{name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    if found is None:
        raise EnvironmentLoadError(f"{name}: module {module_name} has no {attribute!r}")
    if not inspect.isclass(found):
        raise EnvironmentLoadError(f"{name}: not a class, got {type(found).__name__}")
    if missing := [method for method in METHODS if not callable(inspect.getattr_static(found, method, None))]:
        raise EnvironmentLoadError(f"{name}: has no method {', '.join(missing)}")
    try:
        found(**args)
    except (TypeError, ValueError) as error:
        raise EnvironmentArgumentsError(f"{name}: {error}") from error
    kind: Any = found
    return lambda: kind(**args)


def find_problems(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What is wrong with each of several environments (`name`, `args`), in order.

    Returns:
        (field, message) for each: `name` or `args`; both empty where nothing is wrong.
    """
    return [_problem(environment) for environment in environments]


def _problem(environment: Mapping[str, Any]) -> tuple[str, str]:
    try:
        load(environment["name"], environment["args"])
    except EnvironmentArgumentsError as error:
        return "args", str(error)
    except EnvironmentLoadError as error:
        return "name", str(error)
    return "", ""
