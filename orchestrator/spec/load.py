"""Loads specs of both kinds: the algorithm's name decides which kind a document is.

A spec that loads can work as far as the file itself can say. Problems of a document come all at once: either every
field that is not valid, or, if all are, every combination of fields that cannot work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from troupe.orchestrator.algorithms.offline import OFFLINE_ALGORITHMS
from troupe.orchestrator.algorithms.section import is_custom, unknown_algorithm
from troupe.orchestrator.algorithms.table import ALGORITHMS
from troupe.orchestrator.errors import UsageError, nearest
from troupe.orchestrator.spec import yaml_reader
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.chain import Parse, PlannedRun, is_chain, plan_chain
from troupe.orchestrator.spec.checks.combinations import find_problems
from troupe.orchestrator.spec.checks.shared import NEEDS_DISK
from troupe.orchestrator.spec.derived.paths import in_home
from troupe.orchestrator.spec.epochs import in_steps
from troupe.orchestrator.spec.errors import SpecError, from_validation
from troupe.orchestrator.spec.examples import example_name, example_text
from troupe.orchestrator.spec.former_fields import without_former_fields
from troupe.orchestrator.spec.locations import is_url
from troupe.orchestrator.spec.offline import OfflineSpec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.yaml_reader import Document

SpecT = TypeVar("SpecT", bound=RunSpec)


def read_document(path: str | Path, overrides: Sequence[str] = ()) -> yaml_reader.Document:
    """A file, or an example (`examples:NAME`), with its overrides applied. Raises SpecError or UsageError."""
    name = example_name(path)
    document = yaml_reader.read_file(path) if name is None else yaml_reader.parse(example_text(name), str(path))
    return yaml_reader.override(document, list(overrides))


def plan_runs(
    document: yaml_reader.Document, out: Path | None = None, parse: Parse | None = None
) -> tuple[PlannedRun, ...]:
    """Every run of a file, in order; `out` replaces the folder of the run or chain, `parse` reads a run (`parse_spec`).
    Raises SpecError with a line for every problem, UsageError if `out` is a URL."""
    parse = parse or parse_spec
    if out is not None and is_url(out):
        raise UsageError(f"{out} {NEEDS_DISK}")
    if is_chain(document):
        return plan_chain(document, out, parse)
    spec = parse(document)
    return (PlannedRun("", spec, document.source, out or spec.run_folder),)


def parse_spec(document: yaml_reader.Document) -> RunSpec:
    """Validate a document of either kind. Raises SpecError with one line for every problem found."""
    name = _algorithm(document.data)
    if name in OFFLINE_ALGORITHMS:
        return _parse(document, OfflineSpec)
    hint = nearest(name, [*ALGORITHMS, *OFFLINE_ALGORITHMS])
    if name and not is_custom(name) and not any(f"'{known}'" in hint for known in ALGORITHMS):
        # Read as a spec of the wrong kind, every section would be wrong, and the mistake is one name.
        raise SpecError([document.source.problem("algorithm.name", unknown_algorithm(name), "unknown-value")])
    return parse_rollout_spec(document)


def parse_rollout_spec(document: yaml_reader.Document) -> RolloutSpec:
    """Validate a document of a run on rollouts. Raises SpecError with one line for every problem found."""
    return _parse(shared_gpus(document), RolloutSpec)


def load_rollout_spec(path: str | Path, overrides: Sequence[str] = ()) -> RolloutSpec:
    """Read the spec of a run on rollouts from a file. Files of any kind, and chains: `plan_runs`. `overrides`:
    `field.path=value` each (`roles.rollout.workers=2`); the value is YAML. Raises SpecError with one line for every
    problem found."""
    return parse_rollout_spec(yaml_reader.override(yaml_reader.read_file(path), list(overrides)))


def spec_schema() -> dict[str, Any]:
    """JSON Schema of specs of both kinds and of chains, for editors."""
    either = TypeAdapter(RolloutSpec | OfflineSpec).json_schema()
    for kind in ("ScheduleConfig", "OfflineSchedule"):  # `data_epochs` may stand instead
        either["$defs"][kind]["required"].remove("steps")
    chain = {
        "title": "Chain",
        "type": "object",
        "required": ["name", "stages"],
        "properties": {
            "stages": {"type": "object", "additionalProperties": {"type": "object"}},
            "rounds": {"type": "integer", "minimum": 1},
        },
    }
    return {**either, "anyOf": [*either["anyOf"], chain]}


def _parse(document: yaml_reader.Document, kind: type[SpecT]) -> SpecT:
    document = in_steps(document)
    try:
        data = without_former_fields(document.data)
        text = json.dumps(data)
        if '"~' in text:
            text = json.dumps(in_home(data))
        # JSON mode is the strict one that takes lists for tuples: no text is read as a number, no 1 as true.
        spec = kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise SpecError(from_validation(error, kind, document.data, document.source)) from None
    if problems := find_problems(spec):
        raise SpecError([document.source.problem(path, message) for path, message in problems])
    return spec


def _algorithm(data: Any) -> str:
    """The algorithm that a spec's data name; empty if they name none."""
    section = data.get("algorithm") if isinstance(data, dict) else None
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else ""


