"""The features of a run as fields of its spec, and which of them the spec refuses together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from tests.pairs.covering import Pair, Row, Value, covering_rows, fewer_rows, pairs_in, pairs_of
from troupe.orchestrator.spec.base import RunSpec
from troupe.orchestrator.spec.errors import Source, SpecError, models_in
from troupe.orchestrator.spec.load import parse_spec
from troupe.orchestrator.spec.yaml_reader import Document

ROWS = Path(__file__).with_name("rows.json")
"""The rows of each matrix: the values of its factors, in their order."""
Fields = Mapping[str, Any]
"""Values by the path of their field. A path that ends in `+` adds an item to a list; one that ends in `?` sets a field
only if the spec has the section around it."""


@dataclass(frozen=True)
class Matrix:
    """Factors with one value each in a run, and the spec that the values are added to."""

    name: str
    base: Fields
    factors: Mapping[str, Mapping[str, Fields]]
    """The fields that each value of a factor sets. The first value of a factor is the plainest."""
    needs: Mapping[Value, Value] = field(default_factory=dict)
    """The value of another factor that a value needs, if the other factor has none."""

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Names of the values of each factor."""
        return {name: tuple(values) for name, values in self.factors.items()}

    def document(self, row: Mapping[str, str]) -> dict[str, Any]:
        """The spec of a row; a factor that it lacks has the value that another one needs, or else its first."""
        row = {**dict(self.needs[one] for one in row.items() if one in self.needs), **row}
        spec: dict[str, Any] = {}
        for path, value in self.base.items():
            _set(spec, path, value)
        for name, values in self.factors.items():
            for path, value in values[row.get(name, next(iter(values)))].items():
                _set(spec, path, value)
        return spec

    def problems(self, row: Mapping[str, str]) -> list[str]:
        """Why the spec of a row is refused, each with the path of its field; empty if it is valid."""
        try:
            self.spec(row)
        except SpecError as error:
            return [f"{problem.path}: {problem.message}" for problem in error.problems]
        return []

    def spec(self, row: Mapping[str, str], **places: str) -> RunSpec:
        """The spec of a row.

        Args:
            row: Values of the factors.
            places: What stands for `ADAPTER`, `REWARD_MODEL` and `STORE`.

        Raises:
            SpecError: It is refused.
        """
        text = json.dumps(self.document(row))
        for name, place in places.items():
            text = text.replace(name, place)
        return parse_spec(Document(json.loads(text), Source(self.name)))

    @cached_property
    def refused(self) -> dict[Pair, list[str]]:
        """Why each pair is refused, of the pairs that are; all other factors have their first values."""
        asked = {pair: self.problems(dict(pair)) for pair in pairs_of(self.values)}
        return {pair: problems for pair, problems in asked.items() if problems}

    def covering_rows(self) -> list[Row]:
        """Rows with all pairs that are not refused. This takes some minutes: `rows` are recorded ones."""

        def allowed(row: Row) -> bool:
            return not self.problems(row)

        rows, lost = covering_rows(self.values, self.refused, allowed)
        if lost:
            raise ValueError(f"in no valid row: {[sorted(pair) for pair in lost]}")
        return fewer_rows(rows, self.refused, allowed)

    @cached_property
    def rows(self) -> list[Row]:
        """The recorded rows (`python -m tests.pairs.record`); rows with most new pairs come first."""
        values = [row.split(", ") for row in json.loads(ROWS.read_text(encoding="utf-8"))[self.name]]
        return [dict(zip(self.values, row, strict=True)) for row in values]

    def share(self, rows: int) -> float:
        """Share of the pairs of all rows that occur in the first ones."""
        covered = [pairs_in(row) for row in self.rows]
        return len(set[Pair]().union(*covered[:rows])) / len(set[Pair]().union(*covered))

    def fields(self, factor: str) -> set[str]:
        """Paths of the fields that the values of a factor set, without numbers of items."""
        found = {
            part
            for fields in self.factors[factor].values()
            for path, value in fields.items()
            for part in _paths(path.rstrip("+?"), value)
        }
        return {".".join(part for part in path.split(".") if not part.isdecimal()) for path in found}


def switches(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Paths of the fields that turn something on or choose: flags, choices by name, and sections that can be absent."""
    for name, info in model.model_fields.items():
        path, below = above + name, list(dict.fromkeys(models_in(info.annotation)))
        optional = type(None) in get_args(info.annotation) and bool(below)
        if optional or _chooses(info.annotation):
            yield path
        if below:
            yield from (one for part in below for one in switches(part, f"{path}."))


def _chooses(annotation: Any) -> bool:
    parts = get_args(annotation)
    return annotation is bool or get_origin(annotation) is Literal or any(map(_chooses, parts))


def _paths(path: str, value: Any) -> Iterator[str]:
    """The path of a value, and of all fields in it."""
    yield path
    if isinstance(value, Mapping):
        yield from (one for key, below in value.items() for one in _paths(f"{path}.{key}", below))
    elif isinstance(value, list | tuple):
        yield from (one for below in value for one in _paths(path, below))


def _set(spec: dict[str, Any], path: str, value: Any) -> None:
    """Sets the field at a dotted path; see `Fields`."""
    *above, last = path.rstrip("+?").split(".")
    section: Any = spec
    for key in above:
        if isinstance(section, list):
            section = section[int(key)] if int(key) < len(section) else None
        elif isinstance(section, dict):
            section = section.get(key) if path.endswith("?") else section.setdefault(key, {})
        if section is None:
            return
    if isinstance(section, list) or (path.endswith("?") and not isinstance(section, dict)):
        return
    value = copy.deepcopy(value)
    if path.endswith("+"):
        section.setdefault(last, []).append(value)
    elif isinstance(value, dict) and isinstance(section.get(last), dict):
        section[last] |= value
    else:
        section[last] = value
