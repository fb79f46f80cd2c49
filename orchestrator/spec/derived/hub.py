"""Repositories on the Hugging Face hub that a spec names, and the commits they are pinned to. Looks nothing up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, TypeVar

from troupe.orchestrator.spec.locations import is_commit, is_hub_name
from troupe.orchestrator.spec.sections import HubFiles
from troupe.workers.contract.config import Frozen, ModelConfig

if TYPE_CHECKING:
    from troupe.orchestrator.spec.base import RunSpec

SpecT = TypeVar("SpecT", bound="RunSpec")


def hub_models(spec: RunSpec) -> dict[str, ModelConfig]:
    """The models that are on the hub, by the dotted path of their section."""
    return {section: model for section, model in spec.models().items() if is_hub_name(model.path)}


def hub_data(spec: RunSpec) -> dict[str, HubFiles]:
    """The data that are on the hub, by the dotted path of their section."""
    sources = spec.data_sources().items()
    return {f"data.{name}": source for name, source in sources if isinstance(source, HubFiles)}


def uses_hub(spec: RunSpec) -> bool:
    """Whether the spec names a model or data on the hub."""
    return bool(hub_models(spec) or hub_data(spec))


def with_sections(spec: SpecT, sections: Mapping[str, Frozen]) -> SpecT:
    """The spec with some sections replaced.

    Args:
        spec: The spec.
        sections: New content by dotted path (`roles.critic.model`); each must exist in the spec.
    """
    for path, section in sections.items():
        spec = _replaced(spec, path.split("."), section)
    return spec


def _replaced(node: Any, path: Sequence[str], section: Frozen) -> Any:
    """A section, or a list or map of sections, with the one at this path replaced."""
    if not path:
        return section
    name, *rest = path
    if isinstance(node, tuple):
        place = int(name)
        return (*node[:place], _replaced(node[place], rest, section), *node[place + 1 :])
    changed = {name: _replaced(dict(node)[name], rest, section)}
    return {**node, **changed} if isinstance(node, dict) else node.model_copy(update=changed)


def with_pins(spec: SpecT, pinned: RunSpec) -> SpecT:
    """The spec with the commits that another spec of the same run is pinned to.

    A section keeps its own revision if that is a commit, or if the other spec names another repository.
    """
    sections: dict[str, Frozen] = {}
    models, data = pinned.models(), hub_data(pinned)
    for section, model in hub_models(spec).items():
        held = models.get(section)
        if held is not None and held.path == model.path and is_commit(held.revision) and not is_commit(model.revision):
            sections[section] = model.model_copy(update={"revision": held.revision})
    for section, source in hub_data(spec).items():
        kept = data.get(section)
        if kept is not None and _same_files(source, kept) and is_commit(kept.revision):
            sections[section] = source.model_copy(update={"revision": kept.revision, "files": kept.files})
    return with_sections(spec, sections)


def _same_files(source: HubFiles, pinned: HubFiles) -> bool:
    """Whether a section can mean the files that another is pinned to.

    These are names in order; the section may have patterns in any order, each matching at least one of them.
    """
    same = (source.dataset_name, source.subset, source.split) == (pinned.dataset_name, pinned.subset, pinned.split)
    if not same or is_commit(source.revision):
        return False
    named = [{name for name in pinned.files if name == one or fnmatch(name, one)} for one in source.files]
    return not named or (all(named) and set().union(*named) == set(pinned.files))
