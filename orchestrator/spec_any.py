"""Any spec from its file: which kind it is, the algorithm's row says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator import spec_files, spec_yaml
from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS
from orchestrator.spec import Spec, parse_spec
from orchestrator.spec_errors import Problem, Source, SpecError, from_validation
from orchestrator.spec_offline import OfflineSpec

AnySpec = Spec | OfflineSpec


@dataclass(frozen=True)
class LoadedAny:
    """A spec, and where each of its fields was written."""

    spec: AnySpec
    source: Source


def read_any(path: str | Path, overrides: Sequence[str] = ()) -> LoadedAny:
    """Read a spec of either kind. Raises SpecError with one line for every problem found."""
    document = spec_yaml.override(spec_yaml.read_file(path), list(overrides))
    return LoadedAny(parse_any(document), document.source)


def parse_any(document: spec_yaml.Document) -> AnySpec:
    """Validate a document. Raises SpecError."""
    if not is_offline(document.data):
        return parse_spec(document)
    try:
        return OfflineSpec.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise SpecError(from_validation(error, OfflineSpec, document.data, document.source)) from None


def is_offline(data: Any) -> bool:
    """Whether a spec's data name an algorithm that trains on given examples."""
    section = data.get("algorithm") if isinstance(data, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    return isinstance(name, str) and name in OFFLINE_ALGORITHMS


def missing(loaded: LoadedAny) -> list[Problem]:
    """What the spec names and this machine does not have: models, data, libraries. Empty: all there."""
    spec = loaded.spec
    found = spec_files.missing_offline(spec) if isinstance(spec, OfflineSpec) else spec_files.missing(spec)
    return [loaded.source.problem(path, message) for path, message in found]


def any_schema() -> dict[str, Any]:
    """JSON Schema of specs of either kind, for editors."""
    either = TypeAdapter(AnySpec).json_schema()
    chain = {
        "title": "Chain",
        "type": "object",
        "required": ["name", "stages"],
        "properties": {"stages": {"type": "object", "additionalProperties": {"type": "object"}}},
    }
    return {**either, "anyOf": [*either["anyOf"], chain]}
