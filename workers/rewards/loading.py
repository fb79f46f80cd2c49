"""Loading of reward functions by name: Troupe's, a user's, and a user's with verl's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from troupe.workers.contract import imports
from troupe.workers.contract.rewards import COMBINATIONS, ENVIRONMENT_REWARD, JUDGE_REWARD, REWARD_MODEL, SHIPPED

RUN_MODEL_CODE = ("python_tests",)
"""Built-in functions that run code that a model wrote, in a sandbox."""

_SANDBOX_PROBLEM = "troupe.workers.agents.interface:sandbox_problem"
_JUDGE_PROBLEM = "troupe.workers.agents.interface:judge_problem"
"""Named by their paths, as functions are: sandbox and judges build on this folder. A reward function's process imports
neither unless it needs it, and starts in a third of the time without pydantic."""

_OWN = ({"response", "responses", "completion", "completions"}, {"answer", "answers"}, {"metadata"})
"""Names of parameters for each of the three arguments."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_PASSED = {*_VERL, *(f"{name}s" for name in _VERL), "prompt", "prompts", "query", "queries"}
"""Parameters of the reward functions of verl, TRL and OpenRLHF that expect none of the three."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFunctionError(ValueError):
    """A reward function cannot be used: unknown, not importable, not callable, or not with these arguments."""


class RewardArgumentsError(RewardFunctionError):
    """A reward function does not take its arguments."""


def locate(name: str) -> tuple[str, str]:
    """Module and attribute of a built-in name or of `package.module:function`. Imports nothing. Raises
    RewardFunctionError if it is neither."""
    if name == ENVIRONMENT_REWARD:
        raise RewardFunctionError("environment: the sum of an environment's rewards is no function of a response")
    if name == JUDGE_REWARD:
        raise RewardFunctionError("judge: a judge is asked by roles.reward only")
    if name == REWARD_MODEL or name in COMBINATIONS:
        raise RewardFunctionError(f"{name}: a component of rewards, and no function of a response")
    try:
        return imports.locate(name, SHIPPED, "reward function", "package.module:function")
    except imports.NameProblem as error:
        raise RewardFunctionError(str(error)) from error


def load(name: str, args: Mapping[str, Any], batched: bool = False) -> Callable[..., Any]:
    """Import a reward function, to be called with (response, answer, metadata, **args), all lists but `args` if
    `batched`. One with verl's parameters is called with them by name. Raises RewardFunctionError if the import fails or
    there is no such function, and RewardArgumentsError if it does not take the arguments."""
    try:
        function = imports.import_attribute(name, *locate(name))
    except imports.NameProblem as error:
        raise RewardFunctionError(str(error)) from error
    if not callable(function):
        raise RewardFunctionError(f"{name}: not callable, got {type(function).__name__}")
    if inspect.isclass(function):  # a call would return an object, not a number
        raise RewardFunctionError(f"{name}: is a class; name a function, or an object of the class in its module")
    try:
        return _adapted(function, args, batched)
    except RewardArgumentsError as error:
        raise RewardArgumentsError(f"{name}: {error}") from error


def check_machine(name: str) -> None:
    """Verify that this machine can run a reward function: that it permits a sandbox, if the function needs one. Raises
    RewardFunctionError, whose message gives the remedy."""
    if name not in RUN_MODEL_CODE:
        return
    if problem := imports.resolve(_SANDBOX_PROBLEM)():
        raise RewardFunctionError(f"{name}: {problem}")


def find_problems(functions: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield for each of several reward functions (`name`, `args`, `batched`) what is wrong with it: the field and a
    message, both empty without a problem."""
    for function in functions:
        if function["name"] == ENVIRONMENT_REWARD:  # a column of the rollouts, no function
            yield ("args", "environment takes no arguments") if function["args"] else ("", "")
            continue
        if function["name"] == JUDGE_REWARD:
            problem = imports.resolve(_JUDGE_PROBLEM)(function["args"])
            yield ("args", f"judge: {problem}") if problem else ("", "")
            continue
        if function["name"] == REWARD_MODEL or function["name"] in COMBINATIONS:  # the spec's checks read their args
            yield "", ""
            continue
        try:
            load(function["name"], function["args"], bool(function.get("batched")))
        except RewardArgumentsError as error:
            yield "args", str(error)
        except RewardFunctionError as error:
            yield "name", str(error)
        else:
            yield "", ""


