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


FORMER_FIELDS: Mapping[tuple[str, str], Former] = {
    ("algorithm", "packing"): Former((None, True), "set roles.policy.packing instead"),
    ("lora", "dropout"): Former((0.0,), "it is 0: an update must compute what the sampler and an evaluation compute"),
    ("lora", "bias"): Former(("none",), "it is none: vLLM loads no biases with an adapter"),
    ("lora", "modules_to_save"): Former(([],), "there are none: vLLM loads no whole modules with an adapter"),
}
"""The fields by the name of their section and their own."""
_NONE = Former((), "")


def without_former_fields(data: Any, section: str = "") -> Any:
    """The data of a spec without former fields, such as the spec in the folder of an older run."""
    if isinstance(data, list):
        return [without_former_fields(item) for item in data]
    if not isinstance(data, dict):
        return data
    left_out = {key for key, value in data.items() if value in FORMER_FIELDS.get((section, key), _NONE).values}
    return {key: without_former_fields(value, key) for key, value in data.items() if key not in left_out}


def former_advice(path: Sequence[str]) -> str:
    """What to do about a former field, or an empty text if a spec never had a field at this path."""
    return FORMER_FIELDS.get((path[-2], path[-1]), _NONE).advice if len(path) > 1 else ""
