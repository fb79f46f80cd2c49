"""The paths and the repositories on the Hugging Face hub that a spec names, and specs with others in their place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import STAGE
from troupe.orchestrator.spec.checks.adapters import adapter_template
from troupe.orchestrator.spec.field_tree import ITEM, FieldNode, field_tree
from troupe.orchestrator.spec.locations import is_commit, is_hub_name, is_url
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.sources import HubFiles
from troupe.workers.contract.adapter_config import ADAPTER_CONFIG
from troupe.workers.contract.config_base import NO_TEMPLATE, Frozen, ModelConfig
from troupe.workers.contract.consequences import Consequences, PathKind

SpecT = TypeVar("SpecT", bound=RunSpec)
_ON_DISK = "file://"


def absolute_paths(document: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """A dumped spec with paths absolute from `root`, or the current folder; names on the hub stay."""
    start = Path.cwd() if root is None else root
    return _with_paths(document, _fields(), lambda path: str(start / path), start)


def in_home(document: Any) -> Any:
    """A document, valid or not, with the home folder in place of `~` at the beginning of its paths."""
    return _with_paths(document, _fields(), os.path.expanduser, None)


def _with_paths(value: Any, node: FieldNode, change: Callable[[str], str], start: Path | None) -> Any:
    if isinstance(value, dict):
        below = {key: node.child(str(key), one) for key, one in value.items()}
        return {key: _with_paths(one, at, change, start) if (at := below[key]) else one for key, one in value.items()}
    if isinstance(value, list):
        return [_with_paths(one, node.children.get(ITEM, node), change, start) for one in value]
    return change(value) if _is_path(value, node.consequences.path, start) else value


def path_fields(document: Any) -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path on a disk that a dumped spec or chain names."""
    return paths_below(document, _fields())


def paths_below(value: Any, node: FieldNode, field: str = "") -> Iterator[tuple[str, str]]:
    """(dotted field, path) of every path on a disk that a dumped part of a spec names, whose fields are `node`."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if below := node.child(str(key), one):
                yield from paths_below(one, below, f"{field}.{key}" if field else str(key))
    elif node.consequences.path == "store" and isinstance(value, str) and value.startswith(_ON_DISK):
        yield field, unquote(value.removeprefix(_ON_DISK).partition("?")[0])
    elif _is_path(value, node.consequences.path, None):
        yield field, value


@cache
def _fields() -> FieldNode:
    """The fields of a spec of either kind, and of a chain."""
    root = field_tree(RolloutSpec, OfflineSpec)
    stages = FieldNode(Consequences(), children={ITEM: root})
    return replace(root, children=root.children | {"stages": stages})


def _is_path(value: Any, kind: PathKind | None, start: Path | None) -> bool:
    """Whether a field of this kind holds a path, and not a word that stands for something else."""
    if not isinstance(value, str) or kind in (None, "store"):
        return False
    if kind == "template":
        return value != NO_TEMPLATE
    return not (value.startswith(STAGE) or is_url(value) or (kind == "model" and is_hub_name(value, start)))


def hub_models(spec: RunSpec) -> dict[str, ModelConfig]:
    """The models that are on the hub, by the dotted path of their section."""
    return {section: model for section, model in spec.models().items() if is_hub_name(model.path)}


def hub_data(spec: RunSpec) -> dict[str, HubFiles]:
    """The data that are on the hub, by the dotted path of their section."""
    sources = spec.data.sources().items()
    return {f"data.{name}": source for name, source in sources if isinstance(source, HubFiles)}


def uses_hub(spec: RunSpec) -> bool:
    """Whether the spec names a model or data on the hub."""
    return bool(hub_models(spec) or hub_data(spec))


def with_sections(spec: SpecT, sections: Mapping[str, Frozen]) -> SpecT:
    """The spec with some sections replaced. `sections`: new content by dotted path (`roles.critic.model`); each must
    exist in the spec."""
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
    """The spec with the commits that another spec of the same run is pinned to. A section keeps its own revision if
    that is a commit, or if the other spec names another repository."""
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
    """Whether a section can mean the files (names in order) another is pinned to; its patterns each match one."""
    same = (source.dataset_name, source.subset, source.split) == (pinned.dataset_name, pinned.subset, pinned.split)
    if not same or is_commit(source.revision):
        return False
    named = [{name for name in pinned.files if name == one or fnmatch(name, one)} for one in source.files]
    return not named or (all(named) and set().union(*named) == set(pinned.files))


def model_overrides(spec: RunSpec, path: Path) -> list[str]:
    """Overrides that replace the trained model, or add an adapter; a reference on offline data keeps its model."""
    if (path / ADAPTER_CONFIG).is_file():
        overrides = [f"model.adapter={json.dumps(str(path))}", *template_overrides(spec, path)]
    else:
        overrides = [f"model.path={json.dumps(str(path))}", "model.adapter=null", "model.revision=null"]
    reference = spec.roles.reference
    if spec.offline is not None and reference is not None and reference.model is None:
        model = spec.model.model_copy(update={"chat_template": None})  # a reference reads tokens
        overrides.append(f"roles.reference.model={model.model_dump_json()}")
    return overrides


def template_overrides(spec: RunSpec, adapter: Path) -> list[str]:
    """Overrides with which the trained model renders as an adapter was trained, if the spec has no template."""
    trained = None if spec.model.chat_template else adapter_template(adapter, Path(spec.model.path))
    return [] if trained is None else [f"model.chat_template={json.dumps(trained)}"]


def without_adapters(spec: RolloutSpec) -> RolloutSpec:
    """The spec for engines that serve the model that training starts from, without a policy."""
    policy = spec.roles.policy.model_copy(update={"lora": None})
    return spec.model_copy(update={"roles": spec.roles.model_copy(update={"policy": policy})})