def _adapted(function: Callable[..., Any], args: Mapping[str, Any], batched: bool) -> Callable[..., Any]:
    """The function as `f(response, answer, metadata, **args)`, with lists if `batched`.

    A function with verl's parameters (`data_source`, `solution_str`, `ground_truth`, `extra_info`; batched: in the
    plural) is called with them by name. A dict that it returns is its `score`. Raises RewardArgumentsError if it cannot
    be called so, or would get its arguments in another order.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function  # some callables implemented in C have no signature
    verl = tuple(f"{name}s" for name in _VERL) if batched else _VERL
    if set(verl[1:3]) <= set(signature.parameters):
        return _called_as_in_verl(function, signature, verl, args, batched)
    wanted = "f(responses, answers, metadata, **args)" if batched else "f(response, answer, metadata, **args)"
    try:
        signature.bind("", "", {}, **args)
    except TypeError as error:
        raise RewardArgumentsError(f"cannot be called as {wanted}: {error}") from error
    positional = [name for name, parameter in signature.parameters.items() if parameter.kind in _POSITIONAL]
    _require_order(positional[:3], wanted)
    return function


def _require_order(names: Sequence[str], wanted: str) -> None:
    """Raises RewardArgumentsError if a parameter has the name of a different argument."""
    for place, name in enumerate(names):
        elsewhere = any(name in own and place != other for other, own in enumerate(_OWN))
        if name in _NOT_PASSED or elsewhere:
            raise RewardArgumentsError(
                f"cannot be called as {wanted}: its parameters are ({', '.join(names)}), and {name} would get "
                "something else; wrap it in a function of your own"
            )


def _called_as_in_verl(
    function: Callable[..., Any],
    signature: inspect.Signature,
    names: Sequence[str],
    args: Mapping[str, Any],
    batched: bool,
) -> Callable[..., Any]:
    taken = [name for name in names if name in signature.parameters]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        taken = list(names)
    try:
        signature.bind(**dict.fromkeys(taken, ""), **args)
    except TypeError as error:
        raise RewardArgumentsError(f"cannot be called as f({', '.join(names)}, **args), as in verl: {error}") from error

    def given(response: Any, answer: Any, metadata: Any) -> dict[str, Any]:
        values = [None, response, answer, None]
        if batched:
            values[0] = [_data_source(one) for one in metadata] if names[0] in taken else None
            values[3] = [_extra_info(one) for one in metadata]
        else:
            values[0] = _data_source(metadata) if names[0] in taken else None
            values[3] = _extra_info(metadata)
        return {name: value for name, value in zip(names, values, strict=True) if name in taken}

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def wait(response: Any, answer: Any, metadata: Any, **more: Any) -> Any:
            return _scores(await function(**given(response, answer, metadata), **more))

        return wait

    @functools.wraps(function, updated=())
    def call(response: Any, answer: Any, metadata: Any, **more: Any) -> Any:
        return _scores(function(**given(response, answer, metadata), **more))

    return call


def _data_source(metadata: Mapping[str, Any]) -> Any:
    if "data_source" not in metadata:
        raise KeyError("the metadata has no data_source: add the column to data.train.metadata")
    return metadata["data_source"]


def _extra_info(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, and the fields of `extra_info` without its name in front."""
    prefix = "extra_info."
    fields = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    whole = metadata.get("extra_info")
    return {**metadata, **fields, **(whole if isinstance(whole, dict) else {})}


def _scores(result: Any) -> Any:
    """What verl takes as the reward: the number, or the `score` of a dict; of a list, each entry's."""
    if isinstance(result, list):
        return [_scores(one) for one in result]
    return result["score"] if isinstance(result, dict) else result
