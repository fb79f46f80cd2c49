"""Reads what follows from each field of a spec, as `workers/contract/consequences.py` annotates it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from troupe.orchestrator.spec.errors import models_in
from troupe.workers.contract.consequences import ALLOWED, Consequences, Counts, Resume

ITEM = "*"
"""Key of the items of a list, and of the sections of a map."""
Digest = Literal["evaluation", "reward"]
Wanted = Callable[[Consequences], bool | None]
_BOUNDS = (Counts.BY_SET, Counts.IF_SET)
"""What only bounds the fields of a section: each defines for itself whether it counts."""
_UNSAID = vars(Consequences())


@dataclass
class FieldNode:
    """A field of a spec: what follows from it, and the fields below it."""

    consequences: Consequences
    default: Any = None
    free: bool = False
    """Whether the keys below it are the user's."""
    children: dict[str, FieldNode] = field(default_factory=dict)

    def child(self, key: str, value: Any) -> FieldNode | None:
        """Returns the field of this name and value in a dumped section, the item of a map or list, or None."""
        found = self.children.get(key)
        is_item = found is None or (isinstance(value, dict) and not found.children and not found.free)
        return self.children.get(ITEM, found) if is_item else found

    def at(self, path: str) -> FieldNode:
        """The field at a dotted path; for a key of the user's, the field that holds it."""
        node, parts = self, path.split(".")
        for number, key in enumerate(parts, 1):
            is_section = number < len(parts) and not parts[number].isdigit()
            below = node.child(key, {} if is_section else None)
            if below is None:
                break
            node = below
        return node

    def resume(self, path: str) -> Resume:
        """Whether the field at a dotted path may change when a run resumes."""
        consequences = self.at(path).consequences
        return consequences.itself or consequences.resume or ALLOWED

    def select(self, data: Any, wanted: Wanted, digest: Digest | None = None) -> Any:
        """The fields of a dumped section with these consequences; in a digest, those `AT_DEFAULT` at their default."""
        if isinstance(data, dict) and self.children:
            below = [(key, value, self.child(key, value)) for key, value in data.items()]
            return {key: node.select(value, wanted, digest) for key, value, node in below if node and node._has(wanted)}
        if isinstance(data, list) and ITEM in self.children:
            return [self.children[ITEM].select(value, wanted, digest) for value in data]
        return self.default if digest and getattr(self.consequences, digest) is Counts.AT_DEFAULT else data

    def counted(self, section: BaseModel, digest: Digest, level: Counts) -> dict[str, Any]:
        """The fields of a section that are part of a digest at this level, JSON-ready."""
        data = section.model_dump(mode="json", exclude_defaults=level is Counts.IF_SET)
        levels = (level, Counts.AT_DEFAULT) if level is Counts.YES else (level,)
        found = self.select(data, lambda one: getattr(one, digest) in levels, digest)
        return self._pruned(found, digest) if level is Counts.IF_SET else found

    def _pruned(self, data: Any, digest: Digest) -> Any:
        """The data without sections of fields at their defaults, unless the section itself counts `IF_SET`."""
        if isinstance(data, dict) and self.children:
            below = [(key, value, self.child(key, value)) for key, value in data.items()]
            found = {key: (node._pruned(value, digest), node) for key, value, node in below if node}
            return {key: value for key, (value, node) in found.items() if node._stays(value, digest)}
        if isinstance(data, list) and ITEM in self.children:
            return [self.children[ITEM]._pruned(value, digest) for value in data]
        return data

    def _stays(self, data: Any, digest: Digest) -> bool:
        counts = getattr(self.consequences, digest) is Counts.IF_SET
        return counts or not self.children or data is None or any(data)

    def _has(self, wanted: Wanted) -> bool:
        if self.children:
            return any(node._has(wanted) for node in self.children.values())
        return bool(wanted(self.consequences))


@cache
def field_tree(*models: type[BaseModel]) -> FieldNode:
    """The fields of a model, or of each of several models, with all below them."""
    root = FieldNode(Consequences())
    for model in models:
        _add_fields(root, model, Consequences())
    return root


def decisive(section: BaseModel, digest: Digest) -> dict[str, Any]:
    """The fields of a section that are part of a digest, JSON-ready."""
    fields = field_tree(type(section))
    return _united(fields.counted(section, digest, Counts.YES), fields.counted(section, digest, Counts.IF_SET))


def live_names(section: BaseModel) -> frozenset[str]:
    """Names of the fields of a section that can change while the run is active."""
    children = field_tree(type(section)).children.items()
    return frozenset(name for name, node in children if node.consequences.live)


def _united(one: Any, other: Any) -> Any:
    """Two parts of a dumped section as one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _united(one.get(key), value) for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        return [_united(*pair) for pair in zip(one, other, strict=True)]
    return other


def _add_fields(parent: FieldNode, model: type[BaseModel], around: Consequences) -> None:
    """Adds the fields of one of the models that a section may be."""
    if unknown := around.of.keys() - model.model_fields.keys():
        raise ValueError(f"consequences of {', '.join(sorted(unknown))}: no such field in {model.__name__}")
    for name, info in model.model_fields.items():
        section, parts = any(models_in(info.annotation)), (info.annotation, *get_args(info.annotation))
        defining = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
        here = _below(around, [vars(defining).get("consequences"), *info.metadata], section)
        here = _merged([here, around.of.get(name)])
        free = not section and dict in map(get_origin, parts)
        _add_sections(parent.children.setdefault(name, FieldNode(here, info.default, free)), info.annotation, here)


def _add_sections(node: FieldNode, annotation: Any, here: Consequences) -> None:
    """Adds what an annotation names below a field: sections, lists and maps of them."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and origin is None:
        if issubclass(annotation, BaseModel):
            _add_fields(node, annotation, here)
    elif origin is Annotated:
        own = any(isinstance(item, Consequences) for item in parts)
        _add_sections(node, parts[0], _below(here, parts[1:], section=True) if own else here)
    elif origin in (tuple, dict) and any(models_in(annotation)):
        item = node.children.setdefault(ITEM, FieldNode(replace(here, itself=None)))
        for part in parts:
            _add_sections(item, part, here)
    elif origin is not Literal:
        for part in parts:
            _add_sections(node, part, here)


def _below(around: Consequences, annotations: Iterable[Any], section: bool) -> Consequences:
    own = _merged(annotations)
    return replace(
        own,
        resume=own.resume or around.resume,
        samples=around.samples if own.samples is None else own.samples,
        evaluation=_level(around.evaluation, own.evaluation, section),
        reward=_level(around.reward, own.reward, section),
    )


def _level(around: Counts | None, own: Counts | None, section: bool) -> Counts | None:
    if own is None:
        return around if section or around not in _BOUNDS else None
    return own if section or around is None else min(own, around)


def _merged(annotations: Iterable[Any]) -> Consequences:
    """The consequences among annotations as one; of two values the later one."""
    found = [vars(one).items() for one in annotations if isinstance(one, Consequences)]
    return Consequences(**{name: value for one in found for name, value in one if value != _UNSAID[name]})
