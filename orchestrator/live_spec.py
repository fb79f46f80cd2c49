"""What of a spec may change while its run goes on, and how two specs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.spec import Spec, parse_spec
from orchestrator.spec_errors import Place, Source, parse_path
from orchestrator.spec_paths import absolute_paths
from orchestrator.spec_yaml import Document

_AT_THE_START = "it is read when a run starts: stop this one, which saves it, and go on with --resume"
_WITH_THE_POLICY = "rollout lives with the policy: there is an engine for each policy worker"


@dataclass(frozen=True)
class Difference:
    """One field that two specs do not agree on."""

    field: str
    old: Any
    new: Any
    refused: str = ""
    """Why it cannot change while the run goes on; empty: it can."""

    def __str__(self) -> str:
        told = f"{self.field}: {_shown(self.old)} -> {_shown(self.new)}"
        return f"{told}: refused: {self.refused}" if self.refused else told


def live_fields(spec: Spec) -> frozenset[str]:
    """Fields that may change while the run goes on."""
    scaled = spec.roles.scaled()
    fields = {f"roles.{role}.{name}" for role in scaled for name in ("workers", "min_workers", "max_workers")}
    return frozenset(fields | ({_AUTOSCALE} if "rollout" in scaled else set()))


def differences(running: Spec, wanted: Spec) -> tuple[Difference, ...]:
    """Every field in which `wanted` departs from the running spec; a path may be written relative or absolute."""
    live = live_fields(running)
    old, new = (dict(_fields(absolute_paths(spec.model_dump(mode="json")))) for spec in (running, wanted))
    found = []
    for field in sorted(old.keys() | new.keys()):
        if old.get(field) != new.get(field):
            found.append(Difference(field, old.get(field), new.get(field), "" if field in live else _why(field)))
    return tuple(found)


def changed(running: Spec, changes: Mapping[str, Any], file: str) -> Spec:
    """The running spec with some fields (dotted path to value) set anew.

    :param file: what errors name as its file
    Raises SpecError where it could not work.
    """
    data = running.model_dump(mode="json")
    for field, value in changes.items():
        *path, last = parse_path(field)
        section: Any = data
        for key in path:
            section = section.setdefault(key, {}) if isinstance(section, dict) else {}
        section[last] = value
    return parse_spec(Document(data, Source(file, top=Place(file))))


def worker_changes(texts: Sequence[str]) -> dict[str, int]:
    """`ROLE=WORKERS` each, as changes of a spec. Raises UsageError."""
    changes = {}
    for text in texts:
        role, _, number = text.partition("=")
        if not (role.isidentifier() and number.isascii() and number.isdecimal()):
            raise UsageError(f"{text[:60]}: expected ROLE=WORKERS, a role and a whole number")
        changes[f"roles.{role}.workers"] = int(number)
    return changes


_AUTOSCALE = "roles.rollout.autoscale"


def _fields(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all that is no section; what changes as a whole is one value."""
    for key, value in node.items():
        field = f"{path}.{key}" if path else key
        if isinstance(value, dict) and field != _AUTOSCALE:
            yield from _fields(value, field)
        else:
            yield field, value


def _why(field: str) -> str:
    return _WITH_THE_POLICY if field in ("roles.rollout.workers", _AUTOSCALE) else _AT_THE_START


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
