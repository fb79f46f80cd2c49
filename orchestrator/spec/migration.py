"""Settings of verl, OpenRLHF and TRL, and the fields of a spec that say the same: the table `migration.yaml`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import yaml

_TABLE = Path(__file__).with_name("migration.yaml")
_SHOWN = 3


@dataclass(frozen=True)
class Setting:
    """One row: a setting under its names."""

    section: str
    what: str
    verl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    troupe: tuple[str, ...] = ()
    """Fields of a spec; empty if a spec has no such field."""
    note: str = ""
    """What differs, or why there is no field."""
    keys: tuple[str, ...] = ()
    """Further names under which people look for it, with a section where the last name alone says too little."""

    def score(self, path: Sequence[str], fields: Collection[str]) -> int:
        """How many names at the end of a path match the setting's; one of the spec's own `fields` is too little."""
        names = (name.removeprefix("--").split(".") for name in (*self.verl, *self.openrlhf, *self.trl))
        most = max((_common_end(path, name) for name in names), default=0)
        if most > 1 or (most and path[-1] not in fields):
            return most
        return int(any(_common_end(path, (names := key.split("."))) == len(names) for key in self.keys))


@cache
def settings() -> tuple[Setting, ...]:
    """The rows of the table, in its order."""
    sections: Mapping[str, list[dict[str, Any]]] = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return tuple(_setting(section, row) for section, rows in sections.items() for row in rows)


def _setting(section: str, row: Mapping[str, Any]) -> Setting:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Setting(section, **values)


def counterpart(path: Sequence[str], value: Any, known: Collection[str]) -> str:
    """What a spec has instead of another trainer's setting, for an error message; empty if nothing matches. `value`:
    its value; of a section, the settings in it are looked up as well."""
    fields = {field.rpartition(".")[2] for field in known}
    found = _nearest(path, known, fields)
    if found is not None:
        return _describe(found, path[:-1], known)
    inner = ((leaf, _nearest([*path, *leaf], known, fields)) for leaf in _leaves(value))
    texts = (f"{'.'.join(leaf)}: {_describe(row, (), known)}" for leaf, row in inner if row is not None)
    return ", ".join(islice(texts, _SHOWN))


def _nearest(path: Sequence[str], known: Collection[str], fields: Collection[str]) -> Setting | None:
    """The setting with the most names at the end of the path; of equal ones the one of its section, or the first."""
    section = "".join(f"{name}." for name in path[:-1])
    best, rank = None, (0, False)
    for row in settings():
        if row.troupe and not any(field in known for field in row.troupe):
            continue  # a field of the other kind of spec
        score = row.score(path, fields)
        own = (score, bool(section) and any(field.startswith(section) for field in row.troupe))
        if score and own > rank:
            best, rank = row, own
    return best


def _describe(row: Setting, section: Sequence[str], known: Collection[str]) -> str:
    fields = [field for field in row.troupe if field in known]
    if not fields:
        return row.note
    inside = "".join(f"{name}." for name in section)
    names = " and ".join(f"'{field.removeprefix(inside) if inside else field}'" for field in fields)
    return f"did you mean {names}? {row.note}".strip()


def _common_end(path: Sequence[str], name: Sequence[str]) -> int:
    """Number of words at the end of both."""
    pairs = zip(reversed(path), reversed(name), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the settings in a section."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        yield path
