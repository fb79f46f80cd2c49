"""The parameters of a user's reward function: Troupe's, verl's by name, and the ones of other libraries, which are
refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_OWN = ({"response", "responses", "completion", "completions"}, {"answer", "answers"}, {"metadata"})
"""Names of parameters for each of the three arguments."""
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_NOT_PASSED = {*_VERL, *(f"{name}s" for name in _VERL), "prompt", "prompts", "query", "queries"}
"""Parameters of the reward functions of verl, TRL and OpenRLHF that expect none of the three."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SignatureProblem(ValueError):
    """A reward function's parameters do not match its call."""


def adapted(function: Callable[..., Any], args: Mapping[str, Any], batched: bool) -> Callable[..., Any]:
    """The function as `f(response, answer, metadata, **args)`, with lists if `batched`.

    A function with verl's parameters (`data_source`, `solution_str`, `ground_truth`, `extra_info`; batched: in the
    plural) is called with them by name. A dict that it returns is its `score`.

    Raises:
        SignatureProblem: it cannot be called so, or would get its arguments in another order.
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
        raise SignatureProblem(f"cannot be called as {wanted}: {error}") from error
    positional = [name for name, parameter in signature.parameters.items() if parameter.kind in _POSITIONAL]
    _require_order(positional[:3], wanted)
    return function


def _require_order(names: Sequence[str], wanted: str) -> None:
    """Raises SignatureProblem if a parameter has the name of a different argument."""
    for place, name in enumerate(names):
        elsewhere = any(name in own and place != other for other, own in enumerate(_OWN))
        if name in _NOT_PASSED or elsewhere:
            raise SignatureProblem(
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
        raise SignatureProblem(f"cannot be called as f({', '.join(names)}, **args), as in verl: {error}") from error

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
