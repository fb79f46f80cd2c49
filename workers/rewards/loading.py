"""Loading of reward functions by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.contract import imports
from troupe.workers.contract.rewards import ENVIRONMENT_REWARD, JUDGE_REWARD
from troupe.workers.rewards.signatures import SignatureProblem, adapted

SHIPPED = {
    "equations": "troupe.workers.rewards.equations:equations",
    "exact_match": "troupe.workers.rewards.functions:exact_match",
    "last_number": "troupe.workers.rewards.functions:last_number",
    "length": "troupe.workers.rewards.functions:length",
    "letter_share": "troupe.workers.rewards.functions:letter_share",
    "numeric": "troupe.workers.rewards.numeric:numeric",
    "overlong": "troupe.workers.rewards.functions:overlong",
    "python_tests": "troupe.workers.agents.interface:python_tests",
    "reasoning_gym": "troupe.workers.rewards.gym:reasoning_gym",
    "regex": "troupe.workers.rewards.functions:regex",
}

RUN_MODEL_CODE = ("python_tests",)
"""Built-in functions that run code that a model wrote, in a sandbox."""

_SANDBOX_PROBLEM = "troupe.workers.agents.interface:sandbox_problem"
_JUDGE_PROBLEM = "troupe.workers.agents.interface:judge_problem"
"""Named by their paths, as functions are: sandbox and judges build on this folder. A reward function's process imports
neither unless it needs it, and starts in a third of the time without pydantic."""


class RewardFunctionError(ValueError):
    """A reward function cannot be used: unknown, not importable, not callable, or not with these arguments."""


class RewardArgumentsError(RewardFunctionError):
    """A reward function does not take its arguments."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of a built-in name or of `package.module:function`. Imports nothing.

    Raises:
        RewardFunctionError: it is neither.
    """
    if name == ENVIRONMENT_REWARD:
        raise RewardFunctionError("environment: the sum of an environment's rewards is no function of a response")
    if name == JUDGE_REWARD:
        raise RewardFunctionError("judge: a judge is asked by roles.reward only")
    try:
        return imports.locate(name, SHIPPED, "reward function", "package.module:function")
    except imports.NameProblem as error:
        raise RewardFunctionError(str(error)) from error


def load(name: str, args: Mapping[str, Any], batched: bool = False) -> Callable[..., Any]:
    """Import a reward function, to be called with (response, answer, metadata, **args).

    One with verl's parameters is called with them by name.

    Args:
        name: A built-in name, or `package.module:function`.
        args: Keyword arguments that the function is called with.
        batched: Whether the function takes lists of responses, answers and metadata.

    Raises:
        RewardFunctionError: the import fails or there is no such function.
        RewardArgumentsError: it does not take the arguments.
    """
    try:
        function = imports.import_attribute(name, *locate(name))
    except imports.NameProblem as error:
        raise RewardFunctionError(str(error)) from error
    if not callable(function):
        raise RewardFunctionError(f"{name}: not callable, got {type(function).__name__}")
    if inspect.isclass(function):  # a call would return an object, not a number
        raise RewardFunctionError(f"{name}: is a class; name a function, or an object of the class in its module")
    try:
        return adapted(function, args, batched)
    except SignatureProblem as error:
        raise RewardArgumentsError(f"{name}: {error}") from error


def check_machine(name: str) -> None:
    """Verify that this machine can run a reward function: that it permits a sandbox, if the function needs one.

    Raises:
        RewardFunctionError: it does not; the message gives the remedy.
    """
    if name not in RUN_MODEL_CODE:
        return
    if problem := imports.resolve(_SANDBOX_PROBLEM)():
        raise RewardFunctionError(f"{name}: {problem}")


def find_problems(functions: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What is wrong with each of several reward functions (`name`, `args`, `batched`), in order.

    Yields:
        (field, message) for each function: `name` or `args`; both empty without a problem.
    """
    for function in functions:
        if function["name"] == ENVIRONMENT_REWARD:  # a column of the rollouts, no function
            yield ("args", "environment takes no arguments") if function["args"] else ("", "")
            continue
        if function["name"] == JUDGE_REWARD:
            problem = imports.resolve(_JUDGE_PROBLEM)(function["args"])
            yield ("args", f"judge: {problem}") if problem else ("", "")
            continue
        try:
            load(function["name"], function["args"], bool(function.get("batched")))
        except RewardArgumentsError as error:
            yield "args", str(error)
        except RewardFunctionError as error:
            yield "name", str(error)
        else:
            yield "", ""
