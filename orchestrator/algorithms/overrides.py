"""Fields of a section that replace the defaults of an algorithm's losses, made of the models of these losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, Field, create_model
from pydantic.fields import FieldInfo

from troupe.workers.contract.config_base import Frozen

FrozenT = TypeVar("FrozenT", bound=Frozen)


def overrides(
    models: Mapping[type[Frozen], str], without: Collection[str] = ()
) -> Callable[[type[FrozenT]], type[FrozenT]]:
    """Adds the fields of models to a section, where each may be left out (null) for the algorithm's default. A bound
    that may be None in its model is off at 0. Raises ValueError if a field has another type or other bounds in another
    model. `models`: who reads each model, as it stands before the meaning of a field; empty if all do."""
    found: dict[str, dict[str, FieldInfo]] = {}
    for model, readers in models.items():
        for name, info in model.model_fields.items():
            if name not in without:
                found.setdefault(name, {})[readers] = info
    fields: dict[str, Any] = {name: _optional(name, infos) for name, infos in found.items()}

    def add(section: type[FrozenT]) -> type[FrozenT]:
        doc, module = section.__doc__, section.__module__
        without_source = {"use_attribute_docstrings": False}  # pydantic would look for one in every module
        return create_model(
            section.__name__, __base__=section, __doc__=doc, __module__=module, __cls_kwargs__=without_source, **fields
        )

    return add


def overridden(default: FrozenT, given: Mapping[str, Any]) -> FrozenT:
    """The default with the fields that are given: None keeps the default, 0 turns off what may be off."""
    fields = type(default).model_fields
    values = {name: value for name, value in given.items() if name in fields and value is not None}
    off = {name: None for name, value in values.items() if value == 0.0 and _may_be_off(fields[name])}
    return type(default)(**(dict(default) | values | off))


def _may_be_off(info: FieldInfo) -> bool:
    return type(None) in get_args(info.annotation)


def _optional(name: str, infos: Mapping[str, FieldInfo]) -> Any:
    """Definition of a field that replaces the fields of this name in models, by who reads them."""
    first, *others = infos.values()
    if any((one.annotation, one.metadata) != (first.annotation, first.metadata) for one in others):
        raise ValueError(f"models disagree about {name}")
    readers: dict[str, list[str]] = {}
    for who, info in infos.items():
        readers.setdefault(info.description or "", []).append(who)
    meaning = " ".join(_meaning(text, ", ".join(filter(None, who))) for text, who in readers.items())
    annotation: Any = first.annotation
    if _may_be_off(first):
        number = Field(ge=0.0, description=f"{meaning} 0 turns it off.")
        return Annotated[annotation, number, AfterValidator(_off_or_above(first.metadata))], None
    return Annotated[(annotation | None, *first.metadata, Field(description=meaning))], None


def _meaning(text: str, readers: str) -> str:
    return f"{readers}: {text[:1].lower()}{text[1:]}" if readers else text


def _off_or_above(bounds: Collection[Any]) -> Callable[[float | None], float | None]:
    """A check of a number that is 0 or above what its model allows."""
    limits = [asdict(bound) for bound in bounds if is_dataclass(bound) and not isinstance(bound, type)]
    least = next((limit["gt"] for limit in limits if "gt" in limit), 0.0)

    def check(number: float | None) -> float | None:
        if number and number <= least:
            raise ValueError(f"must be greater than {least:g} (or 0, off), got {number}")
        return number

    return check
