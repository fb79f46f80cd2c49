"""Fields that specs of earlier versions have: one that says what holds anyway is left out, any other is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Former(NamedTuple):
    """A field that a spec no longer has."""

    values: tuple[Any, ...]
    """Values that say what holds without the field; the first was its default."""
    advice: str
    """Why there is no field, or which one to set instead."""


_LORA = {
    "dropout": Former((0.0,), "it is 0: an update must compute what the sampler and an evaluation compute"),
    "bias": Former(("none",), "it is none: vLLM loads no biases with an adapter"),
    "modules_to_save": Former(([],), "there are none: vLLM loads no whole modules with an adapter"),
}
FORMER_FIELDS: Mapping[str, Former] = {
    "algorithm.packing": Former((None, True), "set roles.policy.packing instead"),
    "data.curriculum.over_sources": Former((False,), "set the weight of each source in data.train"),
    "failures.alarm": Former((None,), "the verdict reward-hacking says it while the run trains"),
    "roles.rollout.autoscale": Former((None,), "change roles.rollout.workers while the run trains: troupe scale"),
    "roles.reward.model_level": Former(("response",), "set roles.reward.model.level instead"),
    "roles.reward.model_separator": Former(("\n\n",), "set roles.reward.model.separator instead"),
    **{f"roles.{role}.lora.{name}": former for role in ("policy", "critic") for name, former in _LORA.items()},
}
"""The fields by their path."""
_NONE = Former((), "")


def without_former_fields(data: Any, path: str = "") -> Any:
    """The data of a spec without former fields, such as the spec in the folder of an older run."""
    if not isinstance(data, dict):
        return data
    paths = {key: f"{path}.{key}" if path else str(key) for key in data}
    kept = {key: value for key, value in data.items() if not _holds_anyway(FORMER_FIELDS.get(paths[key], _NONE), value)}
    return {key: without_former_fields(value, paths[key]) for key, value in kept.items()}


def _holds_anyway(former: Former, value: Any) -> bool:
    """Whether the value is among the former field's: 0 is 0.0, but False is not, nor is 1 True."""
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in former.values)


def former_advice(path: Sequence[str]) -> str:
    """What to do about a former field, or an empty text if a spec never had a field at this path."""
    return FORMER_FIELDS.get(".".join(path), _NONE).advice
