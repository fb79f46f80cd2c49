"""Any spec from its file: which kind it is, the algorithm's row says."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrator import spec_files, spec_yaml
from orchestrator.algorithms import ALGORITHMS, unknown_algorithm
from orchestrator.algorithms_offline import OFFLINE_ALGORITHMS
from orchestrator.spec import Spec, parse_spec
from orchestrator.spec_errors import Problem, Source, SpecError, from_validation, nearest
from orchestrator.spec_offline import OfflineSpec

AnySpec = Spec | OfflineSpec
"""A spec of either kind."""


def parse_any(document: spec_yaml.Document) -> AnySpec:
    """Validate a document. Raises SpecError."""
    name = _algorithm(document.data)
    if name not in OFFLINE_ALGORITHMS:
        hint = nearest(name, [*ALGORITHMS, *OFFLINE_ALGORITHMS])
        if name and not any(f"'{known}'" in hint for known in ALGORITHMS):
            # Read as a spec of the wrong kind it would be wrong from top to bottom, and it is one name.
            raise SpecError([document.source.problem("algorithm.name", unknown_algorithm(name))])
        return parse_spec(document)
    try:
        return OfflineSpec.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise SpecError(from_validation(error, OfflineSpec, document.data, document.source)) from None


def _algorithm(data: Any) -> str:
    """The algorithm a spec's data name; empty where they name none."""
    section = data.get("algorithm") if isinstance(data, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else ""


def missing(spec: AnySpec, source: Source) -> list[Problem]:
    """What the spec names and this machine does not have: models, data, libraries. Empty: all there."""
    found = spec_files.missing_offline(spec) if isinstance(spec, OfflineSpec) else spec_files.missing(spec)
    return [source.problem(path, message) for path, message in found]


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
