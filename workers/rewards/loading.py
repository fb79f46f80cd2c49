"""From a reward function's name to the function."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

SHIPPED = {
    "equations": "workers.rewards.equations:equations",
    "exact_match": "workers.rewards.functions:exact_match",
    "last_number": "workers.rewards.functions:last_number",
    "length": "workers.rewards.functions:length",
    "letter_share": "workers.rewards.functions:letter_share",
    "numeric": "workers.rewards.numeric:numeric",
    "overlong": "workers.rewards.functions:overlong",
    "reasoning_gym": "workers.rewards.gym:reasoning_gym",
    "regex": "workers.rewards.functions:regex",
}


class RewardFunctionError(ValueError):
    """A reward function that cannot be used: unknown, not importable, not callable, or not with these arguments."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of a shipped name or of `package.module:function`; imports nothing.

    Raises:
        RewardFunctionError: it is neither.
    """
    module, colon, attribute = SHIPPED.get(name, name).partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), attribute]):
        return module, attribute
    near = difflib.get_close_matches(name, SHIPPED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; shipped are {', '.join(SHIPPED)}"
    raise RewardFunctionError(f"no reward function {name!r}: give a shipped name or package.module:function{hint}")


def load(name: str, args: Mapping[str, Any]) -> Callable[..., Any]:
    """Import a reward function and check that it takes (response, answer, metadata, **args).

    Raises:
        RewardFunctionError: the import fails, there is no such function, or it does not take the arguments.
    """
    module_name, attribute = locate(name)
    try:
        function = vars(importlib.import_module(module_name)).get(attribute)
    except Exception as error:
        raise RewardFunctionError(f"{name}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    if function is None:
        raise RewardFunctionError(f"{name}: module {module_name} has no {attribute!r}")
    if not callable(function):
        raise RewardFunctionError(f"{name}: is not callable, but {type(function).__name__}")
    try:
        inspect.signature(function).bind("", "", {}, **args)
    except TypeError as error:
        wanted = "f(response, answer, metadata, **args)"
        raise RewardFunctionError(f"{name}: cannot be called as {wanted}: {error}") from error
    except ValueError:
        pass  # some callables written in C have no signature to check
    return function
