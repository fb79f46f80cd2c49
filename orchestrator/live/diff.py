"""Differences between two specs, and the fields that may change while a run is active."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.orchestrator.errors import UsageError
from troupe.orchestrator.spec.base import RESOLVED_SPEC, RunSpec
from troupe.orchestrator.spec.derived.paths import absolute_paths, with_pins
from troupe.orchestrator.spec.errors import Place, Source, parse_path
from troupe.orchestrator.spec.field_tree import FieldNode, field_tree, live_names
from troupe.orchestrator.spec.load import load_rollout_spec, parse_rollout_spec
from troupe.orchestrator.spec.rollout import RolloutSpec
from troupe.orchestrator.spec.yaml_reader import Document

_ROLE = re.compile(r"[a-z_]+|(environment|teacher)\.[a-z0-9-]+")
_READ_AT_START = "it is read only when a run starts; stop this run, which saves it, and resume with --resume"
_LONGEST = 120
"""Most characters of a value that are shown."""


@dataclass(frozen=True)
class FieldDifference:
    """One field with different values in two specs."""

    field: str
    old: Any
    new: Any
    refused: str = ""
    """Why the field cannot change; empty if it can."""
    note: str = ""
    """What the change means, if it is allowed and that is not obvious."""

    def __str__(self) -> str:
        change = f"{self.field}: {_shown(self.old)} -> {_shown(self.new)}"
        if self.refused:
            return f"{change}: refused: {self.refused}"
        return f"{change} ({self.note})" if self.note else change


@dataclass(frozen=True)
class SpecComparison:
    """Differences between an active run's spec and a new one."""

    differences: tuple[FieldDifference, ...]

    @property
    def changes(self) -> dict[str, Any]:
        """New values (dotted path to value) of the fields that can change now."""
        return {difference.field: difference.new for difference in self.differences if not difference.refused}

    @property
    def refused(self) -> int:
        return len(self.differences) - len(self.changes)

    def lines(self) -> list[str]:
        return [str(difference) for difference in self.differences] or ["no differences"]


def compare(run_folder: Path, wanted: RolloutSpec) -> SpecComparison:
    """Compare the spec in a run folder with a new one. Raises SpecError if the folder holds no valid spec."""
    running = load_rollout_spec(run_folder / RESOLVED_SPEC)
    return SpecComparison(differences(running, with_pins(wanted, running)))


def live_fields(spec: RolloutSpec) -> frozenset[str]:
    """Fields that may change while the run is active."""
    return frozenset(f"roles.{role}.{name}" for role, one in spec.roles.scaled().items() for name in live_names(one))


def differences(running: RolloutSpec, wanted: RolloutSpec) -> tuple[FieldDifference, ...]:
    """Every field that differs between the running spec and `wanted`; relative and absolute paths compare equal."""
    live, why = live_fields(running), "is colocated with the policy, whose workers set the number of engines"
    guests = {f"roles.{name}.workers": f"{name} {why}" for name in running.roles.guests()}
    return tuple(
        FieldDifference(field, old, new, "" if field in live else guests.get(field, _READ_AT_START))
        for field, old, new in field_changes(running, wanted)
    )


def field_changes(old: RunSpec, new: RunSpec) -> list[tuple[str, Any, Any]]:
    """(dotted path, old value, new value) of every field that differs; relative and absolute paths compare equal."""
    before, after = (absolute_paths(spec.model_dump(mode="json")) for spec in (old, new))
    return sorted(_changes(before, after, field_tree(type(old), type(new))), key=lambda change: change[0])


def changed(running: RolloutSpec, changes: Mapping[str, Any], file: str) -> RolloutSpec:
    """The running spec with new values for some fields. Raises SpecError if the changed spec is invalid."""
    data = running.model_dump(mode="json")
    for field, value in changes.items():
        *path, last = parse_path(field)
        section: Any = data
        for key in path:
            section = section.setdefault(key, {}) if isinstance(section, dict) else {}
        section[last] = value
    return parse_rollout_spec(Document(data, Source(file, top=Place(file))))


def worker_changes(texts: Sequence[str]) -> dict[str, int]:
    """Parse `ROLE=WORKERS` arguments into changes of a spec (dotted path to value). Raises UsageError."""
    changes = {}
    for text in texts:
        role, _, number = text.partition("=")
        if not (_ROLE.fullmatch(role) and number.isascii() and number.isdecimal()):
            raise UsageError(f"{text[:60]}: expected ROLE=WORKERS, as in rollout=3 or environment.tools=3")
        changes[f"roles.{role}.workers"] = int(number)
    return changes


def _changes(old: Any, new: Any, fields: FieldNode, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields that differ, down to single values; a section that changes as a whole is one value."""
    if isinstance(old, dict) and isinstance(new, dict) and not (path and fields.at(path).consequences.live):
        for key in old.keys() | new.keys():
            yield from _changes(old.get(key), new.get(key), fields, f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(before, after, fields, f"{path}.{index}")
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
