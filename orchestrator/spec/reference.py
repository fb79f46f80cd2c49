"""The reference of the spec, written from its models: `python -m orchestrator.spec_reference > docs/spec.md`."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.spec import Spec
from orchestrator.spec_errors import models_in
from orchestrator.spec_offline import OfflineSpec

_HEAD = """\
# The spec

Written by `python -m orchestrator.spec_reference > docs/spec.md` from the code; a test keeps it current.

A spec is one YAML file (YAML 1.2: `1e-5` is a number, `on` is text; no tags, no anchors; at most 1 MiB). An unknown
field is an error, and so is a combination that cannot work; errors read `file:line: field.path: what is wrong`.
Relative paths start at the current directory. Any field can be set from the command line with its path, the value
in YAML: `--set roles.rollout.workers=2 --set roles.reward.functions.0.weight=0.5`. A default of `-` means that the
field is required; one of `null` that it is off, or left to the algorithm where the section is `algorithm`. In the
titles, `data.train[jsonl]` is the section `data.train` with `kind: jsonl`. The algorithms and their defaults stand in
[algorithms.md](algorithms.md).
"""

_GIVEN = """\
# Specs on given examples

An algorithm that trains on given examples (`sft`, `reward_model`, `dpo`, `ipo`, `orpo`, `kto`, `rrhf`) has a spec of
its own kind: nothing is generated, so there is no rollout, no reward and no sampling. Sections that are not listed
here are those above. See docs/offline.md.
"""

_CHAINS = """\
# Chains

A file with a section `stages` is a chain: `stages` maps names to sections, run in the order they are written. What
stands beside it is shared, and every stage is that with its own section laid over it, section by section; a stage
without `algorithm.name` has the algorithm of its name. A model's path may be `stage:NAME`, the model that the earlier
stage NAME ends with. Stages write to `NAME/` in the chain's folder, and `--resume` passes over those that are done and
goes on inside the one that was interrupted. One stage's field is set by `--set stages.ppo.schedule.steps=3`.
"""

_TYPES: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true / false"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def spec_reference() -> str:
    """Every field of a spec with its type, default and meaning, as Markdown."""
    places: dict[type[BaseModel], list[str]] = {}
    for model, path in _sections(Spec, ""):
        places.setdefault(model, []).append(path)
    given: dict[type[BaseModel], list[str]] = {}
    for model, path in _sections(OfflineSpec, ""):
        if model not in places:
            given.setdefault(model, []).append(path)
    parts = [_HEAD, *(_section(model, paths) for model, paths in places.items())]
    parts += [_GIVEN, *(_section(model, paths) for model, paths in given.items()), _CHAINS]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _sections(model: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The section and, in reading order, the sections in it, each with its path."""
    yield model, path
    for name, info in model.model_fields.items():
        inner = list(models_in(info.annotation))
        for member in inner:
            kind = f"[{_kind(member)}]" if len(inner) > 1 else ""
            listed = ".0" if get_origin(info.annotation) is tuple else ""
            yield from _sections(member, f"{path}.{name}{kind}{listed}".lstrip("."))


def _section(model: type[BaseModel], paths: list[str]) -> str:
    title = ", ".join(f"`{path}`" for path in paths) if paths != [""] else "Top level"
    lines = [f"## {title}", "", " ".join((model.__doc__ or "").split()), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        meaning = " ".join((info.description or "").split())
        cells = (f"`{name}`", _type(info.annotation) + _bounds(info), _default(info), meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _kind(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _type(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if get_origin(annotation) in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(_type(item) for item in arguments if item is not type(None)))
    if get_origin(annotation) is tuple:
        items = [item for item in arguments if item is not Ellipsis]
        each = "sections" if any(models_in(items[0])) else f"{_type(items[0])}s"
        return f"list of {each}" if Ellipsis in arguments else f"list of {len(items)} {each}"
    if any(models_in(annotation)):
        return "section"
    return "free section"


def _bounds(info: FieldInfo) -> str:
    limits: dict[str, Any] = {}
    for item in info.metadata:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            limits |= dataclasses.asdict(item)
    words = [f"{sign} {limits[name]:.12g}" for name, sign in _BOUNDS.items() if name in limits]
    return f", {' and '.join(words)}" if words else ""


def _default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "`{}`"
    if info.default is PydanticUndefined:
        return "-"
    if isinstance(info.default, BaseModel):
        return "its fields' defaults"
    return f"`{as_yaml(info.default)}`"


def as_yaml(value: Any) -> str:
    """A default as it would stand in a spec."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(as_yaml(item) for item in value)}]"
    if isinstance(value, str):
        return f'"{value}"' if not value or "{" in value else value
    return str(value)


if __name__ == "__main__":
    sys.stdout.write(spec_reference())