def shared_gpus(document: Document) -> Document:
    """The document with `workers` and `gpus` of engines on the policy's GPU: one engine of a role per policy worker. A
    whole GPU is shared: roles that reserve no part of it divide what the others leave. An engine over N GPUs has the
    GPUs of N policy workers."""
    roles = document.data.get("roles") if isinstance(document.data, dict) else None
    if not isinstance(roles, dict):
        return document
    policy, guests = roles.get("policy"), _guests(roles)
    if not guests or not isinstance(policy, dict):
        return document
    policies = policy.get("workers", 1)
    ranks = {name: guest.get("tensor_parallel_size", 1) for name, guest in guests.items()}
    if all(type(number) is int and number > 0 for number in (policies, *ranks.values())) and max(ranks.values()) > 1:
        wide = {name: {"workers": max(1, policies // own), "gpus": own} | guests[name] for name, own in ranks.items()}
        filled = wide | {"policy": {"gpus": 1} | policy}
    else:
        filled = _divided({"policy": policy} | {name: {"workers": policies} | one for name, one in guests.items()})
    for name, role in filled.items():
        section, _, key = name.partition(".")
        roles = roles | {section: roles[section] | {key: role} if key else role}
    return replace(document, data=document.data | {"roles": roles})


def _guests(roles: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of engines on the policy's GPUs, by role."""
    teachers = roles.get("teacher")
    named = teachers.items() if isinstance(teachers, dict) else ()
    engines = {f"teacher.{name}": one for name, one in named if isinstance(one, dict) and one.get("kind") == "engine"}
    found = {name: roles.get(name) for name in ("rollout", "reference_engine")} | engines
    return {n: one for n, one in found.items() if isinstance(one, dict) and one.get("colocate_with") == "policy"}


def _divided(sharing: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The roles that share each GPU, with `gpus` unless all reserve a part, or something else is written."""
    parts = {name: _fraction(role) for name, role in sharing.items()}
    given = {name: part for name, part in parts.items() if part is not None and part < 1.0}
    left, others = 1.0 - sum(given.values()), [name for name in parts if name not in given]
    if None in parts.values() or not others or left <= 0.0:
        return sharing
    parts = dict.fromkeys(others, round(left / len(others), 4)) | given
    parts[others[0]] = round(parts[others[0]] + 1.0 - sum(parts.values()), 4)
    return {name: role | {"gpus": parts[name]} for name, role in sharing.items()}


def _fraction(role: dict[str, Any]) -> float | None:
    """Part of a GPU that a role reserves, 1 for the whole or for none written; None if something else is written."""
    gpus = role.get("gpus", 1.0)
    valid = isinstance(gpus, int | float) and not isinstance(gpus, bool) and 0 < gpus <= 1
    return float(gpus) if valid else None
