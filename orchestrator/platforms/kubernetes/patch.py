"""`troupe deploy --patch FILE`: merges YAML documents over a manifest, as `kubectl patch --type strategic` would.

Mappings are merged, `null` removes a field. Lists whose elements have a name (containers, volumes, environment
variables, worker groups ...) are merged element by element; every other list is replaced. `kubectl` itself cannot do
this for KubeRay's objects: for custom resources it replaces lists as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from troupe.orchestrator.errors import UsageError

_KEYS = {
    "workerGroupSpecs": "groupName",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Field that identifies an element, by the name of the list; as in Kubernetes' own API if that has the list."""
_EVERY = "*"

Document = dict[str, Any]


def read_patches(file: Path) -> tuple[Document, ...]:
    """The documents of a patch file. Raises UsageError."""
    try:
        documents = list(yaml.safe_load_all(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"--patch {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--patch {file}: not YAML: {' '.join(str(error).split())}") from error
    for document in documents:
        if not isinstance(document, dict):
            raise UsageError(f"--patch {file}: expected a mapping, as in {{spec: {{suspend: true}}}}")
    return tuple(documents)


def apply_patches(documents: Sequence[Document], patches: Sequence[Document]) -> list[Document]:
    """The documents with every patch merged over the one of its `kind` (without one: RayJob or RayCluster).

    Raises:
        UsageError: A patch names a kind or an element that the manifest does not have.
    """
    patched = list(documents)
    kinds = [document["kind"] for document in documents]
    main = next(kind for kind in kinds if kind.startswith("Ray"))
    for patch in patches:
        kind = patch.get("kind", main)
        if kind not in kinds:
            raise UsageError(f"--patch: kind: the manifest has no {kind} (it has {', '.join(kinds)})")
        index = kinds.index(kind)
        patched[index] = _merged(patched[index], patch, "")
    return patched


def _merged(value: Any, patch: Any, path: str) -> Any:
    """A value with a patch merged over it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for name, change in patch.items():
        field = f"{path}.{name}" if path else str(name)
        if change is None:
            result.pop(name, None)
        elif name in _KEYS and isinstance(change, list) and isinstance(result.get(name), list):
            result[name] = _merged_list(result[name], change, _KEYS[name], field)
        else:
            result[name] = _merged(result.get(name), change, field)
    return result


def _merged_list(values: list[Any], patch: list[Any], key: str, path: str) -> list[Any]:
    """A list of named elements with a patch merged over it: `*` names every element, `$patch: delete` removes one."""
    result = list(values)
    for change in patch:
        if not isinstance(change, dict) or key not in change:
            raise UsageError(f"--patch: {path}: every element needs a {key}")
        name = change[key]
        chosen = [index for index, value in enumerate(result) if name in (_EVERY, value.get(key))]
        content = {field: content for field, content in change.items() if field != key}
        if content == {"$patch": "delete"}:
            result = [value for index, value in enumerate(result) if index not in chosen]
        elif chosen:
            for index in chosen:
                result[index] = _merged(result[index], content, f"{path}[{name}]")
        elif key == "groupName" or name == _EVERY:
            known = ", ".join(str(value.get(key)) for value in values)
            raise UsageError(f"--patch: {path}: no {key} '{name}' (the manifest has {known})")
        else:
            result.append(_merged(None, change, path))
    return result
