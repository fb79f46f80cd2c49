"""Settings of verl, OpenRLHF and TRL, and the fields of a spec that say the same: the table `migration.yaml`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

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


class Former(NamedTuple):
    """A field that a spec no longer has."""

    values: tuple[Any, ...]
    """Values that say what holds without the field; the first was its default."""
    advice: str
    """Why there is no field, or which one to set instead."""


_LORA = {
    "dropout": Former((0.0,), "it is 0: an update must compute what the sampler and an evaluation compute"),
    "bias": Former(("none",), "it is none: vLLM loads no biases with an adapter"),
    "modules_to_save": Former(([],), "there are none: vLLM loads no whole modules with an adapter"),
}
FORMER_FIELDS: Mapping[str, Former] = {
    "algorithm.packing": Former((None, True), "set roles.policy.packing instead"),
    "data.curriculum.over_sources": Former((False,), "set the weight of each source in data.train"),
    "failures.alarm": Former((None,), "the verdict reward-hacking says it while the run trains"),
    "roles.rollout.autoscale": Former((None,), "change roles.rollout.workers while the run trains: troupe scale"),
    "roles.reward.model_level": Former(("response",), "set roles.reward.model.level instead"),
    "roles.reward.model_separator": Former(("\n\n",), "set roles.reward.model.separator instead"),
    **{f"roles.{role}.lora.{name}": former for role in ("policy", "critic") for name, former in _LORA.items()},
}
"""The fields by their path."""
_NONE = Former((), "")


def without_former_fields(data: Any, path: str = "") -> Any:
    """The data of a spec without former fields, such as the spec in the folder of an older run."""
    if not isinstance(data, dict):
        return data
    paths = {key: f"{path}.{key}" if path else str(key) for key in data}
    kept = {key: value for key, value in data.items() if not _holds_anyway(FORMER_FIELDS.get(paths[key], _NONE), value)}
    return {key: without_former_fields(value, paths[key]) for key, value in kept.items()}


def _holds_anyway(former: Former, value: Any) -> bool:
    """Whether the value is among the former field's: 0 is 0.0, but False is not, nor is 1 True."""
    return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in former.values)


def former_advice(path: Sequence[str]) -> str:
    """What to do about a former field, or an empty text if a spec never had a field at this path."""
    return FORMER_FIELDS.get(".".join(path), _NONE).advice
